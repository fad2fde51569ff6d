"""What a retriever is: queries in, numbers of passages and scores out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Reports progress on an index: what is done (`passages read`), how many so far, and of how many."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


class Hit(NamedTuple):
    """A passage by its number in the corpus, from 0, with its score: `Hit(17, 8.25)`."""

    passage: int
    score: float


class Retriever(Protocol):
    """Finds passages.

    batch: how many waiting queries it gets at once; 1 if a batch saves nothing.
    """

    batch: int

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` passages for each query, best first."""
        ...


def top_hits(scores: npt.NDArray[np.float32], topk: int) -> list[Hit]:
    """Return the at most `topk` best of the scores (`[passages]`) above 0; of equal ones the lower number first."""
    matches = np.flatnonzero(scores > 0)
    if len(matches) > topk:
        least = np.partition(scores[matches], -topk)[-topk]
        matches = matches[scores[matches] >= least]  # ties with the last place are decided below
    best = matches[np.argsort(-scores[matches], kind="stable")[:topk]]
    return [Hit(int(number), float(scores[number])) for number in best]
