"""Which weights vLLM's servers may sample with, in each process that calls them: the run's or a server's actor."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.core.engine import VersionSpan
from treadle.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class Admitted:
    """The label of the weights that serve now, and the policy version of each label admitted so far."""

    label: str = ""
    versions: Mapping[str, int] = field(default_factory=dict)

    @property
    def version(self) -> int | None:
        """The version that serves now; None before the first."""
        return self.versions.get(self.label)

    def then(self, label: str, version: int) -> Admitted:
        return Admitted(label, {**self.versions, label: version})

    def salt(self, cache_salt: str | None) -> str:
        """Combine a call's cache salt with the weights, so that no prefix cache is shared between versions."""
        return hashlib.sha256(f"{self.label}|{cache_salt or ''}".encode()).hexdigest()[:32]

    def spans(self, reported: Sequence[Mapping[str, object]]) -> tuple[VersionSpan, ...]:
        """Translate the labels that a server reported into policy versions.

        Raises EngineError for weights that were never admitted.
        """
        spans = []
        for span in reported:
            label = str(span["version"])
            if label not in self.versions:
                raise EngineError(f"weights {label!r} sampled tokens and were never admitted; sample them again")
            spans.append(VersionSpan(self.versions[label], int(str(span["start"])), int(str(span["end"]))))
        return tuple(spans)


class Admission:
    """A gate in front of calls: closed until weights are admitted, and while they change."""

    def __init__(self) -> None:
        self.now = Admitted()
        self._open = asyncio.Event()

    def hold(self) -> None:
        self._open.clear()

    def open(self, admitted: Admitted) -> None:
        self.now = admitted
        self._open.set()

    async def settled(self) -> None:
        """Wait until the gate is open."""
        await self._open.wait()
