"""`treadle sft --from`: supervised learning of recorded steps."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Trained
from tests.cli.worlds import treadle
from tests.runs import MODEL, SETTINGS
from tests.worlds import make_step, plain_renderer
from treadle import train as from_python
from treadle.core.errors import Cause, ConfigError, DataError
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Failure, Status, Step, Task, Trajectory
from treadle.record.image_files import name_of
from treadle.record.record import Record
from treadle.record.recorded import LoggedConversation, RecordedTrajectory
from treadle.record.rollout_store import step_row
from treadle.record.selection import Selection
from treadle.record.trajectory_files import read_files


def attempt(
    task: str, number: int, reward: float | None = 0.0, *steps: Step, status: Status = Status.DONE
) -> RecordedTrajectory:
    failure = Failure(Cause.AGENT, "x") if reward is None else None
    status = Status.FAILED if failure else status
    steps = steps or (make_step([1], [2]),)
    made = Trajectory(f"{task}.{number}", task, number, steps, reward, status, failure)
    return RecordedTrajectory("run", "train", task, Task(task), made, "")


def chosen(text: str, *trajectories: RecordedTrajectory) -> list[str]:
    return [t.trajectory.trajectory_id for t in Selection.parse(text).choose(trajectories)]


def test_comparisons_all_hold() -> None:
    page = replace(make_step([1], [2]), given=Reward({"page": 0.5}))
    long, graded = attempt("a", 0, 1.0, *[make_step([1], [2])] * 3), attempt("a", 1, 0.5, page)
    cut = attempt("b", 0, 1.0, page, status=Status.MAX_STEPS)
    thrown = replace(make_step([1], [3]), dropped=DropReason.REJECTED)
    rows = (long, graded, cut, attempt("b", 1, 0.0, make_step([1], [2]), thrown))
    assert chosen("", *rows) == ["a.0", "a.1", "b.0", "b.1"]
    assert chosen("reward >= 1", *rows) == ["a.0", "b.0"]
    assert chosen("reward>0,steps < 3", *rows) == ["a.1", "b.0"]
    assert chosen("steps == 1", *rows) == ["a.1", "b.0", "b.1"]  # without an answer that was thrown away
    assert chosen("page > 0.4, status = done", *rows) == ["a.1"]
    assert chosen("status != done", *rows) == ["b.0"]


def test_the_best_of_each_task_and_of_equals_the_smaller_attempts() -> None:
    rows = [attempt("a", 2, 1.0), attempt("a", 0, 0.5), attempt("b", 0, 0.0), attempt("a", 1, 1.0)]
    assert chosen("best_of=2", *rows) == ["a.2", "b.0", "a.1"]
    assert chosen("best_of=1", *rows) == ["b.0", "a.1"]
    assert chosen("reward >= 1, best_of=1", *rows) == ["a.1"]


def test_what_failed_is_selected_by_its_status_alone() -> None:
    failed = attempt("a", 1, None)
    assert chosen("", failed) == chosen("reward < 1", failed) == chosen("best_of=1", failed) == []
    assert chosen("status == failed", failed) == ["a.1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward", "cannot read 'reward'; write comparisons"),
        ("reward >= 1 steps < 3", "cannot read 'reward >= 1 steps < 3'"),
        ("reward >= 1,", "cannot read ''"),
        ("__import__('os')", "cannot read"),
        ("reward >= high", "'reward >= high': 'high' is not a number; write comparisons"),
        ("reward >= nan", "'nan' is not a number"),
        ("status == good", "'status == good': a status is == or != one of done, max_steps"),
        ("status > done", "a status is == or != one of"),
        ("best_of=0", "'best_of=0': best_of needs one whole number"),
        ("best_of=1, best_of=2", "'best_of=2': best_of is given twice"),
        ("pages > 1", "no recorded reward has a component 'pages'; there are reward, steps, status; write comparisons"),
    ],
)
def test_a_wrong_selection_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="best_of=2") as caught:
        Selection.parse(text).choose([attempt("a", 0, 1.0)])
    assert message in str(caught.value)


def test_targets_are_the_trainable_tokens_of_steps_that_were_not_dropped() -> None:
    whole, masked = (
        make_step([1, 2], [3, 4]),
        replace(make_step([5], [6, 7, 8, 9]), mask=np.array([True, False, True, True])),
    )
    greedy = replace(make_step([1], [2]), mask=np.array([False]))
    calls = attempt("a", 0, 1.0, whole, replace(whole, dropped=DropReason.REJECTED), masked, greedy).calls(
        plain_renderer()
    )
    assert [(prompt.tolist(), target.tolist()) for prompt, target, *_ in calls] == [
        ([1, 2], [3, 4]),
        ([5], [6]),
        ([5, 6, 7], [8, 9]),
    ]


def learned(finished: Trained, out: Path, *words: object) -> dict[str, object]:
    done = treadle("sft", *words, "--out", out, "warm_start.learning_rate=1e-3")
    assert done.status == 0, done.err
    assert f"model directory: {out}" in done.out
    record: dict[str, object] = json.loads((out / "sft.json").read_text())
    return record


def test_a_runs_best_attempts_are_learned(finished: Trained, tmp_path: Path) -> None:
    """By its latest checkpoint, or by another model; their steps, and nothing of held-out tasks."""
    run, select = finished.path, "reward >= 1, best_of=1"
    training = [t for t in Record.open(run).trajectories() if t.split == "train"]
    best = Selection.parse(select).choose(training)
    assert 0 < len(best) < len(training) < len(list(Record.open(run).trajectories()))
    record = learned(finished, tmp_path / "a", "--from", run, "--select", select)
    assert record["trajectories"] == len(best)
    assert record["tokens"] == sum(len(step.completion_ids) for t in best for step in t.trajectory.steps)
    assert (record["sources"], record["select"]) == ([str(run)], select)
    weights = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert weights != (run / "checkpoints" / "step-000004" / "model.safetensors").read_bytes()
    learned(finished, tmp_path / "b", f"{run}@latest", "--from", run, "--select", select)
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == weights
    twice = learned(finished, tmp_path / "c", finished.place.recipe, "--from", run, run, "warm_start.steps=1")
    assert (twice["trajectories"], twice["steps"]) == (2 * len(training), 1)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() != weights


def test_exported_files_give_the_same_weights(finished: Trained, tmp_path: Path) -> None:
    """Bit for bit: ids, masks and order are those of the run."""
    weights, steps = [], "warm_start.steps=3"
    for number, form in enumerate(("", "jsonl", "parquet")):
        source = tmp_path / f"traces.{form}" if form else finished.path
        if form:
            done = treadle("export-traces", finished.path, source, "--format", form)
            assert done.status == 0, done.err
        record = learned(finished, tmp_path / str(number), f"{finished.path}@2", "--from", source, steps)
        assert record["inexact"] == 0
        weights.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]
    [line, *_] = (tmp_path / "traces.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["messages"][0] == row["task"]["prompt"][0] or row["messages"][0]["role"] == "user"
    assert row["messages"][-1]["role"] == "assistant"
    assert {"reward", "components", "status", "tools"} < row.keys()
    assert {"prompt_ids", "completion_ids", "logprobs", "mask", "policy_versions"} < row["steps"][0].keys()


def test_a_file_gives_the_trajectories_of_its_run(tmp_path: Path, broken: Path) -> None:
    """Whatever their steps are: `broken` has breaks of every cause."""
    for form in ("jsonl", "parquet"):
        done = treadle("export-traces", broken, tmp_path / f"a.{form}", "--format", form)
        assert done.status == 0, done.err
        both = zip(Record.open(broken).trajectories(), read_files(tmp_path / f"a.{form}"), strict=True)
        for one, other in both:
            assert isinstance(other, RecordedTrajectory)
            assert (other.task, other.group_id, other.split) == (one.task, one.group_id, one.split)
            assert other.vocabulary == one.vocabulary and other.reward == one.reward
            for a, b in zip(one.trajectory.steps, other.trajectory.steps, strict=True):
                assert str(step_row(a, name_of)) == str(step_row(b, name_of))


SAID = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


def test_chat_logs_are_text_and_said_to_be(finished: Trained, tmp_path: Path) -> None:
    """Only the assistant's messages are targets, and none of weight 0."""
    log, more = tmp_path / "chat.jsonl", [*SAID, {"role": "user", "content": "2 + 2"}]
    rows = [{"messages": SAID}, {"messages": [*more, {"role": "assistant", "content": "5", "weight": 0}]}]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = treadle("sft", f"{finished.path}@2", "--from", log, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert "not exact: 2 trajectories are text that was tokenized now" in done.out
    record = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert (record["trajectories"], record["calls"], record["inexact"]) == (2, 2, 2)
    assert 0 < record["tokens"] <= 6


def test_commands_that_cannot_work_for_a_run_begun_in_python_are_left_out(tmp_path: Path) -> None:
    run, tasks = tmp_path / "run", [{"prompt": "?"}] * 2
    from_python(lambda task, text: 0.5, tasks, model=MODEL, run=run, held_out=[{"prompt": "!"}], settings=SETTINGS)
    done = treadle("sft", "--from", run, "--out", tmp_path / "out", "warm_start.steps=1")
    assert done.status == 0, done.err
    assert done.out.splitlines()[-2:] == [
        f"model directory: {tmp_path / 'out'}",
        f"train from it: treadle.train(..., model='{tmp_path / 'out'}') in Python",
    ]


def test_atif_is_written_and_read(broken: Path, tmp_path: Path) -> None:
    """Its agent steps have the ids; read again, they are text. Harbor's own has the reward in the trial's result."""
    done = treadle("export-traces", broken, tmp_path / "traces", "--format", "atif")
    assert done.status == 0, done.err
    [first, *_] = Record.open(broken).trajectories()
    document = json.loads((tmp_path / "traces" / f"{first.trajectory.trajectory_id}.json").read_text())
    agents = [step for step in document["steps"] if step.get("metrics")]
    for step, recorded in zip(agents, first.trajectory.steps, strict=True):
        assert step["metrics"]["completion_token_ids"] == recorded.completion_ids.tolist()
    read = list(read_files(tmp_path / "traces"))
    assert all(isinstance(t, LoggedConversation) and t.reward == 1.0 and t.task_id == "t0" for t in read)
    trial = tmp_path / "trial"
    (trial / "agent").mkdir(parents=True)
    (trial / "result.json").write_text('{"task_name": "sum", "verifier_result": {"rewards": {"reward": 0.5}}}')
    call = {"tool_call_id": "c", "function_name": "add", "arguments": {"a": 1}}
    results = [{"source_call_id": "c", "content": [{"type": "text", "text": "2"}]}]
    steps = [
        {"step_id": 1, "source": "user", "message": "add"},
        {"step_id": 2, "source": "agent", "message": "", "tool_calls": [call], "observation": {"results": results}},
        {"step_id": 3, "source": "agent", "message": "2", "reasoning_content": "so"},
    ]
    path = trial / "agent" / "trajectory.json"
    path.write_text(json.dumps({"schema_version": "ATIF-v1.6", "agent": {"name": "x"}, "steps": steps}))
    [logged] = read_files(path)
    assert isinstance(logged, LoggedConversation)
    assert (logged.task_id, logged.reward, logged.played_steps) == ("sum", 0.5, 2)
    assert [m["role"] for m in logged.messages] == ["user", "assistant", "tool", "assistant"]
    assert logged.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (logged.messages[2]["content"], logged.messages[3]["reasoning_content"]) == ("2", "so")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[]", r"a\.jsonl:2: must be a JSON object"),
        ('{"text": "a"}', r"a\.jsonl:2: no trajectory: it has neither 'steps' nor 'messages', but text"),
        ('{"messages": [{"role": "user", "content": "q"}]}', r"a\.jsonl:2: there is no assistant turn"),
        ('{"messages": ["hello"]}', r"a\.jsonl:2: 'messages' must be a list of objects"),
        ('{"steps": [{"prompt_ids": []}]}', r"a\.jsonl:2: not a trajectory that can be read: no 'task'"),
        ('{"part": 0, "trajectory_id": "x"}', r"a\.jsonl:2: was written by an earlier treadle serve --record; export"),
        ('{"schema_version": "ATIF-v1.6", "steps": 3}', r"a\.jsonl:2: 'steps' must be a list of objects"),
    ],
)
def test_a_malformed_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": SAID}) + f"\n{line}\n")
    with pytest.raises(DataError, match=message):
        list(read_files(tmp_path / "a.jsonl"))


def test_ids_of_another_vocabulary_are_refused(finished: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = treadle("sft", finished.place.recipe, "--from", finished.path, "--out", out, "model.tokenizer=sql-small")
    assert done.status == 2 and "was recorded with another vocabulary than that of" in done.error
    assert not out.exists()
