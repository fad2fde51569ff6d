"""Tokens of finished attempts, and the learner's values for them, in Parquet files for pandas: one row per step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import RunError
from treadle.core.files import WrittenFile, read_proven, refusal, write_atomically
from treadle.core.images import ImageIds
from treadle.core.outcomes import NOT_PLAYED
from treadle.core.rewards import Reward
from treadle.core.support import Probabilities, Support
from treadle.core.trainer import StepTrace
from treadle.core.types import BreakCause, DropReason, Group, ModelCall, Routing, SamplingParams, Step, StopReason, Task
from treadle.packing.compactions import RecordedCall
from treadle.packing.flat import PackedCall
from treadle.record.describe import describe, probability_columns
from treadle.record.image_files import FOLDER, ImageFiles, Put, Url, image_column, images_of, referred, resolved
from treadle.record.ledger_reader import LEDGER, OPEN_SHARD, LedgerReader, trace_file

_BATCH = 512  # steps read at a time
_STEP = {  # columns that are attributes of the step
    "prompt_ids": pa.list_(pa.int32()),
    "completion_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.bool_()),
    "policy_versions": pa.list_(pa.int32()),
    "stop_reason": pa.string(),
    "reward": pa.float64(),
    "seconds": pa.float64(),
    "break_cause": pa.string(),
    "dropped": pa.string(),
    "shaping": pa.float64(),
    "state_key": pa.string(),
    "started": pa.float64(),
    "waited": pa.float64(),
    "summary": pa.bool_(),
}
_SAMPLING = {
    "temperature": pa.float64(),
    "max_tokens": pa.int32(),
    "stop": pa.list_(pa.string()),
    "seed": pa.int64(),
    "top_k": pa.int32(),
    "top_p": pa.float64(),
    "min_p": pa.float64(),
    "grammar": pa.string(),
    "forbidden": pa.list_(pa.int32()),
}
STEP_SCHEMA = pa.schema(
    {
        **_STEP,
        **_SAMPLING,
        "routing": pa.binary(),  # int16, little-endian: reading a list would make a Python object per number
        "routing_shape": pa.list_(pa.int32()),
        "support_sizes": pa.list_(pa.int32()),  # `Support`; null: every id could be sampled
        "support_gaps": pa.list_(pa.int32()),  # each id less the one before it of its token
        "probability_sizes": pa.list_(pa.int32()),  # `Probabilities`; null: not recorded
        "probability_ids": pa.list_(pa.int32()),
        "probabilities": pa.list_(pa.float32()),
        "components": pa.map_(pa.string(), pa.float64()),
        "token_rewards": pa.list_(pa.float32()),
        # Missing in older runs.
        "calls": pa.list_(pa.string()),  # calls of other models, each as JSON
        "withheld": pa.int32(),
        "answer": pa.string(),  # of a restorable environment
        "chat": pa.string(),  # the call of a model behind a URL, as JSON
        "images": pa.string(),  # of the prompt, as JSON with the names of their files
    }
)
_SCHEMA = pa.schema([("group_id", pa.string()), ("trajectory_id", pa.string()), ("step", pa.int32()), *STEP_SCHEMA])
_SUPPORT = ("support_sizes", "support_gaps")
_PROBABILITIES = ("probability_sizes", "probability_ids", "probabilities")
_ROUTING = ("routing", "routing_shape")
_OF_COMPLETION = ("completion_ids", "logprobs", "policy_versions", "stop_reason", *_ROUTING, *_SUPPORT, *_PROBABILITIES)
_COMPLETION = pa.schema([STEP_SCHEMA.field(name) for name in _OF_COMPLETION])
_TOKENS: Mapping[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "completion_ids": np.int32,
    "logprobs": np.float32,
    "mask": np.bool_,
    "policy_versions": np.int32,
}


def write_shard(directory: Path, name: str, groups: Sequence[Group]) -> WrittenFile:
    """Write the groups' steps durably; return the file. Complete or absent. Raises RunError if the disk refuses."""
    put = images_beside(directory).put
    for group in groups:
        referred(group.task.prompt, put)
    every = ((g, t, number, step) for g in groups for t in g.everyone for number, step in enumerate(t.steps))
    rows = [_row(g.group_id, t.trajectory_id, number, step, put) for g, t, number, step in every]
    return write_table(directory, f"{name}.parquet", pa.Table.from_pylist(rows, schema=_SCHEMA))


