"""What the pages are given is what the ledger, the shards and metrics.jsonl hold, each read here by itself."""

import json
import re
import shutil
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.cli.worlds import files
from tests.runs import change_ledger
from tests.view.conftest import Get, asking
from tests.view.worlds import ESCAPES, UPDATES, attempt, evaluated, log_update, record_run
from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.types import DropReason
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.rollout_store import write_shard
from treadle.record.run_directory import RunDirectory
from treadle.view import trajectories
from treadle.view.app import make_app
from treadle.view.groups import REASONS, failure_settings

RUN = "runs/recorded"


def ledger(run: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{(run / 'ledger.sqlite').as_uri()}?immutable=1", uri=True)) as connection:
        return connection.execute(sql, values).fetchall()


def shard_rows(run: Path, trajectory: str) -> list[dict[str, Any]]:
    rows = pq.read_table(run / "rollouts").to_pylist()
    return sorted((row for row in rows if row["trajectory_id"] == trajectory), key=lambda row: int(row["step"]))


def sequence(view: dict[str, Any], step: dict[str, Any]) -> list[int]:
    """The tokens of a step, put together from the tree."""
    found: list[int] = []
    at = step["segment"]
    while at >= 0:
        segment = view["segments"][at]
        found = [*segment["ids"], *found]
        at = segment["parent"]
    return found


def test_the_list_says_how_far_runs_are(get: Get) -> None:
    [run] = get("runs")["runs"]
    assert (run["name"], run["state"], run["update"], run["updates"]) == ("recorded", "stopped", UPDATES, UPDATES + 3)
    assert run["best"] == run["last"] == {"update": 12, "success": 12 / 15, "reward": 12 / 15}
    assert run["seconds_per_update"] == 6.0 and run["problems"] == []


def test_counts_are_the_ledgers(get: Get, recorded: Path) -> None:
    counts = get(f"{RUN}/counts")
    own = {(s["split"], s["state"], s["reason"]): s["count"] for s in counts["states"]}
    sql = "SELECT split, state, reason, count(*) FROM steps JOIN trajectories USING (trajectory_id) JOIN groups USING "
    assert own == {row[:3]: row[3] for row in ledger(recorded, f"{sql} (group_id) GROUP BY 1, 2, 3")}
    assert {reason for _, _, reason in own if reason} == {"stale", "filtered", "failed"}
    assert [f["cause"] for f in counts["failures"]] == ["environment"]


def test_tokens_are_the_shards(get: Get, recorded: Path) -> None:
    for trajectory in ("g000000.0", "g000000.1", "g000000.2", "g000001.0", "g000003.0", "e000001-0002.0"):
        view = get(f"{RUN}/trajectories/{trajectory}")
        rows = shard_rows(recorded, trajectory)
        assert len(rows) == len(view["steps"]) > 0
        for row, step in zip(rows, view["steps"], strict=True):
            assert sequence(view, step) == row["prompt_ids"] + row["completion_ids"]
            assert step["prompt_tokens"] == len(row["prompt_ids"])
            assert step["columns"]["logprob"] == pytest.approx(row["logprobs"], abs=1e-6)
            assert (
                step["columns"]["mask"] == row["mask"] and step["columns"]["policy_version"] == row["policy_versions"]
            )
            spans = step["spans"]
            assert [s["end"] for s in spans[:-1]] == [s["start"] for s in spans[1:]] and spans[0]["start"] == 0
            assert spans[-1]["end"] == len(row["prompt_ids"]) + len(row["completion_ids"])


def test_each_step_says_what_became_of_it(get: Get, recorded: Path) -> None:
    view = get(f"{RUN}/trajectories/g000001.0")
    states = ledger(recorded, "SELECT state, reason FROM steps WHERE trajectory_id = 'g000001.0' ORDER BY step")
    assert states == [("dropped", "stale"), ("trained", None)]
    assert [(s["fate"]["state"], s["fate"]["reason"]) for s in view["steps"]] == states
    assert "orchestration.max_staleness" in view["steps"][0]["fate"]["settings"]
    assert view["steps"][1]["fate"]["text"].startswith("Trained in update 1: 2 of its 2 sampled tokens")
    failed = get(f"{RUN}/trajectories/g000000.2")
    assert failed["steps"][0]["fate"]["settings"] == ["failures.causes"]
    assert "step raised" in failed["steps"][0]["fate"]["text"] and "\x1b" not in failed["traceback"]
    assert len(failed["steps"][0]["fate"]["text"]) < 300  # of a message of a megabyte, which the page shows once
    assert len(failed["attempt"]["failure_message"]) > 2000
    assert get(f"{RUN}/trajectories/g000003.0")["steps"][0]["fate"]["state"] == "recorded"


def test_what_is_not_recorded_is_named(get: Get) -> None:
    shown = {c["name"]: c["is_recorded"] for c in get(f"{RUN}/trajectories/g000000.0")["columns"]}
    missing = {"learner_logprob", "ratio", "clipped", "entropy"}
    why = get(f"{RUN}/trajectories/g000000.0")["not_kept"]
    assert re.fullmatch(
        r"log-prob, learner, ratio, clipped, entropy: kept for [\d.]+% of groups \(\S+traced_groups\)", why
    )
    assert get(f"{RUN}/trajectories/g000001.0")["not_kept"] == ""
    assert shown == dict.fromkeys(("logprob", "advantage", "mask", "policy_version"), True) | dict.fromkeys(
        missing, False
    )
    held_out = get(f"{RUN}/trajectories/e000001-0002.0")["columns"]
    assert {c["name"] for c in held_out} == {"logprob", "mask", "policy_version"}


def test_values_of_the_learner_are_the_traces(get: Get, recorded: Path) -> None:
    view = get(f"{RUN}/trajectories/g000001.0")
    rows = pq.read_table(recorded / "traces").to_pylist()
    last = next(row for row in rows if row["update"] == 2)
    assert [step["update"] for step in view["steps"]] == [None, 2]
    names = {"learner_logprob": "logprobs", "entropy": "entropy", "advantage": "advantage", "ratio": "ratio"}
    for column, name in names.items():
        assert view["steps"][1]["columns"][column] == pytest.approx(last[name], abs=1e-6)
    assert view["steps"][1]["columns"]["clipped"] == last["clipped"]
    assert view["steps"][0]["columns"].keys() == {"logprob", "mask", "policy_version", "advantage"}


def test_a_damaged_trace_hides_nothing_else(copy: Path) -> None:
    [file] = (copy / "traces").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    view = asking(copy)("runs/copy/trajectories/g000001.0")
    assert "is damaged" in view["problem"] and len(view["steps"]) == 2
    missing = ["learner_logprob", "ratio", "clipped", "entropy"]
    assert [c["name"] for c in view["columns"] if not c["is_recorded"]] == missing


def test_calls_have_the_times_of_the_shards(get: Get, recorded: Path) -> None:
    steps = get(f"{RUN}/trajectories/g000003.0")["steps"]
    assert [step["began"] for step in steps] == pytest.approx([0, 0.3, 0.4, 1.0])
    assert {step["waited"] for step in steps} == {0.05}
    assert {step["began"] for step in get(f"{RUN}/trajectories/g000000.0")["steps"]} == {None}
    calls = get(f"{RUN}/calls", update=1)
    timed = [r for r in pq.read_table(recorded / "rollouts").to_pylist() if r["group_id"] == "g000001"]
    found = {(calls["attempts"][a], step, 800 + began, waited, seconds)
             for a, step, began, waited, seconds in calls["calls"]}  # fmt: skip
    assert found == {(r["trajectory_id"], r["step"], r["started"], r["waited"], r["seconds"]) for r in timed}
    assert calls["unknown"] == len(shard_rows(recorded, "g000000.0")) + 4 and calls["problems"] == []


def test_calls_are_counted_over_time(copy: Path) -> None:
    get = asking(copy)
    assert not get("runs/copy/activity", span=["5000,5060,3"])["is_recorded"]  # its calls are of another time
    RunDirectory(copy).log_interval({"update": 1, "phase": "update", "started": 899.0, "seconds": 4.0})
    found = get("runs/copy/activity", span=["900,901,10", "901,902,1"])
    assert found["is_recorded"] and found["most"] == 2 and found["problems"] == []
    sampling, waiting, outside = (found[name][0] for name in ("sampling", "waiting", "outside"))
    calls = [r for r in pq.read_table(copy / "rollouts").to_pylist() if r["started"] and 900 <= r["started"] < 901]
    assert sum(sampling) / 10 == pytest.approx(sum(r["seconds"] - r["waited"] for r in calls), abs=1e-6)
    assert sum(waiting) / 10 == pytest.approx(sum(r["waited"] for r in calls), abs=1e-6)
    assert sampling[3] == pytest.approx(0.5) and sampling[4] == pytest.approx(1.5)  # a second call from 0.45 on
    assert outside[2:4] == pytest.approx([1.0, 0.0], abs=1e-6) and found["sampling"][1] == pytest.approx([0.15])
    assert found["busy"] == pytest.approx((0.15 + 0.15 + 0.1 + 0.15) / 2, abs=0.06)
    get("runs/copy/activity", 422, span=["1,0,5"])


def test_every_reason_has_words_and_settings_that_exist(get: Get) -> None:
    known = {setting["path"] for setting in get(RUN)["settings"]}
    assert REASONS.keys() == set(DropReason)
    assert {setting for reason in REASONS.values() for setting in reason.settings} <= known


def test_a_failure_names_the_settings_of_its_cause(get: Get) -> None:
    known = {setting["path"] for setting in get(RUN)["settings"]}
    assert {path for cause in Cause for path in failure_settings(cause, "")} <= known
    found = failure_settings("timeout", "the attempt took longer than 5 s (rollout.trajectory_timeout)")
    assert found == ("rollout.trajectory_timeout", "failures.causes")
    assert failure_settings("of another version", "") == ()


def test_breaks_are_those_of_show(get: Get) -> None:
    relations = [step["relation"] for step in get(f"{RUN}/trajectories/g000000.0")["steps"]]
    assert [r["kind"] for r in relations] == ["opens", "extends", "break", "fork", "extends", "break", "opens"]
    assert relations[2]["cause"] == "tokenization" and relations[2]["extra_tokens"] > 0
    counted = get(f"{RUN}/breaks")
    assert {row["cause"] for row in counted["relations"]["breaks"]} == {"tokenization", "truncated", "changed"}
    [update] = counted["updates"]  # the one whose groups were trained
    shown = [step for name in ("g000000", "g000001") for step in get(f"{RUN}/groups/{name}")["steps"]]
    prices = [step["relation"]["extra_tokens"] for step in shown]
    assert (update["update"], update["extra_tokens"]) == (1, sum(prices)) and sum(prices) > 0
    assert update["group_tree"] <= update["tree"] <= update["chain"] <= update["step"] <= counted["packing"]["step"]


def test_siblings_part_where_their_tokens_do(get: Get, recorded: Path) -> None:
    group = get(f"{RUN}/groups/g000001")
    first, second = (shard_rows(recorded, name)[-1] for name in ("g000001.0", "g000001.1"))
    assert group["apart"]["g000001.1"] == len(first["prompt_ids"] + first["completion_ids"])
    assert second["prompt_ids"] == first["prompt_ids"]
    assert {s["trajectory_id"] for s in group["steps"]} == {"g000001.0", "g000001.1"}
    assert group["cost"]["tree"] < group["cost"]["step"]


@pytest.mark.parametrize(
    ("query", "groups"),
    [
        ({"preset": "failed"}, {"g000000"}),
        ({"preset": "dropped"}, {"g000000", "g000001", "g000002"}),
        ({"preset": "stale"}, {"g000001"}),
        ({"reason": "filtered"}, {"g000002"}),
        ({"cause": "environment", "update": 1}, {"g000000"}),
        ({"status": "failed"}, {"g000000"}),
        ({"preset": "zero_advantage"}, {"g000002"}),
        ({"preset": "mixed"}, {"g000000", "g000001", "g000003"}),
        ({"search": "raised"}, {"g000000"}),
        ({"search": "g000003"}, {"g000003"}),
        ({"split": "held_out", "update": 1}, {"e000001-0000", "e000001-0001", "e000001-0002"}),
        ({"split": "train", "update": 1}, {"g000000", "g000001"}),
        ({"split": "train", "search": "nowhere"}, set()),
        ({"search": "task_id"}, set()),  # a key, and so are the next two; `user` is a role
        ({"search": "prompt"}, set()),
        ({"search": "user"}, set()),
        ({"search": "WHAT is", "update": 1}, {"e000001-0000", "e000001-0001", "e000001-0002"}),
    ],
)
def test_the_table_is_filtered(get: Get, query: dict[str, Any], groups: set[str]) -> None:
    found = get(f"{RUN}/groups", **query)
    assert {row["group_id"] for row in found["rows"]} == groups and found["total"] == len(groups)


@pytest.mark.parametrize(
    ("around", "descending", "neighbors"),
    [
        ("g000001", True, ("g000003", "g000000")),
        ("g000001", False, ("g000000", "g000003")),
        ("g000002", True, (None, None)),  # not in the table
    ],
)
def test_the_neighbors_in_the_table_are_named(get: Get, around: str, descending: bool, neighbors: Any) -> None:
    page = get(f"{RUN}/groups", preset="mixed", around=around, descending=descending, limit=1)
    assert (page["previous"], page["next"]) == neighbors


@pytest.mark.parametrize(
    "sort", ["group", "update", "task", "reward", "spread", "steps", "tokens", "failed", "seconds", "component"]
)
def test_the_table_is_sorted_and_cut_into_pages(get: Get, sort: str) -> None:
    how = {"sort": sort, "component": "format" if sort == "component" else ""}
    whole = get(f"{RUN}/groups", **how, limit=200)
    pages = [get(f"{RUN}/groups", **how, limit=3, offset=offset) for offset in range(0, whole["total"], 3)]
    assert [row["group_id"] for page in pages for row in page["rows"]] == [row["group_id"] for row in whole["rows"]]
    figures = {"steps": lambda row: sum(a["steps"] for a in row["attempts"]) / len(row["attempts"]),
               "tokens": lambda row: sum(a["completion_tokens"] for a in row["attempts"]),
               "component": lambda row: mean(a["components"].get("format", 0.0) for a in row["attempts"]
                                             if a["reward"] is not None)}  # fmt: skip
    if sort in figures:
        values = [figures[sort](row) for row in whole["rows"]]
        assert values == sorted(values, reverse=True)


def test_groups_are_in_order_whichever_ended_first(recorded: Path, tmp_path: Path) -> None:
    """Also those that a sort does not tell apart, and the neighbors of a group or a trajectory."""
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    made = [make_group(n, *(attempt(n, k, [make_step()]) for k in (1, 0))) for n in (479, 477, 478)]
    late = [replace(group, group_id=f"e000002-{n:04d}") for group, n in zip(evaluated(2), (0, 1, 2), strict=True)]
    with closing(Ledger(run / "ledger.sqlite")) as ledger:
        for group in (made[0], late[2], made[1], late[0], made[2], late[1]):
            split = "train" if group in made else "held_out"
            ledger.record([group], split, 2, write_shard(run / "rollouts", f"of-{group.group_id}", [group]))
    get = asking(run)

    def listed(**query: Any) -> list[str]:
        return [row["group_id"] for row in get("runs/run/groups", limit=200, **query)["rows"]]

    everything = listed(descending=False)
    trained = ["g000477", "g000478", "g000479"]
    assert everything[-6:] == [*trained, "e000002-0000", "e000002-0001", "e000002-0002"]
    assert listed() == everything[::-1]
    for sort in ("update", "reward", "seconds"):
        assert listed(sort=sort, search="g00047", descending=False) == trained
    group = get("runs/run/groups/g000478")
    assert (group["previous"], group["next"]) == ("g000477", "g000479")
    trajectory = get("runs/run/trajectories/g000478.1")
    assert (trajectory["previous"], trajectory["next"]) == ("g000478.0", "g000479.0")
    assert get("runs/run/trajectories/g000478.0")["previous"] == "g000477.1"
    first, last = (f"runs/run/groups/{name}" for name in (everything[0], everything[-1]))
    assert get(first)["previous"] is get(last)["next"] is None


def test_text_is_found_and_a_task_followed(get: Get, recorded: Path) -> None:
    found = get(f"{RUN}/search", update=1, text="rome")
    assert {place["trajectory_id"] for place in found["found"]} >= {"g000000.0", "e000001-0000.0"}
    assert all(place["match"].lower() == "rome" for place in found["found"])
    followed = get(f"{RUN}/task", task_id="h1")
    assert [(g["update"], g["attempts"][0]["reward"]) for g in followed["groups"]] == [(0, 0.0), (1, 0.0)]
    assert list(followed["apart"]) == ["e000000-0001.0", "e000001-0001.0"] and followed["problems"] == []
    for step in followed["steps"]:
        row = shard_rows(recorded, step["trajectory_id"])[step["step"]]
        assert sequence(followed, step) == row["prompt_ids"] + row["completion_ids"]


def test_of_many_attempts_the_first_and_newest_are_drawn(
    get: Get, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "_MAX_DRAWN", 1)
    followed = get(f"{RUN}/task", task_id="h1")
    assert {step["trajectory_id"] for step in followed["steps"]} == {"e000001-0001.0"}
    assert followed["problems"] == ["1 of 2 attempts are side by side: first ones, newest first"]


def test_evaluations_are_compared_task_by_task(get: Get, recorded: Path, tmp_path: Path) -> None:
    found = get("tasks", before="recorded", after="recorded")
    assert (found["first"], found["second"]) == ("e000000", "e000001")
    changes = {row["after"]["task_id"]: (row["change"], row["solved"]) for row in found["rows"]}
    assert changes == {"h0": ("gained", [0, 1]), "h1": ("unchanged", [0, 0]), "h2": ("unchanged", [0, 0])}
    assert found["rows"][0]["before"]["attempts"][0]["trajectory_id"] == "e000000-0000.0"
    back = get("tasks", before="recorded", after="recorded", first="e000001", second="e000000")
    assert [row["change"] for row in back["rows"]] == ["lost", "unchanged", "unchanged"]
    twin = record_run(tmp_path / "twin", "seed=9")
    across = asking(recorded, twin)("tasks", before="recorded", after="twin", second="e000000")
    assert [row["change"] for row in across["rows"]] == ["unchanged"] * 3
    get("tasks", 404, before="recorded", after="recorded", second="e000007")


def test_failed_attempts_are_no_losses(tmp_path: Path) -> None:
    """Neither one that was retried nor the only one at a task."""
    path = record_run(tmp_path / "recorded")
    names = [name for _, name, *_ in ledger(path, "PRAGMA table_info(trajectories)")]
    put = {"trajectory_id": "'e000001-0000.1'", "attempt": "1", "reward": "NULL", "status": "'failed'"}
    change_ledger(
        path,
        f"INSERT INTO trajectories SELECT {', '.join(put.get(name, name) for name in names)} FROM trajectories "
        "WHERE trajectory_id = 'e000001-0000.0'",
        "UPDATE trajectories SET reward = NULL, status = 'failed' WHERE trajectory_id = 'e000001-0001.0'",
    )
    found = asking(path)("tasks", before="recorded", after="recorded")
    changes = {row["after"]["task_id"]: (row["change"], row["solved"]) for row in found["rows"]}
    assert changes == {"h0": ("gained", [0, 1]), "h1": ("ungraded", [0, None]), "h2": ("unchanged", [0, 0])}


def test_the_list_warns_of_what_a_runs_own_page_warns(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run")
    row = {"kind": "update", "version": 0, "reward_mean": 0.0, "reward_positive": 0.0, "trajectories": 4, "failed": 0}
    for number in range(UPDATES + 1, UPDATES + 9):
        RunDirectory(run).log({**row, "update": number, "wall_seconds": 6.0 * number})
    (run / "summary.json").write_text("{")
    get = asking(run)
    [listed] = get("runs")["runs"]
    assert len(listed["problems"]) == 3 and listed["problems"] == get("runs/run")["problems"]
    assert "summary.json cannot be read" in listed["problems"][0] and "held-out" in listed["problems"][1]


def test_runs_are_compared(recorded: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "other", "training.optimizer.learning_rate=0.5", updates=3)
    twin = record_run(tmp_path / "twin", "seed=9")
    found = asking(recorded, other, twin)("compare", run=["recorded", "other", "twin"])
    assert sorted(map(len, (group["runs"] for group in found["groups"]))) == [1, 2]
    rows = {row["path"]: row["values"] for row in found["differences"]}
    assert rows["training.optimizer.learning_rate"][1] == "0.5" and rows["seed"][2] == "9"
    [settings] = [group["settings"] for group in found["groups"] if group["runs"] == ["other"]]
    assert "training.optimizer.learning_rate=0.5" in settings and found["hidden"] == 0


def test_of_a_mapping_only_the_entries_that_differ_are_named(recorded: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "other", "model.build.hidden_size=64", "model.build.rms_norm_eps=0.01", updates=3)
    found = asking(recorded, other)("compare", run=["recorded", "other"])
    rows = {row["path"]: row["values"] for row in found["differences"]}
    rows.pop("orchestration.updates")
    assert rows == {"model.build.hidden_size": ["32", "64"], "model.build.rms_norm_eps": ["", "0.01"]}


# Files: what is damaged, missing, growing or read only


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def test_nothing_is_written_and_a_read_only_run_is_shown(copy: Path) -> None:
    before = {path: (s.st_size, s.st_mtime_ns) for path in sorted(copy.rglob("*")) for s in (path.stat(),)}
    for path in (*copy.rglob("*"), copy):
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if path.is_dir() else 0))
    get = asking(copy)
    pages = (
        "",
        "/counts",
        "/groups",
        "/groups/g000000",
        "/trajectories/g000000.0",
        "/breaks",
        "/metrics",
        "/intervals",
    )
    for what in pages:
        get(f"runs/copy{what}")
    for path in (copy, *copy.rglob("*")):
        path.chmod(stat.S_IRWXU)
    assert {path: (s.st_size, s.st_mtime_ns) for path in sorted(copy.rglob("*")) for s in (path.stat(),)} == before


