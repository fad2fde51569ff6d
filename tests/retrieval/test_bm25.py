"""BM25 against its definition."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("bm25s")

from tests.retrieval.corpora import brute_force, texts
from treadle.core.errors import DataError
from treadle.retrieval.corpus import Hit, top_hits
from treadle.retrieval.index import Bm25, words

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
