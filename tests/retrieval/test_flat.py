"""Dense retrieval with a BERT of random weights, as E5 wants it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

pytest.importorskip("bm25s")
pytest.importorskip("faiss")

import faiss

from tests.retrieval.servers import texts, write_corpus
from treadle.core.errors import ConfigError
from treadle.retrieval.flat import Encoder, FlatIndex
from treadle.retrieval.index import open_corpus


class Models(NamedTuple):
    small: Path
    wide: Path


def _model(folder: Path, width: int) -> Path:
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "w"]
    pieces += [f"##{n}" for n in range(10)]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.5,
    }
    config = BertConfig(vocab_size=len(pieces), hidden_size=width, max_position_embeddings=64, **layers)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return Models(_model(folder / "small", 16), _model(folder / "wide", 24))


CONTENTS = texts(120)


def test_vectors_are_means_of_unit_length_after_the_prefix(models: Models) -> None:
    encoder = Encoder(models.small, max_tokens=64)
    tokenizer, model = BertTokenizer.from_pretrained(models.small), BertModel.from_pretrained(models.small).eval()
    for prefix, encode in (("query: ", encoder.queries), ("passage: ", encoder.passages)):
        vectors = encode(CONTENTS[:9])
        assert vectors.dtype == np.float32 and vectors.shape == (9, encoder.width)
        for text, vector in zip(CONTENTS[:9], vectors, strict=True):  # one by one: no padding
            with torch.no_grad():
                hidden = model(**tokenizer(prefix + text, return_tensors="pt")).last_hidden_state[0]
            mean = hidden.mean(dim=0)
            np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)


def test_long_texts_are_cut(models: Models) -> None:
    encoder = Encoder(models.small, max_tokens=12)
    long = "w1 " * 40
    np.testing.assert_allclose(encoder.queries([long]), encoder.queries([long + "w2"]), atol=1e-6)


def test_a_published_index_is_mapped_and_finds_what_brute_force_finds(models: Models, tmp_path: Path) -> None:
    encoder = Encoder(models.small, max_tokens=64)
    vectors = encoder.passages(CONTENTS)
    index = faiss.IndexFlatIP(encoder.width)
    index.add(vectors)
    path = tmp_path / "e5_Flat.index"
    faiss.write_index(index, str(path))
    queries = texts(30, seed=5)
    opened = open_corpus(write_corpus(tmp_path / "corpus.jsonl", CONTENTS), models.small, path)
    assert "e5_Flat.index" in Path("/proc/self/maps").read_text()  # not read into memory
    products = Encoder(models.small).queries(queries) @ vectors.T
    for row, found in zip(products, opened.retriever.search(queries, 4), strict=True):
        np.testing.assert_allclose([hit.score for hit in found], np.sort(row)[::-1][:4], atol=1e-5)
        np.testing.assert_allclose([row[hit.passage] for hit in found], [hit.score for hit in found], atol=1e-5)


def test_an_index_is_built_once(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    path, told = write_corpus(tmp_path / "corpus.jsonl", CONTENTS[:100]), []
    first = open_corpus(path, models.small, progress=lambda *report: told.append(report))
    assert told[-2:] == [("passages embedded", 64, 100), ("passages embedded", 100, 100)]
    monkeypatch.setattr(FlatIndex, "build", None)
    again = open_corpus(path, models.small)
    assert again.retriever.search(CONTENTS[:5], 200) == first.retriever.search(CONTENTS[:5], 200)
    assert len(again.retriever.search(["w1"], 200)[0]) == 100  # no more than there are


def test_what_does_not_belong_together_is_refused(models: Models, tmp_path: Path) -> None:
    corpus, path = write_corpus(tmp_path / "corpus.jsonl", CONTENTS[:5]), tmp_path / "other.index"
    index = faiss.IndexFlatIP(16)
    index.add(np.zeros((4, 16), np.float32))
    faiss.write_index(index, str(path))
    with pytest.raises(ConfigError, match=r"has 4 vectors, the corpus .* 5 passages"):
        open_corpus(corpus, models.small, path)
    with pytest.raises(ConfigError, match="vectors of 16 components, the model makes 24"):
        open_corpus(corpus, models.wide, path)
    faiss.write_index(faiss.IndexFlatL2(16), str(path))
    with pytest.raises(ConfigError, match="by distance"):
        open_corpus(corpus, models.small, path)
    path.write_bytes(b"nothing of FAISS")
    with pytest.raises(ConfigError, match=r"cannot read the FAISS index .*other\.index"):
        open_corpus(corpus, models.small, path)
    with pytest.raises(ConfigError, match="no model in"):
        open_corpus(corpus, tmp_path, path)
