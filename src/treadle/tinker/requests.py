"""Requests of the protocol in JSON, as the SDK writes them. Unknown fields are refused, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from treadle.core.errors import DataError
from treadle.tinker.data import AdamParams, Sampling, Sparse

R = TypeVar("R", bound="Body")
Metadata = Mapping[str, Any]
Number = Annotated[int, Field(ge=0, lt=2**48)]
Place = Annotated[int, Field(ge=1, lt=2**31)]
"""Place of a request among its model's, as the protocol's binary messages have it."""
Seconds = Annotated[int, Field(ge=1, lt=2**32)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Index = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    type: str | None = None


class Optimizer(Body):
    """Choice of an optimizer."""

    type: Literal["adamw"] = "adamw"


class CreateSession(Body):
    """A client begins."""

    tags: Sequence[str] = ()
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Body):
    """A client is there."""

    session_id: str


class Finish(Body):
    """A client ends."""

    reason: Mapping[str, str] = {"type": "success"}
    detail: str | None = None


class Lora(Body):
    """Shape of an adapter."""

    rank: Index
    seed: Index | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """A new adapter."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(Body):
    """A question about a model, or its end."""

    model_id: str


class Ordered(OfModel):
    """A request that a model takes in its turn."""

    seq_id: Place | None = None


class Adam(Body):
    """Parameters of one optimizer step."""

    learning_rate: FiniteFloat = 1e-4
    beta1: FiniteFloat = 0.9
    beta2: FiniteFloat = 0.95
    eps: FiniteFloat = 1e-12
    weight_decay: FiniteFloat = 0.0
    grad_clip_norm: FiniteFloat = 0.0

    def params(self) -> AdamParams:
        return AdamParams(**self.model_dump(exclude={"type"}))


class OptimStep(Ordered):
    """An optimizer step."""

    adam_params: Adam = Adam()


class SaveWeights(Ordered):
    """A checkpoint to train on from. path: the client's name for it."""

    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Ordered):
    """A checkpoint to sample by, by name or as a new sampling session."""

    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata | None = None


class LoadWeights(Body):
    """Weights of a checkpoint for a model (model_id, seq_id), or for a new one (session_id, model_seq_id)."""

    model_id: str | None = None
    seq_id: Place | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool = False
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> LoadWeights:
        if (self.model_id is None) == (self.session_id is None or self.model_seq_id is None):
            raise ValueError("give either model_id, or session_id and model_seq_id")
        return self


class CreateSampler(Body):
    """A sampling session by a checkpoint, or by the base."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(Body):
    """Another client of a sampling session."""

    sampling_session_id: str


class Chunk(Body):
    """Part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Sequence[Index] = Field(max_length=2**24)


class Prompt(Body):
    """A prompt."""

    chunks: Sequence[Chunk]


class Params(Body):
    """How to sample."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Index | None = None
    stop: str | Sequence[str] | Sequence[Index] | None = None
    temperature: FiniteFloat = Field(1.0, ge=0)
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: FiniteFloat = Field(1.0, gt=0, le=1)

    def sampling(self, seed: int) -> Sampling:
        stop: Sequence[str] | Sequence[int] | None = [self.stop] if isinstance(self.stop, str) else self.stop
        own = seed if self.seed is None else self.seed
        return Sampling(self.max_tokens, own, stop, self.temperature, self.top_k, self.top_p)


class Tensor(Body):
    """A matrix of ids, whole or in CSR layout."""

    data: Sequence[Index]
    dtype: Literal["int64"] = "int64"
    shape: Sequence[Count] | None = None
    sparse_crow_indices: Sequence[Index] | None = None
    sparse_col_indices: Sequence[Index] | None = None

    def sparse(self, values: NDArray[Any]) -> Sparse | None:
        """Return a matrix with other values in the same layout; None if the layout is not sparse."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None or self.shape is None:
            return None
        if len(self.shape) != 2:
            raise DataError(f"target_prompt_logprobs: a sparse matrix has two dimensions, not {len(self.shape)}")
        rows, columns = (np.asarray(i, np.int64) for i in (self.sparse_crow_indices, self.sparse_col_indices))
        return Sparse(values, rows, columns, (self.shape[0], self.shape[1]))

    def ids(self) -> NDArray[np.int64]:
        """Return the matrix, with -1 where there is no id."""
        values = np.asarray(self.data, np.int64)
        if (sparse := self.sparse(values + 1)) is not None:
            return sparse.dense().astype(np.int64) - 1
        if self.shape is None or len(self.shape) != 2 or int(np.prod(self.shape)) != len(values):
            raise DataError("target_prompt_logprobs: give a shape of two dimensions that fits its data")
        return values.reshape(tuple(self.shape))


class Sample(Body):
    """Completions of a prompt by a sampling session, a checkpoint, or the base."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: Params = Params()
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # 10^9 times the number of the client, and more
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    record_stability_info: bool | None = None


class Retrieve(Body):
    """A result, when it is there."""

    request_id: str
    allow_metadata_only: bool = False
    model_id: str | None = None


class Cancel(Body):
    """A result that nobody waits for."""

    request_id: str


class OfPath(Body):
    """A question about a checkpoint."""

    tinker_path: str


class Ttl(Body):
    """A checkpoint's time to live; None for ever."""

    ttl_seconds: Seconds | None = None


_UNSUPPORTED = {
    "prompt_alt_tokens_k": "tokens beside the prompt's are not sampled here; leave it out",
    "kind": 'inflight sampling clients are not supported; save a "snapshot" again',
    "optimizer_params": "the only optimizer is Adam; send AdamParams",
    "optimizer_config": 'the only optimizer is Adam, "adamw"',
    "chunks": "this server takes chunks of tokens only",
}


def read(kind: type[R], body: bytes) -> R:
    """Read a request. Raises DataError, naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        known = next((why for name, why in _UNSUPPORTED.items() if name in first["loc"]), None)
        extra = "this server does not know it" if first["type"] == "extra_forbidden" else first["msg"]
        raise DataError(f"{field or 'the body'}: {known or extra}") from error
