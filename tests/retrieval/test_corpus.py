"""Corpora as they lie on disk, and the cache of their indexes."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("bm25s")

from tests.retrieval.corpora import texts, write_corpus
from treadle.core.errors import ConfigError, DataError
from treadle.retrieval.corpus import Corpus, find_rows
from treadle.retrieval.index import Bm25, open_corpus


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_rows_are_read_as_they_lie(tmp_path: Path, end: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "é\\nx"}\n\n{"id": "1", "contents": "y"}' + end, encoding="utf-8")
    corpus = Corpus(path, find_rows(path))
    assert [row["contents"] for row in corpus] == ["é\nx", "y"]
    assert corpus[-1] == {"id": "1", "contents": "y"}


def test_a_row_across_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", texts(50))
    whole = find_rows(path)
    monkeypatch.setattr("treadle.retrieval.corpus._BLOCK", 7)
    np.testing.assert_array_equal(find_rows(path), whole)


@pytest.mark.parametrize("row", ["{", "[]", '{"text": "x"}', '{"contents": 7}'])
def test_a_row_that_is_no_passage_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "x"}\n' + row)
    with pytest.raises(DataError, match=r"corpus\.jsonl: row 1 "):
        open_corpus(path)


def test_nothing_to_index(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(ConfigError, match=name):
            open_corpus(tmp_path / name)
    with pytest.raises(ConfigError, match="no model makes those of queries"):
        open_corpus(tmp_path / "empty.jsonl", index=tmp_path / "e5_Flat.index")


def test_an_index_is_built_once_and_again_for_another_corpus(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", ["Anna likes chess", "Bob likes golf"])
    first = open_corpus(path)
    assert not list(cache.rglob(".building-*"))
    with monkeypatch.context() as patch:
        patch.setattr(Bm25, "build", None)  # cannot be called
        assert open_corpus(path).retriever.search(["golf"], 1) == first.retriever.search(["golf"], 1)
    write_corpus(path, ["Anna likes chess", "Bob likes golf", "Carl likes golf, too"])
    assert len(open_corpus(path).passages) == 3


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "x"}\n{}')
    with pytest.raises(DataError):
        open_corpus(path)
    assert not list(cache.rglob("bm25")) and not list(cache.rglob(".building-*"))


def test_another_corpus_of_the_same_size_has_an_index_of_its_own(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", ["Anna likes chess", "Bob likes golf"])
    open_corpus(path)
    before = path.stat()
    write_corpus(path, ["Bob likes golf", "Anna likes chess"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert path.stat().st_size == before.st_size
    [[(number, _)]] = open_corpus(path).retriever.search(["golf"], 1)
    assert number == 0
