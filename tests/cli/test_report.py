"""`treadle report`: every step accounted for, whatever happened to the run."""

import fcntl
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Place, Trained, make_place
from tests.cli.worlds import TRAJECTORIES, Calls, compacted, files, playing, record, text_of, treadle, whole
from tests.runs import change_ledger, put_config, put_file, shard_of
from treadle.cli.report import read_run
from treadle.record.run_directory import RunDirectory
from treadle.report.curve import group_runs, panels


def facts(run: Trained | Path) -> dict[str, Any]:
    done = treadle("report", run if isinstance(run, Path) else run.path, "--json")
    assert (done.status, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


def states(found: dict[str, Any], split: str = "train") -> dict[tuple[str, str | None], int]:
    return {(row["state"], row["reason"]): row["count"] for row in found["steps"] if row["split"] == split}


def test_a_finished_run(finished: Trained) -> None:
    found = facts(finished)
    assert (found["state"], found["update"], found["updates"]) == ("finished", 4, 4)
    train, held_out = found["splits"]
    assert (train["split"], train["groups"], train["trajectories"], train["steps"]) == ("train", 16, 64, 64)
    assert (held_out["split"], held_out["trajectories"]) == ("held_out", 60)  # twice greedy, three times sampled
    assert states(found) == {("trained", None): 64} and states(found, "held_out") == {("evaluated", None): 60}
    assert found["failures"] == [] and found["latest_checkpoint"] == "step-000004"
    assert found["checkpoints"] == ["step-000002", "step-000004"]
    assert [row["update"] for row in found["evaluations"]] == [0, 0, 2, 4, 4]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    place = make_place(tmp_path_factory.mktemp("measured"), cache)
    done = place.train(*playing("Measures", held_out=True), "evaluation.attempts=2", "orchestration.updates=2")
    assert done.status == 0, done.err
    return place.runs / "new"


def test_pass_at_k_and_environment_metrics_are_shown(measured: Path) -> None:
    out, found = treadle("report", measured).out, facts(measured)
    row, last = found["evaluations"][0], found["last_update"]
    [heading] = [line.split() for line in out.splitlines() if line.startswith("update ") and "env/" in line]
    assert "pass@2 pass@k tasks reward" in " ".join(heading)
    assert heading[:5] == ["update", "T", "tasks", "success", "pass@1"] and heading[-1] == "env/characters"
    assert "a 0" in " ".join(heading)  # parts are labelled with what they are by
    [first] = [line.split() for line in out.splitlines() if line.split()[:2] == ["0", "1"]]
    assert first[4:7] == [*(f"{row['pass_at'][k]:.3f}" for k in "12"), str(row["tasks"])]
    assert first[-1] == f"{row['metrics']['env/characters']:.3f}"
    passes = "  ".join(f"pass@{k} {last[f'pass_at_{k}']:.3f}" for k in (1, 2, 4))
    assert f"{passes} of {last['pass_tasks']:.0f} tasks  env/characters {last['env/characters']:.3f}\n" in out
    assert "update 2/2  reward" in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    out = re.sub(r"\x1b\[[0-9;]*m", "", treadle("report", measured).out)
    tables = out.split("held-out tasks\n")[1].split("checkpoints:")[0]
    assert max(map(len, tables.splitlines())) <= width
    for row in facts(measured)["evaluations"]:
        for value in (*row["by"].values(), *row["pass_at"].values(), *row["metrics"].values()):
            assert f" {value:.3f}" in tables


def test_tokens_agree_with_the_rollouts(finished: Trained) -> None:
    found = facts(finished)
    tables = [pq.read_table(path) for path in (finished.path / "rollouts").glob("train-*.parquet")]
    lengths = [(len(row["prompt_ids"]), len(row["completion_ids"])) for table in tables for row in table.to_pylist()]
    assert found["splits"][0]["prompt_tokens"] == sum(p for p, _ in lengths)
    assert found["splits"][0]["completion_tokens"] == sum(c for _, c in lengths)
    packing = found["packing"]
    assert (packing["groups"], packing["trajectories"], found["missing_shards"]) == (16, 64, [])
    assert (
        packing["step"] == packing["chain"] == packing["tree"] == sum(p + c for p, c in lengths if c)
    )  # one step each
    assert packing["group_tree"] < packing["tree"] - sum(p for p, _ in lengths) // 2  # four attempts at each prompt
    assert packing["ratios"] == {"chain": 1.0, "tree": 1.0, "group_tree": packing["step"] / packing["group_tree"]}
    assert [(row["split"], row["steps"], row["opens"]) for row in found["relations"]["splits"]] == [
        ("train", 64, 64), ("held_out", 60, 60)
    ]  # fmt: skip
    logged = sum(row["packed_tokens"] for row in metrics(finished) if row["kind"] == "update")
    assert packing["chain"] == logged


def metrics(run: Trained) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def prefixes(calls: Calls) -> set[tuple[int, ...]]:
    return {tuple(ids[: n + 1]) for ids in map(whole, calls) for n in range(len(ids))}


def test_tokens_of_every_packing(broken: Path) -> None:
    packing = facts(broken)["packing"]
    lengths = [[len(whole(call)) for call in calls] for calls in TRAJECTORIES]
    step = sum(map(sum, lengths))
    chain = step - lengths[0][0] - lengths[0][2] - lengths[1][0]  # what is extended is not computed again
    tree = sum(len(prefixes(calls)) for calls in TRAJECTORIES)
    group_tree = len(prefixes([call for calls in TRAJECTORIES for call in calls]))
    assert step > chain > tree > group_tree
    assert packing == {
        "groups": 1,
        "trajectories": 2,
        **{"step": step, "chain": chain, "tree": tree, "group_tree": group_tree},
        "ratios": {"chain": step / chain, "tree": step / tree, "group_tree": step / group_tree},
    }


def test_breaks_by_cause_with_the_costliest(broken: Path) -> None:
    found = facts(broken)["relations"]
    breaks = {  # cause -> (trajectory, step, the step it breaks with)
        "tokenization": (0, 2, 1),
        "truncated": (0, 5, 4),
        "changed": (1, 2, 1),
    }
    expected: list[dict[str, Any]] = []
    for cause, (attempt, step, base) in breaks.items():
        was, now = whole(TRAJECTORIES[attempt][base]), TRAJECTORIES[attempt][step][0]
        at = next(n for n in range(len(now)) if was[n] != now[n])
        sides = {
            side: {"ids": tokens[at : at + 5], "text": text_of(tokens[at : at + 5])}
            for side, tokens in (("was", was), ("now", now))
        }
        extra = min(len(was), len(now)) - at
        example = {
            "trajectory_id": f"g000000.{attempt}",
            **{"step": step, "kind": "break", "base": base, "shared": at, "cause": cause},
            **{**sides, "extra_tokens": extra},
        }
        expected.append({"cause": cause, "count": 1, "extra_tokens": extra, "examples": [example]})
    assert found["breaks"] == sorted(expected, key=lambda row: -row["extra_tokens"])
    counts = {"split": "train", "steps": 10, "opens": 3, "extends": 3, "fork": 1, "break": 3}
    assert found["splits"] == [{**counts, "extra_tokens": sum(row["extra_tokens"] for row in expected)}]
    assert found["no_tokenizer"] is None


def test_the_text_of_breaks(broken: Path) -> None:
    done = treadle("report", broken)
    assert (done.status, done.err) == (0, "")
    found = facts(broken)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "tokens to compute in training (trajectories 2, groups 1)" in lines
    packing = found["packing"]
    assert f"step {packing['step']}" in lines
    assert f"tree, within groups {packing['group_tree']} {packing['ratios']['group_tree']:.2f}" in lines
    extra = found["relations"]["splits"][0]["extra_tokens"]
    assert f"train 10 3 3 1 3 {extra}" in lines
    for row in found["relations"]["breaks"]:
        assert f"{row['cause']} 1 {row['extra_tokens']}" in lines
        [example] = row["examples"]
        sides = (f"{example[side]['text']!r} {example[side]['ids']}" for side in ("was", "now"))
        where = f"{example['trajectory_id']} {example['step']} {row['cause']} {example['shared']} {row['extra_tokens']}"
        assert " ".join([where, *sides]) in lines


def test_without_a_tokenizer_all_else_is_counted(broken: Path, tmp_path: Path) -> None:
    shutil.copytree(broken, tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    put_config(tmp_path / "run", config.replace("tokenizer: demo", "tokenizer: nowhere"))
    found = facts(tmp_path / "run")
    assert found["packing"] == facts(broken)["packing"]
    assert (found["relations"]["splits"], found["relations"]["breaks"]) == ([], [])
    assert "no tokenizer.json in 'nowhere'" in found["relations"]["no_tokenizer"]
    done = treadle("report", tmp_path / "run")
    assert done.status == 0 and "breaks not counted, there is no tokenizer: " in done.out


def test_shards_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, broken: Path) -> None:
    found = facts(broken)
    monkeypatch.setattr("treadle.record.rollout_store._BATCH", 3)
    assert facts(broken) == found


def test_failures_by_cause_with_an_example(troubled: Trained) -> None:
    found = facts(troubled)
    [failure] = found["failures"]
    assert failure["cause"] == "environment"
    assert failure["message"].startswith("step raised ZeroDivisionError: ")
    dropped = states(found)["dropped", "failed"]
    failed = {row["split"]: row["count"] for row in found["statuses"] if row["status"] == "failed"}
    assert dropped == failed["train"] > 0
    assert failure["count"] == failed["train"] + failed["held_out"]
    assert states(found)["trained", None] + dropped == found["splits"][0]["steps"]
    assert (
        f"failed {failure['count']}x environment, as {failure['trajectory_id']}: "
        in treadle("report", troubled.path).out
    )


def test_every_failure_with_its_traceback(troubled: Trained, finished: Trained) -> None:
    listed = json.loads(treadle("report", troubled.path, "--failures", "--json").out)
    assert len(listed) > 1 and sum(row["count"] for row in listed) == facts(troubled)["failures"][0]["count"]
    assert [row["count"] for row in listed] == sorted((row["count"] for row in listed), reverse=True)
    done = treadle("report", troubled.path, "--failures")
    assert (done.status, done.err) == (0, "")
    for row in listed:
        assert (
            f"failed {row['count']}x environment, as {row['trajectory_id']}: {row['message']}\n  Traceback" in done.out
        )
        assert "worlds.py" in row["traceback"] and "in step" in row["traceback"]
        assert row["traceback"].splitlines()[-1] == row["message"].removeprefix("step raised ")
    shown = treadle("show", troubled.path, listed[0]["trajectory_id"]).out
    assert '\n  Traceback (most recent call last):\n    File "' in shown and "ZeroDivisionError(f" in shown
    assert f"treadle report {troubled.path} --failures" in treadle("report", troubled.path).out
    assert treadle("report", finished.path, "--failures").out == "no attempt failed\n"


def test_a_stopped_run_says_how_to_go_on(stopped: Trained) -> None:
    found = facts(stopped)
    assert (found["state"], found["update"], found["latest_checkpoint"]) == ("stopped", 3, "step-000003")
    assert states(found) == {("trained", None): 48}
    command = f"treadle train {stopped.path} --resume"
    assert f"continue from step-000003 with: {command}\n" in treadle("report", stopped.path).out


def test_a_run_in_progress(finished: Trained, place: Place) -> None:
    """Locked, with steps in no checkpoint yet, a half-written line of metrics and a shard the ledger does not know."""
    run = place.runs / "run"
    shutil.copytree(finished.path, run)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    shutil.copy(next((run / "rollouts").glob("train-*")), run / "rollouts" / ".train-g000099.parquet.tmp")
    change_ledger(run, "UPDATE steps SET state = 'recorded' WHERE trajectory_id LIKE 'g000012.%'")
    with (run / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(treadle("report", run, "--json").out)
    assert found["state"] == "in progress"
    assert states(found) == {("trained", None): 60, ("recorded", None): 4}
    assert found["packing"]["trajectories"] == 64
    assert json.loads(treadle("report", run, "--json").out)["state"] == "stopped"


def test_what_was_dropped_before_training_is_not_computed_in_training(finished: Trained, place: Place) -> None:
    run = place.runs / "run"
    shutil.copytree(finished.path, run)
    shard = run / "rollouts" / shard_of(finished.path, "g000005.2")
    rows = pq.read_table(shard).to_pylist()
    [own] = [row for row in rows if row["trajectory_id"] == "g000005.2"]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([*rows, {**own, "step": 1}], pq.read_schema(shard)), sink)
    put_file(run, f"rollouts/{shard.name}", bytes(sink.getvalue()))
    change_ledger(
        run,
        "INSERT INTO steps SELECT trajectory_id, 1, 'dropped', 'stale', prompt_tokens, completion_tokens, stop_reason, "
        "reward FROM steps WHERE trajectory_id = 'g000005.2'",
    )
    found = facts(run)
    assert found["packing"] == facts(finished)["packing"]
    assert found["relations"]["splits"][0]["steps"] == 65


def test_a_run_in_its_warm_start(finished: Trained, place: Place) -> None:
    shutil.copy(finished.path / "config.yaml", place.path)
    for command in ("report", "show"):
        done = treadle(command, place.path)
        assert done.status == 1 and "has recorded nothing yet" in done.error


@pytest.fixture
def copy(finished: Trained, tmp_path: Path) -> Path:
    """A finished run's configuration and metrics, which is all that is drawn."""
    run = tmp_path / "copy"
    run.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(finished.path / name, run)
    return run


def test_runs_over_seeds_are_one_line_and_others_have_their_own(finished: Trained, place: Place) -> None:
    for name, setting in (("other-seed", "seed=1"), ("other-rate", "training.optimizer.learning_rate=0.002")):
        assert place.train(setting, name=name).status == 0
    runs, output = [finished.path, place.runs / "other-seed", place.runs / "other-rate"], place.path / "curves.png"
    before = [files(run) for run in runs]
    done = treadle("plot", *runs, finished.path, "--output", output)  # a run that is given twice counts once
    assert done.status == 0 and done.err == ""
    assert done.out.splitlines() == [
        "training.optimizer.learning_rate=0.001: seeds 0, 1, 4 updates",
        "training.optimizer.learning_rate=0.002: seed 0, 4 updates",
        f"picture  {output}",
    ]
    assert output.read_bytes().startswith(b"\x89PNG")
    assert [files(run) for run in runs] == before

    found = panels(group_runs(map(read_run, runs)))
    reward = next(panel for panel in found if panel.title == "training reward")
    assert [curve.values.shape for curve in reward.curves] == [(2, 4), (1, 4)]
    logged = [row["reward_mean"] for row in RunDirectory(runs[2]).metrics() if row["kind"] == "update"]
    assert reward.curves[1].mean.tolist() == logged
    [evaluated, *_] = (row for row in RunDirectory(runs[0]).metrics() if row["kind"] == "evaluation")
    kinds = {f"held-out success, a {key}" for key in evaluated["by"]}
    assert {"held-out success, all tasks", *kinds} == {p.title for p in found if p.title.startswith("held-out")}


def test_lines_are_named_by_labels(finished: Trained, tmp_path: Path) -> None:
    done = treadle("plot", finished.path, "--output", tmp_path / "plot.svg", "--labels", "as it comes")
    assert done.status == 0 and done.out.startswith("as it comes: seed 0, 4 updates\n")
    done = treadle("plot", finished.path, "--output", tmp_path / "plot.svg", "--labels", "one", "two")
    assert done.status == 2 and "labels: got 2, expected 1" in done.err


def test_the_picture_that_a_run_ends_with_is_the_same(finished: Trained, tmp_path: Path) -> None:
    assert treadle("plot", finished.path, "--output", tmp_path / "plot.png").status == 0
    assert (tmp_path / "plot.png").read_bytes() == (finished.path / "curve.png").read_bytes()


def test_a_line_ends_where_its_shortest_run_does(finished: Trained, copy: Path, tmp_path: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"update": 4' not in line))
    done = treadle("plot", copy, finished.path, "--output", tmp_path / "plot.png")
    assert done.out.startswith("tiny: seeds 0, 0, 3 updates, where the shortest run ends (the longest has 4)\n")


def test_a_run_without_updates(copy: Path, finished: Trained, tmp_path: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    done = treadle("plot", finished.path, copy, "--output", tmp_path / "plot.png")
    problem = "has no updates yet; plot it after its first update, or leave it out"
    assert (done.status, done.error) == (1, f"error: run '{copy}' {problem}")
    assert not (tmp_path / "plot.png").exists()


def test_a_damaged_line_is_named_and_left_out(copy: Path, tmp_path: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    [broken] = [n for n, line in enumerate(lines) if '"kind": "update", "update": 2' in line]
    lines[broken] = lines[broken].replace("update", "upd", 1)
    (copy / "metrics.jsonl").write_text("".join(lines))
    done = treadle("plot", copy, "--output", tmp_path / "plot.png")
    problem = f"metrics.jsonl cannot be read in line {broken + 1} and has no line of update 2"
    assert (done.status, done.error) == (0, f"warning: run '{copy}': {problem}; left out of the picture")
    [curve] = panels(group_runs([read_run(copy)]))[0].curves
    assert curve.updates == (1, 3, 4)


def test_the_price_of_compactions(tmp_path: Path, broken: Path) -> None:
    """Also beside a trajectory without any, which is not counted."""
    record(tmp_path / "run", compacted(), compacted()[:1])
    [row] = facts(tmp_path / "run")["compactions"]
    counts = {"split": "train", "trajectories": 1, "compactions": 2, "read": 386, "read_without": 446}
    assert row == {**counts, "computed": 166, "computed_without": 105}
    lines = [" ".join(line.split()) for line in treadle("report", tmp_path / "run").out.splitlines()]
    assert "split trajectories compactions read without computed without" in lines
    assert "train 1 2 386 446 166 105" in lines
    assert facts(broken)["compactions"] == [] and "compactions" not in treadle("report", broken).out


def test_a_run_that_learns_nothing_says_so(finished: Trained, tmp_path: Path) -> None:
    run = RunDirectory(Path(shutil.copytree(finished.path, tmp_path / "run")))
    last = [row for row in run.metrics() if row["kind"] == "update"][-1]
    for number in range(10):
        run.log({**last, "update": 5 + number, "reward_mean": 0.0, "reward_positive": 0.0})
    assert "of the last 8 updates are 0" in facts(run.path)["stalls"]["zero"]
    assert re.search(
        r"^warning: all \d+ rewards of the last 8 updates are 0, so that", treadle("report", run.path).out, re.M
    )