def test_a_run_that_writes_is_followed_and_never_waits(copy: Path) -> None:
    get = asking(copy)
    with closing(Ledger(copy / "ledger.sqlite")) as writer:
        writer.note_trained(1, [], {"g000003.0": 0.25})
        before = get("changes")
        assert get("runs/copy/trajectories/g000003.0")["attempt"]["advantage"] == 0.25
        names = files(copy)
        writer.note_trained(1, [], {"g000003.0": -0.25})
        assert get("runs/copy/trajectories/g000003.0")["attempt"]["advantage"] == -0.25
        assert get("changes") != before
        with writer.transaction() as db:  # in the middle of a transaction the last commit is seen, at once
            db.execute("UPDATE trajectories SET advantage = 9.0 WHERE trajectory_id = 'g000003.0'")
            assert get("runs/copy/trajectories/g000003.0")["attempt"]["advantage"] == -0.25
    assert files(copy).keys() == names.keys()
    assert get("runs/copy/trajectories/g000003.0")["attempt"]["advantage"] == 9


def test_a_trained_batch_is_in_its_update_before_any_checkpoint(copy: Path) -> None:
    get = asking(copy)
    with closing(Ledger(copy / "ledger.sqlite")) as writer:
        writer.note_trained(1, ["g000003"], {"g000003.0": 0.25})
    assert [row["group_id"] for row in get("runs/copy/groups", update=2, split="train")["rows"]] == ["g000003"]
    view = get("runs/copy/trajectories/g000003.0")
    assert view["group"]["when"] == "update 2"
    assert view["steps"][0]["fate"]["text"].startswith("In the batch of update 2, not in a checkpoint yet")


