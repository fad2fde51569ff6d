"""Opening a corpus with its index, which is built once and then found in Treadle's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from treadle.core.errors import ConfigError
from treadle.core.files import cache_directory
from treadle.retrieval.bm25 import Bm25
from treadle.retrieval.corpus import Corpus, find_rows
from treadle.retrieval.retriever import Progress, Retriever, no_progress


class OpenedCorpus(NamedTuple):
    """A corpus and what finds its passages."""

    passages: Corpus
    retriever: Retriever


def open_corpus(
    path: Path, model: Path | None = None, index: Path | None = None, progress: Progress = no_progress
) -> OpenedCorpus:
    """Open a corpus of JSON lines; what it lacks of its index is built, and kept in the cache.

    model: directory of a sentence-embedding model, for dense retrieval; without, BM25. index: a FAISS file of its
    vectors that exists already. Raises ConfigError for what cannot be read or does not fit together.
    """
    if index is not None and model is None:
        raise ConfigError(f"the index {str(index)!r} holds vectors, and no model makes those of queries; name it, too")
    if not path.is_file():
        raise ConfigError(f'no corpus {str(path)!r}; give a file of JSON lines, each with its text in "contents"')
    cache = cache_directory() / "retrieval" / f"{path.stem}-{_fingerprint(path)}"
    rows = _cached(cache / "rows.npy", lambda target: np.save(target, find_rows(path, progress)))
    corpus = Corpus(path, np.load(rows, mmap_mode="r"))
    retriever = _bm25(corpus, cache, progress) if model is None else _flat(corpus, model, index, cache, progress)
    return OpenedCorpus(corpus, retriever)


def _bm25(corpus: Corpus, cache: Path, progress: Progress) -> Retriever:
    texts = (passage["contents"] for passage in corpus)
    return Bm25.load(_cached(cache / "bm25", lambda target: Bm25.build(texts, len(corpus), progress).save(target)))


def _flat(corpus: Corpus, model: Path, index: Path | None, cache: Path, progress: Progress) -> Retriever:
    from treadle.retrieval.flat import Encoder, FlatIndex  # torch, transformers and FAISS

    encoder = Encoder(model)
    texts = (passage["contents"] for passage in corpus)
    index = index or _cached(
        cache / f"flat-{_fingerprint(*sorted(model.iterdir()))}.index",
        lambda target: FlatIndex.build(texts, len(corpus), encoder, progress).save(target),
    )
    retriever = FlatIndex.load(index, encoder)
    if len(retriever) != len(corpus):
        raise ConfigError(
            f"the index {str(index)!r} has {len(retriever):,} vectors, the corpus {str(corpus.path)!r} "
            f"{len(corpus):,} passages; give those that belong together"
        )
    return retriever


def _fingerprint(*paths: Path) -> str:
    """Return what changes with the files' places, sizes and times; their contents may be too large to read."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cached(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the path of a file or directory, written first if it is not there: it is complete or absent."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".building-", dir=target.parent) as building:
            write(Path(building) / target.name)
            try:
                (Path(building) / target.name).rename(target)
            except OSError:
                if not target.exists():  # else another process was faster
                    raise
    return target
