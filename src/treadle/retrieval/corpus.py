"""A corpus of passages: JSON lines as published with Search-R1 (`wiki-18.jsonl`), read from the file on demand.

{"id": "0", "contents": "\"Anna Lopez\"\nAnna Lopez works at Acme Motors."}
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from treadle.core.errors import ConfigError, DataError
from treadle.core.text import read_json

Progress = Callable[[str, int, int], None]
"""Reports progress on an index: unit (`passages read`), count so far, and total."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


class Hit(NamedTuple):
    """A passage by its number in the corpus, from 0, with its score: `Hit(17, 8.25)`."""

    passage: int
    score: float


class Retriever(Protocol):
    """Finds passages. batch: number of waiting queries to search at once; 1 if batches save nothing."""

    batch: int

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` passages for each query, best first."""
        ...


def top_hits(scores: npt.NDArray[np.float32], topk: int) -> list[Hit]:
    """Return at most `topk` best scores (`[passages]`) above 0; ties go to the lower number."""
    matches = np.flatnonzero(scores > 0)
    if len(matches) > topk:
        least = np.partition(scores[matches], -topk)[-topk]
        # Ties with the last place are decided below.
        matches = matches[scores[matches] >= least]
    best = matches[np.argsort(-scores[matches], kind="stable")[:topk]]
    return [Hit(int(number), float(scores[number])) for number in best]


Passage = Mapping[str, Any]
"""A row of a corpus; `contents` is its text, the title in the first line."""

_BLOCK = 1 << 24  # bytes searched for line ends in one read


class Corpus:
    """The passages of a JSON-lines file. The file is mapped into memory, and rows are parsed when read.

    path: path of the file. spans: start and end of each row, in bytes, `[passages, 2]` (`find_rows`).
    """

    def __init__(self, path: Path, spans: npt.NDArray[np.int64]) -> None:
        self.path, self._spans = path, spans
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Passage]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Passage:
        """Return a passage. Raises DataError for an invalid row."""
        start, end = self._spans[number].tolist()
        where = f"{self.path}: row {number} (counted from 0)"
        try:
            row = read_json(self._bytes[start:end].decode("utf-8-sig"))
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}; write one object a line") from error
        if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
            raise DataError(f'{where}: a passage is an object with its text in "contents", got {row!r:.100}')
        return row


def find_rows(path: Path, progress: Progress = no_progress) -> npt.NDArray[np.int64]:
    """Return start and end of each row of a JSON-lines file, in bytes, `[rows, 2]`; skips empty lines.

    Raises ConfigError for a file without rows.
    """
    size, ends = path.stat().st_size, []
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            offset = file.tell() - len(block)
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
            progress("MB of the corpus searched for rows", file.tell() // 10**6, size // 10**6)
    last = np.concatenate([*ends, [size]]).astype(np.int64)
    spans = np.stack([np.concatenate([[0], last[:-1] + 1]), last], axis=1)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        raise ConfigError(f"the corpus {str(path)!r} has no passages")
    return spans
