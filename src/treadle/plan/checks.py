"""Results of a dry run: each part it tried, and the memory that a run needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from treadle.core.errors import TreadleError
from treadle.core.registry import extra_of, how_to_install
from treadle.plan.inputs import FirstPrompt

if TYPE_CHECKING:
    from treadle.rendering.chat import ChatRenderer

T = TypeVar("T")
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one part of a run: `MemoryPart("gradients", 538_060_032, "4 bytes x P")`.

    Letters: P weights of the model, A of its adapters, R of the reference, D of the teacher; T tokens of a micro-batch,
    L layers, a of them with attention, m with an MLP, h hidden and i intermediate size, q and k widths of all query and
    of all key heads, V vocabulary. For layers with states, in total (the largest one): S (s) bytes of a sequence's
    states, C (c) bytes kept by autograd per token.
    """

    name: str
    bytes: int
    formula: str
    on_gpu: bool = False


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

    def attempt(self, name: str, work: Callable[[], tuple[T, str]]) -> T | None:
        """Do the work, which returns a part and the check's text; return the part, None if it is missing."""
        if name in self.missing:
            return None
        try:
            made, text = work()
        except TreadleError as error:
            self._add(Check(name, str(error), is_missing=True))
        except ModuleNotFoundError as error:
            if error.name is None or extra_of(error.name) is None:
                raise
            how = f"{error.name} is not installed; {how_to_install(error.name)}"
            self._add(Check(name, how, is_missing=True))
        else:
            # Otherwise more of this part will be tried.
            if text:
                self._add(Check(name, text))
            return made
        return None

    def look(self, name: str, work: Callable[[], object]) -> None:
        """Do work that raises if a part needed later is missing."""
        self.attempt(name, lambda: (work(), ""))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.tell(check)
