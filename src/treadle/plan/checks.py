"""Results of a dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from treadle.core.errors import TreadleError
from treadle.core.registry import extra_of, how_to_install

if TYPE_CHECKING:
    from treadle.plan.memory import MemoryPart
    from treadle.plan.start import FirstPrompt
    from treadle.rendering.chat import ChatRenderer

T = TypeVar("T")
Log = Callable[[str], None]


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

    def attempt(self, name: str, work: Callable[[], T], describe: Callable[[T], str]) -> T | None:
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
