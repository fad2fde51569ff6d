"""Shards give back exactly what was recorded, are complete or absent, and pandas reads them."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import check_finished, query, start
from tests.worlds import Quiet, make_group, make_step, tiny
from treadle.api.train import train_run
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import DamageError, RunError
from treadle.core.files import write_atomically
from treadle.core.rewards import Reward
from treadle.core.support import Probabilities, Support
from treadle.core.trainer import StepTrace
from treadle.core.types import BreakCause, DropReason, Routing, SamplingParams, Status, Step, StopReason, Trajectory
from treadle.plan.inputs import load_inputs
from treadle.record.image_files import name_of
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import OPEN_SHARD
from treadle.record.record import Record
from treadle.record.rollout_store import (
    completion_of,
    open_steps,
    packed_completion,
    packed_step,
    read_steps,
    read_traces,
    write_shard,
    write_table,
    write_traces,
)
from treadle.record.run_directory import RunDirectory

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
        withheld=draw(st.integers(0, 3)),
        probabilities=_probabilities(draw(st.sampled_from([size, 0])), draw),
        support=draw(
            st.sampled_from([None, Support.of([draw(_kept(token)) for token in completion])] if size else [None])
        ),
    )


def _kept(token: int) -> st.SearchStrategy[list[int] | None]:
    return st.none() | st.sets(st.integers(0, 2**31 - 1), max_size=4).map(lambda others: sorted({token, *others}))


def _probabilities(tokens: int, draw: st.DrawFn) -> Probabilities | None:
    """None, as written, for no tokens."""
    likely = st.dictionaries(st.integers(0, 2**31 - 1), st.floats(0, 1, width=32), max_size=3)
    of_each = [sorted(draw(likely).items()) for _ in range(tokens)]
    made = [(np.array([v for v, _ in q], np.int32), np.array([p for _, p in q], np.float32)) for q in of_each]
    return Probabilities.of_tokens(made) if tokens else None


def _routing(tokens: int, layers: int, top_k: int) -> Routing:
    """As of a model with so many experts that ids need all 16 bits."""
    rows = np.arange(tokens * layers)[:, None] * 999 % 2**15
    return ((rows + np.arange(top_k)) % 2**15).reshape(tokens, layers, top_k).astype(np.int16)


def plain(value: Any) -> Any:
    """Arrays as their type, shape and bytes, so that records compare bit by bit."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return [plain(getattr(value, field.name)) for field in fields(value)] if is_dataclass(value) else value


@settings(max_examples=40)
@given(st.lists(st.lists(steps(), max_size=3), min_size=1, max_size=3))
def test_a_shard_gives_back_every_bit(tmp_path_factory: pytest.TempPathFactory, recorded: list[list[Step]]) -> None:
    directory = tmp_path_factory.mktemp("rollouts")
    trajectories = [Trajectory(f"g.{n}", "t", n, tuple(own), 0.0, Status.DONE) for n, own in enumerate(recorded)]
    shard = write_shard(directory, "train-g", [make_group(0, *trajectories, name="g")])
    assert [p.name for p in directory.iterdir()] == [shard.name] == ["train-g.parquet"]
    for trajectory in trajectories:
        found = read_steps(directory, shard, trajectory.trajectory_id)
        assert [plain(step) for step in found] == [plain(step) for step in trajectory.steps]
    assert read_steps(directory, shard, "nobody") == []


@settings(max_examples=20)
@given(steps())
def test_an_answer_of_an_open_call_gives_back_every_bit(step: Step) -> None:
    versions = [VersionSpan(n, n, n + 1) for n in range(len(step.completion_ids))]
    answer = Completion(
        step.completion_ids,
        step.logprobs,
        step.stop_reason,
        tuple(versions),
        routing=step.routing,
        support=Support.of([[token] for token in step.completion_ids.tolist()]) if len(versions) else None,
        probabilities=step.probabilities,
    )
    assert plain(completion_of(packed_completion(answer))) == plain(answer)


@settings(max_examples=20)
@given(st.lists(steps(), min_size=1, max_size=3), st.integers(0, 3))
def test_steps_in_the_ledger_give_back_every_bit(
    tmp_path_factory: pytest.TempPathFactory, recorded: list[Step], known: int
) -> None:
    """Recorded by and by, some of them twice; then all in a shard."""
    run = tmp_path_factory.mktemp("run")
    (run / "rollouts").mkdir()
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        for end in range(1, len(recorded) + 1):
            trajectory = Trajectory("a", "t", 0, tuple(recorded[:end]), None, Status.UNRATED)
            rows = {n: packed_step("t", "a", n, recorded[n], name_of) for n in range(max(0, end - 1 - known), end)}
            ledger.record_open(make_group(0, trajectory, name="t"), rows)
            found = read_steps(run / "rollouts", ledger.shard(OPEN_SHARD), "a")
            assert [plain(step) for step in found] == [plain(step) for step in recorded[:end]]
        ledger.settle(write_table(run / "rollouts", "x.parquet", open_steps(ledger)))
        ledger.prove()
        [row] = ledger.query("SELECT shard, steps FROM trajectories")
        assert row == {"shard": "x.parquet", "steps": len(recorded)} and ledger.open_steps() == []
        found = read_steps(run / "rollouts", ledger.shard("x.parquet"), "a")
    assert [plain(step) for step in found] == [plain(step) for step in recorded]


