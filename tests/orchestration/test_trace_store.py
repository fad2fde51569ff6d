"""Files of traces give back what was written, and a run keeps those of what its checkpoints contain."""

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestration.runs import check_finished, query, start
from tests.worlds import Quiet, tiny
from treadle.core.errors import DamageError
from treadle.core.trainer import StepTrace
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.store.rollout_store import load_traces, load_trajectory, read_traces, write_traces
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.orchestration.train import train_run

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


def plain(found: Sequence[StepTrace]) -> list[list[Any]]:
    values = ([getattr(trace, field.name) for field in fields(trace)] for trace in found)
    return [[(v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for v in row] for row in values]


@settings(max_examples=40)
@given(st.lists(traces(), min_size=1, max_size=5))
def test_a_file_gives_back_every_bit(tmp_path_factory: pytest.TempPathFactory, written: list[StepTrace]) -> None:
    folder = tmp_path_factory.mktemp("traces")
    file = write_traces(folder, 12, written)
    assert [path.name for path in folder.iterdir()] == [file.name] == ["v000012.parquet"]
    assert plain(read_traces(folder, file)) == plain(written)
    for name in ("g.0", "g.1", "nobody"):
        assert plain(read_traces(folder, file, name)) == plain([t for t in written if t.trajectory_id == name])


ALL = "orchestration.traced_groups=1"


def test_what_is_traced_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    kept = start(tmp_path / "all", ALL)
    none = start(tmp_path / "none", "orchestration.traced_groups=0")
    assert kept["weights_sha256"] == none["weights_sha256"]
    for run in ("all", "none"):
        check_finished(tmp_path / run)
    assert len(list((tmp_path / "all" / "traces").iterdir())) == 4 and not list(
        (tmp_path / "none" / "traces").iterdir()
    )
    [row] = query(tmp_path / "all", "SELECT trajectory_id FROM trajectories WHERE advantage NOT NULL LIMIT 1")
    ledger_row, steps = load_trajectory(tmp_path / "all", row["trajectory_id"])
    found = load_traces(tmp_path / "all", row["trajectory_id"])
    assert [trace.step for trace in found] == list(range(len(steps)))
    for trace, step in zip(found, steps, strict=True):
        np.testing.assert_allclose(trace.logprobs, step.logprobs, atol=1e-4)  # of the engine, with the same weights
        np.testing.assert_allclose(trace.advantage, ledger_row["advantage"], rtol=1e-6)
    assert load_traces(tmp_path / "none", row["trajectory_id"]) == []
    table = pandas.read_parquet(tmp_path / "all" / "traces")
    assert table["update"].tolist() == sorted(table["update"]) and set(table["update"]) == {1, 2, 3, 4}
    assert table.clipped[0].dtype == np.bool_ and len(table.ratio[0]) == len(table.entropy[0])


def test_a_run_that_goes_back_forgets_the_traces_of_what_it_undoes(tmp_path: Path) -> None:
    """Here nothing is traced afterwards, so that those that are left are those from before."""
    run, often = tmp_path / "run", ("orchestration.checkpoint_every=1", "orchestration.keep_last=9")
    start(run, ALL, *often)
    before = {file.name: file.read_bytes() for file in (run / "traces").iterdir()}
    config = tiny("orchestration.traced_groups=0", *often)
    train_run(config, load_inputs(config), run, Quiet(), checkpoint="step-000002", resume=True)
    left = {name: before[name] for name in ("v000000.parquet", "v000001.parquet")}
    assert {file.name: file.read_bytes() for file in (run / "traces").iterdir()} == left
    ledger = RunDirectory.open(run).ledger()
    assert ledger.traces().keys() == left.keys()


def test_a_damaged_file_is_refused_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, ALL)
    shutil.copytree(run, tmp_path / "copy")
    file = tmp_path / "copy" / "traces" / "v000000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamageError, match=r"v000000\.parquet"):
        load_traces(tmp_path / "copy", "g000000.0")
    assert load_traces(run, "g000000.0")
