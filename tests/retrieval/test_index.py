"""Corpora as they lie on disk, the cache of their indexes, and BM25 against its definition."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("bm25s")

from tests.retrieval.servers import brute_force, texts, write_corpus
from treadle.core.errors import ConfigError, DataError
from treadle.retrieval.corpus import Corpus, Hit, find_rows, top_hits
from treadle.retrieval.index import Bm25, open_corpus, words


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
    with pytest.raises(ConfigError, match="no model to embed queries"):
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


WORDS = st.lists(st.sampled_from(["ada", "bob", "cat", "dog", "the", "7", "é", "straße"]), max_size=8).map(" ".join)


def same(found: list[Hit], expected: list[Hit]) -> None:
    """Equal scores; and the same passages, save where rounding decides between equal scores."""
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], rel=1e-5)
    least = min((hit.score for hit in expected), default=0.0) * (1 + 1e-5)
    assert {h.passage for h in found if h.score > least} == {h.passage for h in expected if h.score > least}


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=12), WORDS, st.integers(1, 5))
def test_results_are_those_of_every_passage_scored_by_the_definition(
    contents: list[str], query: str, topk: int
) -> None:
    assume(any(words(text) for text in contents))
    [found] = Bm25.build(contents, len(contents)).search([query], topk)
    same(found, brute_force(contents, query, topk))
    assert all(hit.score > 0 for hit in found)


def test_what_matches_no_word_is_not_found() -> None:
    retriever = Bm25.build(["Anna likes chess", "Bob likes golf"], 2)
    assert retriever.search(["tennis", "", "the of", "likes CHESS"], 3) == [
        [],
        [],
        [],
        retriever.search(["chess likes"], 3)[0],
    ]
    assert [hit.passage for hit in retriever.search(["chess"], 3)[0]] == [0]


def test_a_saved_index_finds_the_same(tmp_path: Path) -> None:
    contents = texts(300)
    built = Bm25.build(contents, len(contents))
    built.save(tmp_path / "index")
    loaded = Bm25.load(tmp_path / "index")
    queries = texts(30, seed=2)
    assert loaded.search(queries, 4) == built.search(queries, 4)
    assert len(loaded) == len(built) == 300


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(DataError, match="no passage of the corpus has a word"):
        Bm25.build(["the", "?!"], 2)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), max_size=20), st.integers(1, 6))
def test_of_equal_scores_the_first_passages_come_first(scores: list[float], topk: int) -> None:
    ranked = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
    assert top_hits(np.array(scores, np.float32), topk) == [Hit(n, -score) for score, n in ranked[:topk]]
