"""Shards give back exactly what was recorded, are complete or absent, and pandas reads them."""

import errno
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import make_group, make_step
from treadle.core.errors import RunError
from treadle.core.files import write_atomically
from treadle.core.rewards import Reward
from treadle.core.types import (
    BreakCause,
    DropReason,
    Routing,
    SamplingParams,
    Status,
    Step,
    StopReason,
    Trajectory,
)
from treadle.orchestration.store.rollout_store import read_steps, write_shard

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
amounts = st.floats(-1e11, 1e11)  # of rewards


@st.composite
def steps(draw: st.DrawFn) -> Step:
    completion = draw(ids)
    size = len(completion)

    def exactly(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    temperature = draw(st.sampled_from([0.0, 0.7, 1.0]))
    tokens = np.array(exactly(st.floats(-(2**30), 2**30, width=32)), np.float32)
    return Step(
        prompt_ids=np.array([*draw(ids), 1], np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(exactly(st.floats(max_value=0, width=32, allow_infinity=False)), np.float32),
        policy_versions=np.array(exactly(st.integers(0, 100)), np.int32),
        mask=np.array(exactly(st.booleans() if temperature else st.just(False)), np.bool_),
        sampling=SamplingParams(temperature, draw(st.integers(1, 9)), ("</s>", "é"), draw(st.integers(0, 2**63 - 1))),
        stop_reason=draw(st.sampled_from(StopReason)),
        reward=draw(amounts),
        seconds=draw(st.floats(0, 1e9)),
        routing=draw(st.none() | st.builds(_routing, st.integers(0, size), st.integers(0, 3), st.integers(1, 2))),
        given=Reward(draw(st.dictionaries(st.sampled_from("abé"), amounts)), draw(st.sampled_from([None, tokens]))),
        shaping=draw(amounts),
        state_key=draw(st.sampled_from(["", "f3"])),
        break_cause=draw(st.sampled_from([None, *BreakCause])),
        dropped=draw(st.sampled_from([None, DropReason.CANCELLED])),
        started=draw(st.none() | st.floats(0, 1e10)),
        waited=draw(st.none() | st.floats(0, 1e9)),
    )


def _routing(tokens: int, layers: int, top_k: int) -> Routing:
    """As of a model with so many experts that ids need all 16 bits."""
    rows = np.arange(tokens * layers)[:, None] * 999 % 2**15
    return ((rows + np.arange(top_k)) % 2**15).reshape(tokens, layers, top_k).astype(np.int16)


def same(a: Step, b: Step) -> bool:
    arrays = ("prompt_ids", "completion_ids", "logprobs", "policy_versions", "mask")
    plain = {field.name for field in fields(Step)} - {*arrays, "routing", "given"}
    tokens = [None if step.given.tokens is None else step.given.tokens.tobytes() for step in (a, b)]
    exact = all(
        getattr(a, n).tobytes() == getattr(b, n).tobytes() and getattr(a, n).dtype == getattr(b, n).dtype
        for n in arrays
    )
    if (a.routing is None) != (b.routing is None):
        return False
    if a.routing is not None and b.routing is not None:
        exact &= a.routing.dtype == b.routing.dtype and np.array_equal(a.routing, b.routing)
    given = tokens[0] == tokens[1] and a.given.components == b.given.components
    return exact and given and all(getattr(a, n) == getattr(b, n) for n in plain)


@settings(max_examples=40)
@given(st.lists(st.lists(steps(), max_size=3), min_size=1, max_size=3))
def test_a_shard_gives_back_every_bit(tmp_path_factory: pytest.TempPathFactory, recorded: list[list[Step]]) -> None:
    directory = tmp_path_factory.mktemp("rollouts")
    trajectories = [Trajectory(f"g.{n}", "t", n, tuple(own), 0.0, Status.DONE) for n, own in enumerate(recorded)]
    shard = write_shard(directory, "train-g", [make_group(0, *trajectories, name="g")])
    assert [p.name for p in directory.iterdir()] == [shard.name] == ["train-g.parquet"]
    for trajectory in trajectories:
        found = read_steps(directory, shard, trajectory.trajectory_id)
        assert len(found) == len(trajectory.steps)
        assert all(map(same, trajectory.steps, found))
    assert read_steps(directory, shard, "nobody") == []


def test_pandas_reads_a_shard(tmp_path: Path) -> None:
    done = [
        Trajectory(f"g0.{n}", "t", n, (make_step(), make_step([1, 2, 3], [4], 0.5)), 1.0, Status.DONE) for n in range(2)
    ]
    shard = write_shard(tmp_path, "x", [make_group(0, *done, name="g0")])
    table = pandas.read_parquet(tmp_path / shard.name)
    assert table.trajectory_id.tolist() == ["g0.0", "g0.0", "g0.1", "g0.1"]
    assert table.step.tolist() == [0, 1, 0, 1]
    assert table.completion_ids[1].tolist() == [4]
    assert table.logprobs[0].dtype == np.float32
    assert table.reward.tolist() == [0.0, 0.5, 0.0, 0.5]
    assert table.stop_reason.unique().tolist() == ["stop"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    with pytest.raises(RunError, match="No space left on device; free disk space, then --resume"):
        write_shard(tmp_path, "shard", [make_group(0)])
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]
    monkeypatch.undo()
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
