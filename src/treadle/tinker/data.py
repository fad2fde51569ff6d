"""What goes into and comes out of the models behind the Tinker protocol, as numpy arrays.

Shapes: T tokens of a datum or prompt, k targets or most probable tokens at each position, n sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError
from treadle.core.types import Floats, Ids

Array = NDArray[Any]
"""Numbers: float32, or int64 for token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A matrix in CSR layout: row i has values[rows[i] : rows[i + 1]] in the columns of the same range, 0 elsewhere.

    values [m], rows int64[shape[0] + 1], columns int64[m].
    """

    values: Array
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    shape: tuple[int, int]

    def dense(self) -> Array:
        """Return the whole matrix. Raises DataError for indices that do not fit."""
        height, width = self.shape
        counts = np.diff(self.rows)
        fits = len(self.rows) == height + 1 and len(self.columns) == len(self.values)
        if not fits or self.rows[0] != 0 or self.rows[-1] != len(self.values) or (counts < 0).any():
            raise DataError(f"a sparse matrix of shape {self.shape} has rows or columns that do not fit its values")
        if len(self.columns) and not 0 <= self.columns.min() <= self.columns.max() < width:
            raise DataError(f"a sparse matrix of shape {self.shape} has columns outside [0, {width})")
        matrix = np.zeros(self.shape, self.values.dtype)
        matrix[np.repeat(np.arange(height), counts), self.columns] = self.values
        return matrix


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One example as the client sent it: ids int32[T], and a loss's inputs by name, [T] or [T, k] each.

    For example `{"target_tokens": int64[T], "weights": float32[T]}`: position i of `ids` predicts target i.
    """

    ids: Ids
    inputs: Mapping[str, Array | Sparse]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Result of a forward pass. arrays: per datum, by name: `{"logprobs": float32[T]}`, in its targets' shape.

    metrics: `{"loss:sum": 12.5}`; the part behind the colon says how clients add up those of several calls.
    """

    arrays: Sequence[Mapping[str, Floats]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Parameters of one step of Adam. grad_clip_norm: largest norm of the gradient; 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled, in the protocol's terms.

    max_tokens: None for all that the model's context leaves. seed: of the first sample; others follow from it. stop:
    strings, or token ids, that end a completion beside the model's own stop tokens; None: only these; (): nothing
    does. top_k: -1 for no limit. temperature: 0 is greedy.
    """

    max_tokens: int | None = None
    seed: int = 0
    stop: Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """Tokens and their log-probabilities at each position: int32[T, k], float32[T, k]."""

    ids: Ids
    logprobs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One completion: ids int32[n], logprobs float32[n] under the sampling distribution.

    stop_reason: "length" if `max_tokens` ended it. top: most probable tokens at each of its positions, if requested.
    """

    ids: Ids
    logprobs: Floats
    stop_reason: Literal["stop", "length"]
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Which log-probabilities of a prompt to compute; all at temperature 1.

    logprobs: of its own tokens. top: of so many most probable tokens. targets int64[T - 1, k]: of these ids at prompt
    position i + 1; -1 asks for nothing. top_sampled: of so many most probable tokens at each sampled position.
    """

    logprobs: bool = False
    top: int = 0
    targets: NDArray[np.int64] | None = None
    top_sampled: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Result of sampling.

    prompt_logprobs float32[T], NaN at the first token. prompt_top: of T tokens, with (0, -99999) at the first one, as
    the protocol writes missing ones. target_logprobs float32[T - 1, k], 0 where nothing was asked for. None: not
    requested.
    """

    sequences: Sequence[Sampled]
    prompt_logprobs: Floats | None = None
    prompt_top: TopTokens | None = None
    target_logprobs: Floats | Sparse | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Shape of a model's adapter."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
