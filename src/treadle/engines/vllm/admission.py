"""Which weights of vLLM's servers are admitted, in every process that calls them.

It is the run's process, and on a cluster also the actor that started a server.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.core.engine import VersionSpan
from treadle.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class Admitted:
    """Holds the label of the weights that serve now, and the version of every label that was admitted."""

    label: str = ""
    versions: Mapping[str, int] = field(default_factory=dict)

    @property
    def version(self) -> int | None:
        """Return the version that serves now; None before the first."""
        return self.versions.get(self.label)

    def then(self, label: str, version: int) -> Admitted:
        """Return this with one more label, which serves from now on."""
        return Admitted(label, {**self.versions, label: version})

    def salt(self, own: str | None) -> str:
        """Return a salt that separates the cached prefixes of these weights and of this `own` salt from all others."""
        return hashlib.sha256(f"{self.label}|{own or ''}".encode()).hexdigest()[:32]

    def spans(self, reported: Sequence[Mapping[str, object]]) -> tuple[VersionSpan, ...]:
        """Return the version spans that a server reported, with labels replaced by policy versions.

        Raises EngineError for weights that were not admitted.
        """
        spans = []
        for span in reported:
            label = str(span["version"])
            if label not in self.versions:
                raise EngineError(f"weights {label!r} sampled tokens and were never admitted; sample them again")
            spans.append(VersionSpan(self.versions[label], int(str(span["start"])), int(str(span["end"]))))
        return tuple(spans)


class Admission:
    """Keeps calls out until weights are admitted, and while it is held."""

    def __init__(self) -> None:
        self.now = Admitted()
        self._open = asyncio.Event()

    def hold(self) -> None:
        """Let no call begin or return until `open`."""
        self._open.clear()

    def open(self, admitted: Admitted) -> None:
        """Let calls go on, under these weights."""
        self.now = admitted
        self._open.set()

    async def settled(self) -> None:
        """Wait until it is open."""
        await self._open.wait()
