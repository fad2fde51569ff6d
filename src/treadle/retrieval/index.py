"""Opening a corpus with its index, which is built once and kept in Treadle's cache; BM25, which needs no model."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

from treadle.core.errors import ConfigError, DataError
from treadle.core.files import cache_directory, make_room_in_cache
from treadle.retrieval.corpus import Corpus, Hit, Progress, Retriever, find_rows, no_progress, top_hits

_WORD = re.compile(r"\w+")
_STOPWORDS = frozenset(STOPWORDS_EN)
_STEP = 10_000  # passages between two reports of progress


def words(text: str) -> list[str]:
    """Return the words to compare: in lower case, without English stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in _STOPWORDS]


class Bm25(Retriever):
    """Finds passages by BM25 (bm25s, Lucene's variant, k1 1.5, b 0.75). Passages sharing no word are not returned."""

    batch = 1

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str], total: int, progress: Progress = no_progress) -> Bm25:
        """Index `total` texts in memory. Raises DataError if none contains a word."""
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
        tokens = [self._index.get_tokens_ids(words(query)) for query in queries]
        return [top_hits(self._index.get_scores_from_ids(ids), topk) if ids else [] for ids in tokens]


class OpenedCorpus(NamedTuple):
    """A corpus with its retriever."""

    passages: Corpus
    retriever: Retriever


def open_corpus(
    path: Path, model: Path | None = None, index: Path | None = None, progress: Progress = no_progress
) -> OpenedCorpus:
    """Open a corpus of JSON lines; missing parts of its index are built and cached.

    model: directory of a sentence-embedding model, for dense retrieval; default: BM25. index: existing FAISS file of
    its vectors. Raises ConfigError for unreadable or inconsistent inputs.
    """
    if index is not None and model is None:
        raise ConfigError(
            f"the index {str(index)!r} holds vectors, but there is no model to embed queries; name it, too"
        )
    if not path.is_file():
        raise ConfigError(f'no corpus {str(path)!r}; give a file of JSON lines, each with its text in "contents"')
    cache = cache_directory() / "retrieval" / f"{path.stem}-{_fingerprint(path)}"
    rows = _cached(cache / "rows.npy", lambda target: np.save(target, find_rows(path, progress)))
    corpus = Corpus(path, np.load(rows, mmap_mode="r"))
    texts, total = (passage["contents"] for passage in corpus), len(corpus)
    if model is None:
        bm25 = _cached(cache / "bm25", lambda target: Bm25.build(texts, total, progress).save(target))
        return OpenedCorpus(corpus, Bm25.load(bm25))
    from treadle.retrieval.flat import Encoder, FlatIndex  # torch, transformers and FAISS

    encoder = Encoder(model)
    index = index or _cached(
        cache / f"flat-{_fingerprint(*sorted(model.iterdir()))}.index",
        lambda target: FlatIndex.build(texts, total, encoder, progress).save(target),
    )
    retriever = FlatIndex.load(index, encoder)
    if len(retriever) != total:
        raise ConfigError(
            f"the index {str(index)!r} has {len(retriever):,} vectors, the corpus {str(path)!r} {total:,} passages; "
            "give those that belong together"
        )
    return OpenedCorpus(corpus, retriever)


def _fingerprint(*paths: Path) -> str:
    """Return a digest of the files' paths, sizes and times; their contents may be too large to read."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cached(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the path of a file or directory, written first if missing; it is complete or absent."""
    if not target.exists():
        make_room_in_cache(target)
        with TemporaryDirectory(prefix=".building-", dir=target.parent) as building:
            write(Path(building) / target.name)
            try:
                (Path(building) / target.name).rename(target)
            except OSError:
                # Otherwise another process was faster.
                if not target.exists():
                    raise
    return target