def images_beside(rollouts: Path) -> ImageFiles:
    """Return the images of a run. rollouts: the directory of its shards."""
    return ImageFiles(rollouts.parent / FOLDER)


def _row(group_id: str, trajectory_id: str, number: int, step: Step, put: Put) -> dict[str, Any]:
    return {"group_id": group_id, "trajectory_id": trajectory_id, "step": number, **step_row(step, put)}


def write_table(directory: Path, name: str, table: pa.Table) -> WrittenFile:
    try:
        return WrittenFile(name, write_atomically(directory / name, bytes(_as_parquet(table))))
    except OSError as error:
        where = directory / name
        raise RunError(f"could not write {where}: {refusal(error, 'make it writable')}, then --resume") from error


def _as_parquet(table: pa.Table) -> pa.Buffer:
    sink, strings = pa.BufferOutputStream(), [f.name for f in table.schema if pa.types.is_string(f.type)]
    # Dictionaries are larger for token ids. Most gaps are small: their high bytes, apart, take nothing.
    apart = {"support_gaps.list.element": "BYTE_STREAM_SPLIT"} if "support_gaps" in table.column_names else None
    pq.write_table(table, sink, compression="zstd", use_dictionary=strings, column_encoding=apart)
    return sink.getvalue()


def packed_step(group_id: str, trajectory_id: str, number: int, step: Step, put: Put) -> bytes:
    """Return a row of a shard, packed for the ledger (`Ledger.record_open`). put: writes images."""
    return _packed(_row(group_id, trajectory_id, number, step, put), _SCHEMA)


def packed_completion(completion: Completion) -> bytes:
    """Return a completion as the columns of a step that it fills, packed for the ledger; `completion_of` reads it."""
    row = {
        "completion_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "policy_versions": completion.versions_per_token(),
        "stop_reason": completion.stop_reason,
        **_routing_columns(completion.routing),
        **_support_columns(completion.support),
        **probability_columns(completion.probabilities),
    }
    return _packed(row, _COMPLETION)


def completion_of(packed: bytes) -> Completion:
    [row] = pa.ipc.open_stream(packed).read_all().to_pylist()
    spans, end = list[VersionSpan](), 0
    for version, tokens in itertools.groupby(row["policy_versions"]):
        start, end = end, end + len(list(tokens))
        spans.append(VersionSpan(version, start, end))
    return Completion(
        token_ids=np.array(row["completion_ids"], np.int32),
        logprobs=np.array(row["logprobs"], np.float32),
        stop_reason=StopReason(row["stop_reason"]),
        policy_versions=tuple(spans),
        routing=_routing(row),
        support=_support(row),
        probabilities=_probabilities(row),
    )


def _packed(row: Mapping[str, Any], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([row], schema=schema))
    return bytes(sink.getvalue())


def open_steps(ledger: LedgerReader) -> pa.Table:
    """Return the rows that are not in a shard yet."""
    rows = [pa.ipc.open_stream(row).read_all() for row in ledger.open_steps()]
    return pa.concat_tables(rows, promote_options="default") if rows else _SCHEMA.empty_table()


def remove_other_shards(directory: Path, keep: Container[str]) -> None:
    """Delete all files except `keep`: a killed process may have left unrecorded ones."""
    for file in directory.iterdir():
        if file.name not in keep:
            file.unlink()


def open_shard(directory: Path, shard: WrittenFile) -> pa.BufferReader:
    """Open a shard's content for pyarrow. Raises DamageError if it is missing or damaged."""
    if shard.name == OPEN_SHARD:
        return pa.BufferReader(_as_parquet(open_steps(LedgerReader(directory.parent / LEDGER))))
    return pa.BufferReader(read_proven(directory / shard.name, shard.sha256, "restore it from a copy"))


def read_steps(directory: Path, shard: WrittenFile, trajectory_id: str) -> list[Step]:
    """Return the steps of one trajectory, in call order. Raises as `open_shard`."""
    table = pq.read_table(open_shard(directory, shard), filters=[("trajectory_id", "=", trajectory_id)])
    url = images_beside(directory).url
    return [step_of(row, url) for row in sorted(_rows(table), key=lambda row: row["step"])]


