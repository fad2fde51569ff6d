"""BM25, computed by bm25s: words that query and passage share, weighed by how rare they are. Needs no model."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import bm25s
from bm25s.stopwords import STOPWORDS_EN

from treadle.core.errors import DataError
from treadle.retrieval.retriever import Hit, Progress, Retriever, no_progress, top_hits

_WORD = re.compile(r"\w+")
_STOPWORDS = frozenset(STOPWORDS_EN)
_STEP = 10_000  # passages between two reports of progress


def words(text: str) -> list[str]:
    """Return the words that are compared: in lower case, without the commonest of English."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOPWORDS]


class Bm25(Retriever):
    """Finds passages by BM25 (bm25s, Lucene's variant, k1 1.5, b 0.75). Passages that share no word are not found."""

    batch = 1

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str], total: int, progress: Progress = no_progress) -> Bm25:
        """Index the texts, of which there are `total`, in memory. Raises DataError if there is no word in any."""
        vocabulary: dict[str, int] = {}
        rows: list[array[int]] = []
        for text in texts:
            rows.append(array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)]))
            if len(rows) % _STEP == 0 or len(rows) == total:
                progress("passages read", len(rows), total)
        if not vocabulary:
            raise DataError("no passage of the corpus has a word, so that none could be found; check `contents`")
        index = bm25s.BM25()
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index)

    @classmethod
    def load(cls, directory: Path) -> Bm25:
        return cls(bm25s.BM25.load(directory, mmap=True, show_progress=False))

    def save(self, directory: Path) -> None:
        self._index.save(directory, show_progress=False)

    def __len__(self) -> int:
        return int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return at most `topk` passages for each query, best first; none for a query of unknown words."""
        return [self._best(query, topk) for query in queries]

    def _best(self, query: str, topk: int) -> list[Hit]:
        tokens = self._index.get_tokens_ids(words(query))
        return top_hits(self._index.get_scores_from_ids(tokens), topk) if tokens else []