def test_pandas_reads_a_shard(tmp_path: Path) -> None:
    steps = (make_step(), make_step([1, 2, 3], [4], 0.5))
    shard = write_shard(tmp_path, "x", [make_group(0, Trajectory("g0.0", "t", 0, steps, 1.0, Status.DONE), name="g0")])
    table = pandas.read_parquet(tmp_path / shard.name)
    assert (table.trajectory_id.tolist(), table.step.tolist()) == (["g0.0", "g0.0"], [0, 1])
    assert (table.completion_ids[1].tolist(), table.reward.tolist()) == ([4], [0.0, 0.5])
    assert table.logprobs[0].dtype == np.float32 and table.stop_reason.unique().tolist() == ["stop"]


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


floats = st.floats(width=32, allow_nan=False)


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    size = draw(st.integers(0, 5))

    def array(values: st.SearchStrategy[Any], dtype: type[np.generic]) -> Any:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype)

    return StepTrace(
        update=draw(st.integers(1, 9)),
        group_id="g",
        trajectory_id=draw(st.sampled_from(["g.0", "g.1"])),
        step=draw(st.integers(0, 9)),
        logprobs=array(floats, np.float32),
        entropy=array(floats, np.float32),
        advantage=array(floats, np.float32),
        ratio=array(floats, np.float32) if draw(st.booleans()) else None,
        clipped=array(st.booleans(), np.bool_) if draw(st.booleans()) else None,
    )


def plain_traces(found: Sequence[StepTrace]) -> list[Any]:
    return [plain(trace) for trace in found]


@settings(max_examples=40)
@given(st.lists(traces(), min_size=1, max_size=5))
def test_a_file_gives_back_every_bit(tmp_path_factory: pytest.TempPathFactory, written: list[StepTrace]) -> None:
    folder = tmp_path_factory.mktemp("traces")
    file = write_traces(folder, 12, written)
    assert [path.name for path in folder.iterdir()] == [file.name] == ["v000012.parquet"]
    assert plain_traces(read_traces(folder, file)) == plain_traces(written)
    for name in ("g.0", "g.1", "nobody"):
        assert plain_traces(read_traces(folder, file, name)) == plain_traces(
            [t for t in written if t.trajectory_id == name]
        )


TRACED = "orchestration.traced_groups=1"


def test_what_is_traced_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    kept = start(tmp_path / "all", TRACED)
    none = start(tmp_path / "none", "orchestration.traced_groups=0")
    assert kept["weights_sha256"] == none["weights_sha256"]
    for run in ("all", "none"):
        check_finished(tmp_path / run)
    assert len(list((tmp_path / "all" / "traces").iterdir())) == 4 and not list(
        (tmp_path / "none" / "traces").iterdir()
    )
    [row] = query(tmp_path / "all", "SELECT trajectory_id FROM trajectories WHERE advantage NOT NULL LIMIT 1")
    record = Record.open(tmp_path / "all")
    ledger_row, steps = record.trajectory(row["trajectory_id"])
    found = record.traces(row["trajectory_id"], ledger_row["trained_version"])
    assert [trace.step for trace in found] == list(range(len(steps)))
    for trace, step in zip(found, steps, strict=True):
        np.testing.assert_allclose(trace.logprobs, step.logprobs, atol=1e-4)  # of the engine, with the same weights
        np.testing.assert_allclose(trace.advantage, ledger_row["advantage"], rtol=1e-6)
    assert Record.open(tmp_path / "none").traces(row["trajectory_id"], ledger_row["trained_version"]) == []
    table = pandas.read_parquet(tmp_path / "all" / "traces")
    assert table["update"].tolist() == sorted(table["update"]) and set(table["update"]) == {1, 2, 3, 4}
    assert table.clipped[0].dtype == np.bool_ and len(table.ratio[0]) == len(table.entropy[0])


def test_a_run_that_goes_back_forgets_the_traces_of_what_it_undoes(tmp_path: Path) -> None:
    """Here nothing is traced afterwards, so that those that are left are those from before."""
    run, often = tmp_path / "run", ("orchestration.checkpoint_every=1", "orchestration.keep_last=9")
    start(run, TRACED, *often)
    before = {file.name: file.read_bytes() for file in (run / "traces").iterdir()}
    config = tiny("orchestration.traced_groups=0", *often)
    train_run(config, load_inputs(config), run, Quiet(), checkpoint="step-000002", resume=True)
    left = {name: before[name] for name in ("v000000.parquet", "v000001.parquet")}
    assert {file.name: file.read_bytes() for file in (run / "traces").iterdir()} == left
    ledger = RunDirectory.open(run).ledger()
    assert ledger.traces().keys() == left.keys()


def test_a_damaged_file_is_refused_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, TRACED, "orchestration.updates=1")
    record = Record.open(run)
    assert record.traces("g000000.0", 0)
    file = run / "traces" / "v000000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamageError, match=r"v000000\.parquet"):
        record.traces("g000000.0", 0)