def read_shard(directory: Path, shard: WrittenFile) -> dict[str, list[Step]]:
    """Return all steps of a shard, in call order, by trajectory_id. Raises as `open_shard`."""
    trajectories: dict[str, list[Step]] = {}
    url = images_beside(directory).url
    for row in _rows(pq.read_table(open_shard(directory, shard))):
        trajectories.setdefault(row["trajectory_id"], []).append(step_of(row, url))
    return trajectories


def read_call_times(directory: Path, shard: WrittenFile) -> list[dict[str, Any]]:
    """Return trajectory_id, step, started, waited and seconds of each step of a shard. Raises as `open_shard`."""
    columns = ["trajectory_id", "step", "started", "waited", "seconds"]
    rows: list[dict[str, Any]] = pq.read_table(open_shard(directory, shard), columns=columns).to_pylist()
    return rows


def read_calls(directory: Path, shard: WrittenFile) -> dict[str, list[RecordedCall]]:
    """Return the ids of all calls of a shard, except calls of text alone, by trajectory_id. Raises as `open_shard`.

    Placeholders of images have ids of their own (`ImageIds`).
    """
    columns = ["trajectory_id", "step", "break_cause", "summary", "dropped"]
    trajectories: dict[str, list[RecordedCall]] = {}
    own = ImageIds()
    with pq.ParquetFile(open_shard(directory, shard)) as file:
        has_images = "images" in file.schema_arrow.names  # not of older runs
        read = ["prompt_ids", "completion_ids", *["images"] * has_images]
        for batch in file.iter_batches(_BATCH, columns=[*columns, *read]):
            rows = zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
            tokens = zip(*(token_arrays(batch.column(name)) for name in ("prompt_ids", "completion_ids")), strict=True)
            images = batch.column("images").to_pylist() if has_images else [None] * len(batch)
            for (trajectory, number, cause, summary, dropped), (prompt, completion), seen in zip(
                rows, tokens, images, strict=True
            ):
                if not len(prompt):
                    continue  # a text-only call
                ids = own.put(prompt, images_of(seen, str))
                call = PackedCall(np.concatenate([ids, completion]), len(prompt), first=0)
                known, played = BreakCause(cause) if cause else None, dropped not in NOT_PLAYED
                trajectories.setdefault(trajectory, []).append(RecordedCall(number, call, known, summary, played))
    return trajectories


