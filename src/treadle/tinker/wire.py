"""The protocol's binary messages: `forward_backward`'s request, and the results of it and of sampling.

bytes --read_forward_backward--> ForwardBackward --...--> Outputs, Samples --write_outputs, write_samples--> bytes

Arrays travel as little-endian bytes. The messages are declared here because the SDK, which has them too, is a client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from treadle.core.errors import DataError
from treadle.tinker.data import Array, Datum, Outputs, Sampled, Samples, Sparse, TopTokens

_DECLARATIONS = """
SampleResponse: 1 repeated SampledSequence sequences, 2 optional bytes prompt_logprobs,
  3 optional TopkLogprobs topk_prompt_logprobs, 5 optional Tensor target_prompt_logprobs
SampledSequence: 1 int32 stop_reason, 2 bytes tokens, 3 optional bytes logprobs,
  4 optional TopkLogprobs topk_sampled_logprobs
TopkLogprobs: 1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length
SparseCsr: 1 bytes values, 2 bytes crow_indices, 3 bytes col_indices
Tensor: 1 optional bytes dense, 2 optional SparseCsr sparse_csr, 3 int32 dtype, 4 repeated int64 shape
BatchedTensor: 1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 repeated int64 trailing_shape
NamedBatch: 1 string key, 2 BatchedTensor value
ArrayRecord: 1 string type_tag, 2 repeated NamedBatch fields, 3 int64 num_datums
NamedNumber: 1 string key, 2 double value
ForwardBackwardOutput: 1 string loss_fn_output_type, 2 repeated ArrayRecord loss_fn_outputs,
  3 repeated NamedNumber metrics
LossConfigValue: 1 optional double number, 2 optional string text
NamedOption: 1 string key, 2 LossConfigValue value
ForwardBackwardRequest: 1 string model_id, 2 int32 seq_id, 3 repeated Datum data, 4 string loss_fn,
  5 repeated NamedNumber loss_fn_config, 6 bool forward_only, 7 repeated NamedOption loss_fn_config_v2
NamedTensor: 1 string key, 2 Tensor value
Datum: 1 repeated Chunk model_input, 2 repeated NamedTensor loss_fn_inputs,
  3 repeated ProvenanceSpan model_input_spans, 4 repeated ProvenanceSpan loss_fn_input_spans