def test_a_group_of_no_update_says_why(copy: Path) -> None:
    get = asking(copy)
    assert get("runs/copy/groups/g000002")["group"]["when"] == "no update: filtered"
    assert get("runs/copy/groups/g000003")["group"]["when"] == "no update: the run stopped before it"
    with closing(Ledger(copy / "ledger.sqlite")) as writer:
        writer.commit_checkpoint("step-000001", LoopState(update=1, version=1, cursor=3), finished=True)
    assert get("runs/copy/groups/g000003")["group"]["when"] == "no update: unused"
    assert get("runs/copy/groups/e000001-0000")["group"]["when"] == "update 1"


def test_metrics_are_read_as_they_come(copy: Path) -> None:
    get, run = asking(copy), RunDirectory(copy)
    first = get("runs/copy/metrics")
    log_update(run, UPDATES + 1)
    with run.metrics_file.open("ab") as file:
        file.write(b'{"kind": "update", "upd')  # the run is writing, or was killed
    more = get("runs/copy/metrics", generation=first["generation"], after=len(first["rows"]))
    assert [row["update"] for row in more["rows"]] == [UPDATES + 1]
    run.roll_back_metrics(2, [])
    back = get("runs/copy/metrics", generation=first["generation"], after=len(first["rows"]))
    assert (back["start"], [row["update"] for row in back["rows"]]) == (0, [1, 2])