def token_arrays(column: pa.ListArray) -> list[Any]:
    """Return rows of a list column as numpy views, without a Python object per token."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.combine_chunks().to_batches():
        lists = [*_TOKENS, *_SUPPORT, *_PROBABILITIES]
        arrays = zip(*(token_arrays(batch.column(name)) for name in lists), strict=True)
        for row, tokens in zip(batch.drop_columns(lists).to_pylist(), arrays, strict=True):
            yield {**row, **dict(zip(lists, tokens, strict=True))}


def step_row(step: Step, put: Put) -> dict[str, Any]:
    """Return a step as a row of `STEP_SCHEMA`; `step_of` reads it. put: writes images."""
    facts = describe(step)
    return facts | {
        **_routing_columns(step.routing),
        **_support_columns(step.support),
        "components": list(facts["components"].items()),
        "calls": [json.dumps(referred(call, put)) for call in facts["calls"]],
        "chat": facts["chat"] and json.dumps(referred(facts["chat"], put)),
        "images": image_column(step.images, put),
    }


def step_of(row: Mapping[str, Any], url: Url | None = None) -> Step:
    """Return the step in a row, which may lack its routing. url: reads images; None: there are none."""
    plain = {name: row[name] for name in _STEP.keys() - _TOKENS.keys()}
    converted = {
        **{name: np.array(row[name], dtype) for name, dtype in _TOKENS.items()},
        "stop_reason": StopReason(row["stop_reason"]),
        "break_cause": BreakCause(row["break_cause"]) if row["break_cause"] else None,
        "dropped": DropReason(row["dropped"]) if row["dropped"] else None,
    }
    return Step(
        **{**plain, **converted},
        sampling=SamplingParams(
            **{name: row[name] for name in _SAMPLING if name not in ("stop", "forbidden")},
            stop=tuple(row["stop"]),
            forbidden=tuple(row["forbidden"]),
        ),
        routing=_routing(row),
        support=_support(row),
        probabilities=_probabilities(row),
        given=Reward(dict(row["components"]), row["token_rewards"]),
        calls=tuple(_call(call, url) for call in row.get("calls") or ()),
        withheld=row.get("withheld") or 0,
        answer=row.get("answer") or "",
        chat=_call(row["chat"], url) if row.get("chat") else None,
        images=images_of(row.get("images"), url),
    )


def task_of(text: str, rollouts: Path) -> Task:
    """Return the task in a row of the ledger. rollouts: see `images_beside`. Raises DamageError for a lost image."""
    return Task(**resolved(json.loads(text), images_beside(rollouts).url))


def _routing_columns(routing: Routing | None) -> dict[str, Any]:
    if routing is None:
        return {"routing": None, "routing_shape": None}
    return {"routing": routing.astype("<i2").tobytes(), "routing_shape": routing.shape}


def _routing(row: Mapping[str, Any]) -> Routing | None:
    if (recorded := row.get("routing")) is None:
        return None
    return np.frombuffer(recorded, "<i2").reshape(row["routing_shape"]).astype(np.int16)


def _support_columns(support: Support | None) -> dict[str, Any]:
    if support is None:
        return dict.fromkeys(_SUPPORT)
    ids, sizes = support.ids, support.counts[support.counts > 0]
    gaps, first = np.diff(ids, prepend=0), np.cumsum(sizes) - sizes
    gaps[first] = ids[first]
    return {"support_sizes": support.counts, "support_gaps": gaps}


def _support(row: Mapping[str, Any]) -> Support | None:
    counts, gaps = (row.get(name) for name in _SUPPORT)
    if counts is None or gaps is None or not len(counts):
        return None
    counts, gaps = np.asarray(counts, np.int32), np.asarray(gaps, np.int64)
    sizes, total = counts[counts > 0], np.cumsum(gaps)
    first = np.cumsum(sizes) - sizes
    return Support(counts, (total - np.repeat(total[first] - gaps[first], sizes)).astype(np.int32))


def _probabilities(row: Mapping[str, Any]) -> Probabilities | None:
    sizes, ids, values = (row.get(name) for name in _PROBABILITIES)
    if sizes is None or ids is None or values is None or not len(sizes):
        return None
    return Probabilities(Support(sizes, ids), values)


def _call(text: str, url: Url | None) -> ModelCall:
    fields = json.loads(text) if url is None else resolved(json.loads(text), url)
    return ModelCall(**{**fields, "messages": tuple(fields["messages"]), "tools": tuple(fields.get("tools", ()))})


_OF_TOKENS: Mapping[str, type[np.generic]] = {
    "logprobs": np.float32,
    "entropy": np.float32,
    "advantage": np.float32,
    "ratio": np.float32,
    "clipped": np.bool_,
}
_TRACE_SCHEMA = pa.schema(
    [
        ("update", pa.int32()),
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("step", pa.int32()),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in _OF_TOKENS.items()),
    ]
)


def write_traces(directory: Path, version: int, traces: Sequence[StepTrace]) -> WrittenFile:
    """Write the traces of a batch durably; return the file. version: policy version before. Raises RunError."""
    rows = [{name: getattr(trace, name) for name in _TRACE_SCHEMA.names} for trace in traces]
    return write_table(directory, trace_file(version), pa.Table.from_pylist(rows, schema=_TRACE_SCHEMA))


def read_traces(directory: Path, file: WrittenFile, trajectory_id: str | None = None) -> list[StepTrace]:
    """Return traces of one trajectory, or of all, in the order of writing. Raises DamageError."""
    filters = None if trajectory_id is None else [("trajectory_id", "=", trajectory_id)]
    traces = []
    for row in pq.read_table(open_shard(directory, file), filters=filters).to_pylist():
        arrays = {name: np.array(row[name], dtype) for name, dtype in _OF_TOKENS.items() if row[name] is not None}
        traces.append(StepTrace(**{**row, **arrays}))
    return traces
