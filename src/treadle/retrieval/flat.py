"""Dense retrieval: a sentence-embedding model and an exact search over all vectors (FAISS flat, inner product).

Follows E5's conventions by default: `query: ` and `passage: ` before the text, 256 tokens, mean pooling, unit length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from treadle.core.errors import ConfigError
from treadle.retrieval.corpus import Hit, Progress, Retriever, no_progress

Vectors = npt.NDArray[np.float32]

_PASSAGES = 64  # batch size for embedding when an index is built


class Encoder:
    """Embeds text with a transformers model from a directory: the normalized mean of its last hidden states.

    Uses float16 on a GPU, if there is one, like the published index; float32 on a CPU.
    """

    def __init__(
        self, directory: Path, max_tokens: int = 256, query_prefix: str = "query: ", passage_prefix: str = "passage: "
    ) -> None:
        if not (directory / "config.json").is_file():
            raise ConfigError(f"no model in {str(directory)!r}; give the directory of a sentence-embedding model")
        self._device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(directory, dtype=dtype, local_files_only=True, trust_remote_code=False)
        self._model = model.to(self._device).eval()
        self._max_tokens = max_tokens
        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix

    @property
    def width(self) -> int:
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of queries, `[texts, width]`."""
        return self._encode([self._query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of passages, `[texts, width]`."""
        return self._encode([self._passage_prefix + text for text in texts])

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> Vectors:
        inputs = self._tokenizer(
            texts, max_length=self._max_tokens, padding=True, truncation=True, return_tensors="pt"
        ).to(self._device)
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        mean = hidden.masked_fill(mask == 0, 0.0).sum(dim=1) / mask.sum(dim=1)
        vectors: Vectors = normalize(mean, dim=-1).float().cpu().numpy()
        return vectors


class FlatIndex(Retriever):
    """Finds the passages with the largest inner product with the query's vector, by exhaustive search."""

    batch = 64

    def __init__(self, index: faiss.Index, encoder: Encoder) -> None:
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ConfigError("the FAISS index compares by distance; make one of inner products (IndexFlatIP)")
        if index.d != encoder.width:
            raise ConfigError(
                f"the FAISS index has vectors of {index.d} components, the model makes {encoder.width}; "
                "give the model that the index was made with"
            )
        self._index, self._encoder = index, encoder

    @classmethod
    def build(cls, texts: Iterable[str], total: int, encoder: Encoder, progress: Progress = no_progress) -> FlatIndex:
        """Embed `total` texts into an index in memory: 4 bytes per component."""
        index = faiss.IndexFlatIP(encoder.width)
        texts = iter(texts)
        while some := list(islice(texts, _PASSAGES)):
            index.add(encoder.passages(some))
            progress("passages embedded", index.ntotal, total)
        return cls(index, encoder)

    @classmethod
    def load(cls, path: Path, encoder: Encoder) -> FlatIndex:
        """Load an index file of FAISS, such as the published `e5_Flat.index`, mapped into memory.

        Raises ConfigError for an invalid file.
        """
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ConfigError(f"cannot read the FAISS index {str(path)!r}: {error}") from error
        return cls(index, encoder)

    def save(self, path: Path) -> None:
        faiss.write_index(self._index, str(path))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return `topk` passages for each query, or all if there are fewer, best first."""
        scores, numbers = self._index.search(self._encoder.queries(queries), topk)
        return [
            [Hit(int(number), float(score)) for number, score in zip(*row, strict=True) if number >= 0]
            for row in zip(numbers, scores, strict=True)
        ]