def test_a_run_that_learns_nothing_says_so(copy: Path) -> None:
    get, run = asking(copy), RunDirectory(copy)
    assert get("runs/copy")["problems"] == []
    last = [row for row in run.metrics() if row["kind"] == "update"][-1]
    for number in range(10):
        run.log({**last, "update": UPDATES + 1 + number, "reward_mean": 0.0, "reward_positive": 0.0})
    assert "of the last 8 updates are 0" in get("runs/copy")["problems"][0]


def test_what_is_damaged_is_said_and_the_rest_is_shown(copy: Path) -> None:
    shard = copy / "rollouts" / "train-g000000.parquet"
    shard.write_bytes(shard.read_bytes()[:-7])
    (copy / "rollouts" / "train-g000001.parquet").unlink()
    lines = (copy / "metrics.jsonl").read_bytes().split(b"\n")
    (copy / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff{rubbish", *lines[1:]]))
    get = asking(copy)
    view = get("runs/copy/trajectories/g000000.0")
    assert "is damaged" in view["problem"] and view["attempt"]["reward"] == 1.0 and view["steps"] == []
    assert "is gone" in get("runs/copy/groups/g000001")["problems"][0]
    assert "line 2" in get("runs/copy")["problems"][0]
    assert get("runs/copy/trajectories/g000003.0")["problem"] is None
    breaks = get("runs/copy/breaks")
    assert breaks["damaged_shards"] == ["train-g000000.parquet"]
    assert breaks["missing_shards"] == ["train-g000001.parquet"]


@pytest.mark.parametrize("damage", ["rubbish", "gone", "version", "config"])
def test_a_run_that_cannot_be_read_is_still_listed(copy: Path, damage: str) -> None:
    path = copy / "ledger.sqlite"
    if damage == "rubbish":
        path.write_bytes(b"no database" * 500)
    elif damage == "gone":
        path.unlink()
    elif damage == "version":
        change_ledger(copy, "PRAGMA user_version = 1")
    else:
        (copy / "config.yaml").write_text("schema_version: 99\n")
    get = asking(copy.parent)
    [run] = get("runs")["runs"]
    assert run["update"] == UPDATES
    problems = get("runs/copy")["problems"]
    assert problems
    status = 409 if damage == "rubbish" else 404
    if damage in ("rubbish", "version"):
        assert "ledger" in get("runs/copy/counts", status)["detail"]
    assert get("runs/copy/metrics")["rows"]
    if damage != "config":
        assert "ledger" in get("runs/copy/groups", status)["detail"]


def embedded(page: str) -> dict[str, Any]:
    """What an exported file carries, by the path that a page asks for."""
    held: dict[str, Any] = json.loads(page.split('id="embedded">')[1].split("</script>")[0])["answers"]
    return held


def test_one_file_holds_a_trajectory(recorded: Path) -> None:
    client = TestClient(make_app([recorded]))
    answer = client.get("/export/recorded/trajectory/g000000.2")
    assert answer.headers["content-disposition"] == 'attachment; filename="recorded-g000000.2.html"'
    text = answer.text
    held = embedded(text)["runs/recorded/trajectories/g000000.2"]
    assert held["attempt"]["failure_message"].startswith("step raised <script>")
    assert text.count("<script") == 3 and "src=" not in text.split("<body>")[0] and ESCAPES not in text
    assert len(embedded(client.get("/export/recorded/group/g000000").text)) == 4
