"""A dry run tries each part of a recipe, without training, writing or downloading anything, and estimates memory.

    settings, files of models, engine, demonstrations (`checks`) -> data -> callbacks       in a second, without torch
    -> device -> tokenizer -> model, reference, teacher -> engine -> drivers, prompt, demonstrations (`START`)
    -> memory, disk

These are the steps that a run takes. A missing part is reported at once; parts that need it are skipped, and all others
are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from treadle.core.errors import TreadleError
from treadle.core.registry import extra_of, how_to_install
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs, load_data
from treadle.plan.validation import check_settings, checks
from treadle.report.callbacks import load_callbacks

if TYPE_CHECKING:
    from treadle.plan.memory import MemoryPart
    from treadle.plan.start import FirstPrompt
    from treadle.rendering.chat import ChatRenderer

T = TypeVar("T")
Log = Callable[[str], None]


def _text(made: object) -> str:
    return made if isinstance(made, str) else ""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of trying one part: `Check("engine", "no vLLM: ...", is_missing=True)`."""

    name: str
    text: str
    is_missing: bool = False


@dataclass(slots=True)
class DryRun:
    """The result of a dry run. renderer, prompt: None if they could not be made; agents make their own prompts.

    tell: called with each check when it is made.
    """

    tell: Callable[[Check], object]
    checks: list[Check] = field(default_factory=list)
    memory: list[MemoryPart] = field(default_factory=list)
    renderer: ChatRenderer | None = None
    prompt: FirstPrompt | None = None

    @property
    def missing(self) -> list[str]:
        return [check.name for check in self.checks if check.is_missing]

    def attempt(self, name: str, work: Callable[[], T], describe: Callable[[T], str] = _text) -> T | None:
        """Try a part; return what the work makes, None if it is missing. describe: returns the check's text, if any."""
        if name in self.missing:
            return None
        try:
            made = work()
        except TreadleError as error:
            self._add(Check(name, str(error), is_missing=True))
        except ModuleNotFoundError as error:
            if error.name is None or extra_of(error.name) is None:
                raise
            how = f"{error.name} is not installed; {how_to_install(error.name)}"
            self._add(Check(name, how, is_missing=True))
        else:
            if text := describe(made):
                self._add(Check(name, text))
            return made
        return None

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.tell(check)


def try_settings(result: DryRun, config: RunConfig) -> Inputs | None:
    """Try what needs no torch; return tasks and players, None if they are missing."""
    result.attempt("settings", lambda: check_settings(config), lambda _: "they fit together")
    for name, check in checks(config):
        result.attempt(name, check, lambda _: "")
    inputs = result.attempt("data", lambda: load_data(config), _describe_data)
    result.attempt("callbacks", lambda: load_callbacks(config.callbacks), ", ".join)
    return inputs


def _describe_data(inputs: Inputs) -> str:
    names = [name for _, name in inputs.players.by_task]
    held_out = f", {len(inputs.held_out)} held out" if inputs.held_out else ""
    return f"{len(inputs.train)} tasks to train on{held_out}, played by {', '.join(names)}"