ProvenanceSpan: 1 optional Span prompt_tokens, 2 optional Span sampled_tokens
Span: 1 string sequence_id, 2 int64 offset, 3 int64 length
Chunk: 1 optional EncodedTextChunk encoded_text, 2 optional bytes image, 3 optional bytes dmel
EncodedTextChunk: 1 bytes tokens
"""
# A map is the same on the wire as repeated pairs of key and value, and an enum the same as its number.


def _declared(messages: str) -> dict[str, Any]:
    """Return a class for each message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="treadle/tinker.proto", package="treadle.tinker", syntax="proto3")
    for name, fields in re.findall(r"(\w+): ((?:[^,:]+,\s+)*[^,:\n]+)\n", messages):
        message = file.message_type.add(name=name)
        for number, label, kind, field in re.findall(r"(\d+) (?:(repeated|optional) )?(\w+) (\w+)", fields):
            added = message.field.add(name=field, number=int(number))
            added.label = kinds.LABEL_REPEATED if label == "repeated" else kinds.LABEL_OPTIONAL
            if kind[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".treadle.tinker.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
                if label == "optional":  # a member that may be absent is a oneof of its own
                    added.oneof_index, added.proto3_optional = len(message.oneof_decl), True
                    message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {m.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{m.name}"))
            for m in file.message_type}  # fmt: skip


MESSAGES = _declared(_DECLARATIONS)
"""Classes of the messages, by name."""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: Mapping[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
_LARGEST = 2**27
"""Largest number of elements of a tensor that is sent as a sparse one."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where consecutive positions of a datum come from: the prompt, or the sampled tokens, of a sequence."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A request. inputs, targets: per datum, where its tokens and its targets come from; None if it does not say."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    backward: bool
    data: Sequence[Datum]
    inputs: Sequence[Sequence[Span] | None]
    targets: Sequence[Sequence[Span] | None]


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request. Raises DataError for one that is malformed, or has chunks other than text."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataError("the request's body is not a ForwardBackwardRequest in protobuf") from error
    options: dict[str, float | str] = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        options[each.key] = each.value.text if each.value.HasField("text") else each.value.number
    spans = [
        (_spans(d.model_input_spans), _spans(d.loss_fn_input_spans)) if d.model_input_spans else (None, None)
        for d in message.data
    ]
    return ForwardBackward(
        message.model_id,
        message.seq_id,
        message.loss_fn,
        options,
        not message.forward_only,
        [_datum(datum, f"datum {n}") for n, datum in enumerate(message.data)],
        [inputs for inputs, _ in spans],
        [targets for _, targets in spans],
    )


def _datum(message: Any, where: str) -> Datum:
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "an empty chunk"
            raise DataError(f"{where} has {kind}; this server takes chunks of tokens only")
    ids = np.concatenate([
        np.empty(0, np.int32), *(_array(c.encoded_text.tokens, _INT32, f"{where}: tokens") for c in message.model_input)
    ])  # fmt: skip
    return Datum(ids, {each.key: _tensor(each.value, f"{where}: {each.key}") for each in message.loss_fn_inputs})


def _array(data: bytes, dtype: int, where: str) -> Array:
    if dtype not in _DTYPES:
        raise DataError(f"{where}: tensors must be float32 or int64")
    if len(data) % _DTYPES[dtype].itemsize:
        raise DataError(f"{where}: {len(data)} bytes are no array of {_DTYPES[dtype]}")
    return np.frombuffer(data, _DTYPES[dtype])


def _tensor(message: Any, where: str) -> Array | Sparse:
    shape = tuple(message.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > _LARGEST:
        raise DataError(f"{where}: the shape {list(shape)} is negative or too large")
    if not message.HasField("sparse_csr"):
        array = _array(message.dense, message.dtype, where)
        if shape and math.prod(shape) != len(array):
            raise DataError(f"{where}: {len(array)} values do not have the shape {list(shape)}")
        return array.reshape(shape) if shape else array
    if len(shape) != 2:
        raise DataError(f"{where}: a sparse tensor has two dimensions, not the shape {list(shape)}")
    sparse = message.sparse_csr
    rows, columns = _array(sparse.crow_indices, _INT64, where), _array(sparse.col_indices, _INT64, where)
    return Sparse(_array(sparse.values, message.dtype, where), rows, columns, (shape[0], shape[1]))


def _spans(messages: Iterable[Any]) -> list[Span]:
    spans = []
    for message in messages:
        sampled = message.HasField("sampled_tokens")
        part = message.sampled_tokens if sampled else message.prompt_tokens
        if part.offset < 0 or part.length < 0:
            raise DataError(f"a provenance span has the offset {part.offset} and the length {part.length}")
        spans.append(Span(part.sequence_id, part.offset, part.length, sampled))
    return spans


def write_outputs(outputs: Outputs) -> bytes:
    """Write the result of a forward pass, in one record per datum because their second dimensions may differ."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for arrays in outputs.arrays:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        for name, array in arrays.items():
            data = _bytes(array, _FLOAT32)
            value = record.fields.add(key=name).value
            value.data, value.offsets, value.dtype = data, _bytes(np.array([0, len(data)]), _INT64), _FLOAT32
            value.trailing_shape.extend(array.shape[1:])
    for name, number in outputs.metrics.items():
        message.metrics.add(key=name, value=number)
    return bytes(message.SerializeToString())


def write_samples(samples: Samples) -> bytes:
    """Write the result of sampling."""
    message = MESSAGES["SampleResponse"](sequences=[_sequence(each) for each in samples.sequences])
    if samples.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(samples.prompt_logprobs, _FLOAT32)
    if samples.prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(samples.prompt_top))
    if samples.target_logprobs is not None:
        target, values = message.target_prompt_logprobs, samples.target_logprobs
        target.dtype = _FLOAT32
        target.shape.extend(values.shape)
        if isinstance(values, Sparse):
            target.sparse_csr.values = _bytes(values.values, _FLOAT32)
            target.sparse_csr.crow_indices = _bytes(values.rows, _INT64)
            target.sparse_csr.col_indices = _bytes(values.columns, _INT64)
        else:
            target.dense = _bytes(values, _FLOAT32)
    return bytes(message.SerializeToString())


def _sequence(sampled: Sampled) -> Any:
    message = MESSAGES["SampledSequence"](
        stop_reason=int(sampled.stop_reason == "length"),
        tokens=_bytes(sampled.ids, _INT32),
        logprobs=_bytes(sampled.logprobs, _FLOAT32),
    )
    if sampled.top is not None:
        message.topk_sampled_logprobs.CopyFrom(_top(sampled.top))
    return message


def _top(top: TopTokens) -> Any:
    length, k = top.ids.shape
    return MESSAGES["TopkLogprobs"](
        token_ids=_bytes(top.ids, _INT32), logprobs=_bytes(top.logprobs, _FLOAT32), k=k, length=length
    )


def _bytes(array: NDArray[Any], dtype: int) -> bytes:
    return array.astype(_DTYPES[dtype]).tobytes()
