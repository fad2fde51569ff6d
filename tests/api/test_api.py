"""`treadle.train`: from Python, on one's own environment and tasks."""

import asyncio
import json
import os
import traceback
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from openai import AsyncOpenAI

import treadle
from tests.runs import MODEL, SETTINGS, Interrupting, check_finished, query
from tests.worlds import Quiet, user
from treadle import ConfigError, Environment, EnvStep, Message, Reward, Task, TreadleError
from treadle.cli.main import main
from treadle.core.config import Config
from treadle.core.errors import DataError, RunError, TrainingStopped
from treadle.data.table import rows_of
from treadle.plan.config import config_of
from treadle.record.recorded import RecordedTrajectory
from treadle.record.run_directory import RunDirectory
from treadle.report.progress import NotebookProgress
from treadle.rollout.drivers.driver import AttemptDriver, DriverSetup
from treadle.rollout.drivers.outcome import Outcome, outcome_of
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Session


class Short(Environment):
    """One's own single-turn environment: the shorter the reply, the better."""

    async def step(self, text: str) -> EnvStep:
        return EnvStep(reward=1 / (1 + len(text)), done=True)


def train(run: Path, environment: Any = Short, tasks: Any = None, **options: Any) -> dict[str, Any]:
    tasks = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(3)] if tasks is None else tasks
    settings = {**SETTINGS, **options.pop("settings", {})}
    return treadle.train(
        environment, tasks, **{"model": MODEL, "run": run, "settings": settings, "progress": Quiet(), **options}
    )


def test_training_on_an_environment_of_ones_own(tmp_path: Path) -> None:
    held_out = [Task("h", (user("be brief"),))]
    summary = train(tmp_path / "run", held_out=held_out)
    check_finished(tmp_path / "run")
    assert (summary["updates"], summary["recipe"], summary["held_out_tasks"]) == (2, "run", 1)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {row["status"] for row in query(tmp_path / "run", "SELECT status FROM trajectories")} == {"done"}
    again = train(tmp_path / "again", environment=lambda: Short(), held_out=held_out)
    assert again["weights_sha256"] == summary["weights_sha256"]
    other = train(tmp_path / "other", settings={"seed": 5})
    assert other["weights_sha256"] != summary["weights_sha256"]


class Shop(treadle.ToolEnvironment):
    """Tools of one's own."""

    def price(self, item: str) -> int:
        """Look up what an item costs."""
        return int(self.task.extras[item])

    def answered(self, text: str) -> float:
        return float(text == self.task.ground_truth)

    tools = (price,)


def test_tools_of_ones_own_need_no_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped recipe, shortened: its model, its settings, and random calls to begin with."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    items = [
        {"prompt": f"What does {item} cost?", "extras": {item: i}, "ground_truth": str(i)}
        for i, item in enumerate(["tea", "milk", "soap", "bread", "coffee", "cheese"])
    ]
    small = {
        "warm_start.steps": 3,
        "warm_start.options.attempts": 80,
        "training.tasks_per_update": 2,
        "training.group_size": 2,
        "orchestration.updates": 2,
    }

    def run(name: str, world: type[Environment] = Shop) -> dict[str, Any]:
        options: dict[str, Any] = {"model": None, "recipe": "tools-small", "settings": small}
        return train(tmp_path / name, world, items[2:], held_out=items[:2], **options)

    first = run("first")
    check_finished(tmp_path / "first")
    config = config_of(RunDirectory.open(tmp_path / "first"))
    assert (config.recipe, config.environment, config.model.tokenizer) == ("first", "Shop", "tools-small")
    assert config.data.table_by is None  # it is of the recipe's own tasks
    second = run("second")
    assert (first["warm_start"]["cached"], second["warm_start"]["cached"]) == (False, True)
    assert second["weights_sha256"] == first["weights_sha256"]

    class Dearer(Shop):
        def price(self, item: str) -> int:
            """Look up what an item costs."""
            return 100 + int(self.task.extras[item])

    assert not run("third", world=Dearer)["warm_start"]["cached"]  # the demonstrations say otherwise
    with pytest.raises(ConfigError, match="'Short' has no tools to call"):
        train(tmp_path / "none", model=None, recipe="tools-small", settings=small)


def test_an_agents_model_begins_with_random_calls_of_tools_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def solve(task: Task, client: Any) -> float:
        tools = Shop().tool_schemas
        answer = await client.chat.completions.create(model="policy", messages=list(task.prompt), tools=tools)
        return float(answer.choices[0].message.content == task.ground_truth)

    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    tasks = [Task(f"t{i}", (user("What does tea cost?"),), ground_truth="7", extras={"tea": 7}) for i in range(3)]
    options: dict[str, Any] = {"recipe": "tools-small", "model": None, "settings": {"warm_start.steps": 3}}
    with pytest.raises(
        ConfigError, match=r"but no environment with tools plays; set warm_start.options.environment to one"
    ):
        train(tmp_path / "none", solve, tasks, **options)
    named = {"attempts": 80, "environment": "tests.api.test_api:Shop"}
    options["settings"]["warm_start.options"] = named
    assert train(tmp_path / "run", solve, tasks, **options)["warm_start"]["steps"] == 3
    given = {"model": MODEL, "recipe": "tools-small", "settings": {}}  # which the recipe's warm start is not for
    assert train(tmp_path / "other", tasks=[*tasks], **given)["warm_start"] is None


def test_a_run_in_which_all_held_out_attempts_fail_ends_with_the_reason_and_evaluates_anew(tmp_path: Path) -> None:
    class Broken(Short):
        mended = False

        async def step(self, text: str) -> EnvStep:
            if not Broken.mended:
                raise LookupError("no dictionary")
            return EnvStep(reward=1.0, done=True)

    held_out = [Task("h", (user("be brief"),))]
    reason = r"1 of 1 trajectories at held-out tasks failed .*LookupError: no dictionary.*test_api.py.*then --resume"
    with pytest.raises(TrainingStopped, match=reason):
        train(tmp_path / "run", Broken, held_out=held_out)
    Broken.mended = True
    summary = train(tmp_path / "run", Broken, held_out=held_out, resume=True)
    assert (summary["held_out_success_before"], summary["held_out_success_after"]) == (1.0, 1.0)


async def test_the_stop_button_of_a_notebook_where_an_event_loop_is_running_stops_like_ctrl_c(tmp_path: Path) -> None:
    reference, loop, task = train(tmp_path / "reference"), asyncio.get_running_loop(), asyncio.current_task()
    stopped = train(tmp_path / "run", progress=(progress := Interrupting()))
    assert (stopped["stopped_early"], stopped["updates"]) == (True, 1)
    assert progress.lines[-1] == "stopped after 1 updates, with a checkpoint; continue with resume=True"
    with pytest.raises(KeyboardInterrupt) as interrupted:
        train(tmp_path / "run", progress=(progress := Impatient()), resume=True)  # pressed twice
    assert interrupted.type is KeyboardInterrupt
    assert progress.lines[-1] == "interrupted; continue from the latest checkpoint with resume=True"
    assert asyncio.get_running_loop() is loop and asyncio.current_task() is task
    await asyncio.sleep(0)
    assert train(tmp_path / "run", resume=True)["weights_sha256"] == reference["weights_sha256"]


class Impatient(Interrupting):
    def began(self, name: str) -> None:
        super().began(name)
        if self.left == -1:
            os.kill(os.getpid(), self.number)


def test_a_notebook_has_a_line_that_is_written_over_and_one_for_every_tenth_update(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.report.progress._REFRESH", 0.0)
    names = ("reward_mean", "success", "steps_mean", "completion_tokens_mean", "entropy", "seconds_rollout")
    row = {**dict.fromkeys(names, 0.5), "seconds_update": 1.0, "trajectories": 4, "failed": 0}
    progress = NotebookProgress(40)
    for number in range(1, 21):
        progress.phase("rollout", 0, 4)
        progress.phase("rollout", 2, 4, "\x1b[2J")
        progress.update({**row, "update": number})
    progress.phase("publish", 0, 1)
    *lines, last = capsys.readouterr().out.split("\n")
    assert [line.rpartition("\r")[2][:12] for line in lines] == [f"update {n:>2}/40" for n in (1, 10, 20)]
    bars = "█" * 4 + "░" * 16, "█" * 10 + "░" * 10
    assert f"\rupdates 9/40 {bars[0]}  reward 0.500  success 0.500  rollout  2/4 {bars[1]}  \\x1b[2J" in lines[1]
    assert last.rstrip().endswith("success 0.500  publish")


def test_dataframes_are_rows_as_parquet_holds_them() -> None:
    frame = pd.DataFrame([{"prompt": "?", "n": 1, "extras": {"a": 1}}, {"prompt": "!", "n": 2, "extras": {"b": "c"}}])
    rows = [
        {"prompt": "?", "n": 1, "extras": {"a": 1, "b": None}},
        {"prompt": "!", "n": 2, "extras": {"a": None, "b": "c"}},
    ]
    assert rows_of(frame, "tasks") == rows_of(pa.table(frame), "tasks") == rows
    assert rows_of(frame.set_index("n")[::-1], "tasks") == [
        {k: row[k] for k in ("prompt", "extras")} for row in rows[::-1]
    ]
    with pytest.raises(DataError, match=r"held_out: .*; give each column values of one type"):
        rows_of(pd.DataFrame({"prompt": ["a", 3]}), "held_out")


ROWS: list[dict[str, Any]] = [{"prompt": [user(f"be brief {i}")], "task_id": f"t{i}"} for i in range(3)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shortness(task: Task, text: str) -> float:
    assert task.prompt
    return 1 / (1 + len(text))


async def shortness_later(task: Task, text: str) -> Reward:
    return Reward({"short": 1 / (1 + len(text))})


class Graded:
    """A reward function that is an object."""

    def __call__(self, task: Task, text: str) -> float:
        return shortness(task, text)


async def answer(task: Task, client: AsyncOpenAI) -> float:
    return 0.0


class Nobody(AttemptDriver[Session]):
    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        raise NotImplementedError


COUNTS = {split: {f"data.{split}.options.count": 4} for split in ("train", "held_out")}
WINS = "the tasks of data.train name what plays them, environment 'arithmetic', which wins; give tasks that"


def test_the_forms_in_which_tasks_and_rewards_may_be_given_train_the_same(tmp_path: Path) -> None:
    once = {"orchestration.updates": 1}
    reference = train(tmp_path / "reference", settings=once)["weights_sha256"]
    file = write_rows(tmp_path / "train.jsonl", ROWS)
    forms: list[tuple[Any, Any]] = [
        (Short, ROWS),
        (Short, (dict(row) for row in ROWS)),
        (Short, str(file)),
        (f"{__name__}:Short", file),
        (shortness, ROWS),
        (shortness_later, ROWS),
        (Graded(), ROWS),
        (Short, pd.DataFrame(ROWS, index=[7, 3, 9])),
    ]
    found = [train(tmp_path / str(n), *form, settings=once)["weights_sha256"] for n, form in enumerate(forms)]
    assert found == [reference] * len(forms)
    assert query(tmp_path / "5", "SELECT components FROM trajectories LIMIT 1")[0]["components"].startswith('{"short"')


def test_what_a_recipe_could_name_is_named_and_can_be_resumed_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "train.jsonl", ROWS)
    train(tmp_path / "run", f"{__name__}:Short", file)
    more = ["--resume", "--runs", str(tmp_path), "--name", "run", "orchestration.updates=3"]
    assert main(["train", "x", *more]) == 0, capsys.readouterr().err


def test_a_run_by_its_address(tmp_path: Path) -> None:
    """Gone on with by its own configuration, evaluated, exported, learned from and read."""
    run, rows = tmp_path / "run", write_rows(tmp_path / "train.jsonl", ROWS)
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": [user("be brief")], "task_id": "h"}])
    train(run, f"{__name__}:Short", rows, held_out=str(other), settings={"orchestration.checkpoint_every": 1})
    longer = treadle.resume(run, settings={"orchestration.updates": 3}, progress=Quiet())
    assert longer["updates"] == 3
    sampled = [row for row in longer["evaluations"] if row["temperature"] > 0]
    assert treadle.evaluate(f"{run}@latest", progress=Quiet()).result.reward_mean == sampled[-1]["reward_mean"]
    assert (treadle.export(f"{run}@2", tmp_path / "model") / "model.safetensors").is_file()
    report = treadle.sft(run, tmp_path / "best", select="best_of=1", settings={"warm_start.steps": 2}, progress=Quiet())
    assert (report.trajectories, report.steps) == (3, 2)
    recorded = treadle.load_run(run)
    first = recorded[0]
    assert isinstance(first, RecordedTrajectory) and len(first.trajectory.steps[0].completion_ids)
    table = recorded.table()
    assert table.num_rows == len(recorded) == query(run, "SELECT count(*) AS n FROM trajectories")[0]["n"]
    assert set(table["split"].to_pylist()) == {"train", "held_out"}
    assert repr(recorded) == f"<{len(recorded)} trajectories of {run}>"
    assert {(row["prompt"], row["version"]) for row in table.to_pylist()} >= {("be brief 0", 0)}
    assert recorded.dataframe()["reward"].mean() == pytest.approx(sum(t.reward or 0 for t in recorded) / len(recorded))


def test_tasks_made_in_python_are_evaluated_as_the_run_did(tmp_path: Path) -> None:
    run, held_out = tmp_path / "run", [Task("h", (user("be brief"),))]
    summary = train(run, held_out=held_out)
    sampled = [row for row in summary["evaluations"] if row["temperature"] > 0]
    assert treadle.evaluate(run, Short, held_out, progress=Quiet()).result.reward_mean == sampled[-1]["reward_mean"]
    graded = treadle.evaluate(f"{run}@latest", lambda task, text: 0.5, [{"prompt": "be brief"}] * 2, progress=Quiet())
    assert (graded.result.tasks, graded.result.reward_mean) == (2, 0.5)
    with pytest.raises(ConfigError, match=r"made in Python.*takes them"):
        treadle.evaluate(run, progress=Quiet())
    with pytest.raises(ConfigError, match="go together"):
        treadle.evaluate(run, tasks=held_out, progress=Quiet())
    with pytest.raises(ConfigError, match=r"environment 'Short' would play nothing: the tasks of data\.held_out"):
        treadle.evaluate(run, Short, "arithmetic", settings=COUNTS["held_out"], progress=Quiet())
    with pytest.raises(DataError, match="no tasks to evaluate"):
        treadle.evaluate(run, Short, [], progress=Quiet())


class Padded(Short):
    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    async def step(self, text: str) -> EnvStep:
        return EnvStep(reward=self.bonus, done=True)


class Bonus(Config):
    bonus: float = 0.0


class Paying(AttemptDriver[Session]):
    options_type = Bonus

    def __init__(self, setup: DriverSetup, options: Bonus) -> None:
        self.bonus = options.bonus

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        await session.chat(task.prompt)
        session.reward_last(Reward({"bonus": self.bonus}))
        return outcome_of(session.steps, None, user.cause)


async def halving(task: Task, client: AsyncOpenAI) -> float:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    return 0.5


@pytest.mark.parametrize(("player", "other"), [(Padded, Paying), (Paying, Padded)])
def test_options_of_a_class_made_in_python_are_its_own(player: Any, other: Any, tmp_path: Path) -> None:
    run, tasks = tmp_path / "run", [{"prompt": "be brief"}]
    key, others = (f"{'driver' if each is Paying else 'environment'}_options" for each in (player, other))
    with pytest.raises(ConfigError, match=f"{key}.*bonuss"):
        train(run, player, settings={key: {"bonuss": 3.0}})
    train(run, player, settings={key: {"bonus": 3.0}, "orchestration.updates": 1})
    assert {row["reward"] for row in query(run, "SELECT reward FROM trajectories")} == {3.0}
    assert treadle.evaluate(run, player, tasks, progress=Quiet()).result.reward_mean == 3.0
    for graded in (lambda task, text: 0.5, halving):
        assert treadle.evaluate(run, graded, tasks, progress=Quiet()).result.reward_mean == 0.5
    given = {f"{others}.bonus": 4.0}
    assert treadle.evaluate(run, other, tasks, settings=given, progress=Quiet()).result.reward_mean == 4.0
    with pytest.raises(ConfigError, match=rf"{key}.bonus is 4\.0, the run was started with 3\.0"):
        train(run, player, settings={key: {"bonus": 4.0}}, resume=True)


def test_an_evaluation_whose_dump_is_taken_is_refused_before_it_plays(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").touch()
    with pytest.raises(RunError, match="taken"):
        treadle.evaluate(tmp_path / "no such run", dump=tmp_path / "taken")


def test_a_checkpoint_of_a_run_is_a_model_to_train(tmp_path: Path) -> None:
    train(tmp_path / "run", settings={"rewards.weights": {"style": 1}})
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    for address in ("run", "run@2"):
        train(tmp_path / f"of-{address}", model=f"{tmp_path}/{address}", settings={"orchestration.updates": 1})
        assert config_of(RunDirectory.open(tmp_path / f"of-{address}")).model.path == str(checkpoint)
    with pytest.raises(RunError, match="step-000009"):
        train(tmp_path / "none", model=f"{tmp_path}/run@9")
    with pytest.raises(ConfigError, match=f"is a run; take one of its checkpoints, such as {checkpoint},"):
        other = {"models.first.path": str(tmp_path / "run"), "algorithm.kl": {"coef": 0.1, "model": "first"}}
        train(tmp_path / "none", settings=other)
    shown = Quiet()
    treadle.evaluate(tmp_path / "run", Short, [{"prompt": "?"}], progress=shown)
    assert any("rewards.weights: nothing in the evaluation was given as style" in line for line in shown.lines)


def test_the_command_evaluates_a_run_begun_in_python_with_what_its_overrides_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def half(task, text):\n    return 0.5\n\n\nasync def tenth(task, client):\n"
    code += "    await client.chat.completions.create(model='policy', messages=task.prompt)\n    return 0.1\n"
    (tmp_path / "graders_on_file.py").write_text(code)
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "be brief"}])
    train(tmp_path / "memory", lambda task, text: 0.2)
    train(tmp_path / "file", lambda task, text: 0.2, write_rows(tmp_path / "train.jsonl", [{"prompt": "?"}] * 3))

    def evaluated(run: str, *overrides: str) -> str:
        main(["eval", str(tmp_path / run), *overrides, "--json"])
        printed = capsys.readouterr()
        return str(json.loads(printed.out)["result"]["reward_mean"]) if printed.out else printed.err

    tasks = f"data.held_out.source={held_out}"
    for run in ("memory", "file"):
        assert evaluated(run, tasks, "reward=graders_on_file:half") == "0.5"
        assert evaluated(run, tasks, "agent=graders_on_file:tenth") == "0.1"
        named = "one of reward=module:function, agent=module:function, environment=module:Class, driver=module:Class"
        assert named in evaluated(run, tasks)
        assert "by reward=graders_on_file:half" in evaluated(run, tasks, "environment=graders_on_file:half")
        assert "are both set" in evaluated(run, tasks, "reward=a:b", "agent=a:b")
    assert main(["train", str(tmp_path / "file"), "--resume", "orchestration.updates=3"]) == 1
    assert "continue with treadle.train(..., resume=True)" in capsys.readouterr().err


def test_rows_without_a_prompt_are_for_environments_that_make_their_own(tmp_path: Path) -> None:
    class Opens(Short):
        async def reset(self, task: Task) -> list[Message]:
            return [user(task.task_id)]

    file = write_rows(tmp_path / "train.jsonl", [{"ground_truth": "x"}])
    assert train(tmp_path / "run", Opens, file, settings={"training.tasks_per_update": 1})["updates"] == 2
    with pytest.raises(DataError, match=r"train\.jsonl:1: no prompt, and environment 'Short' does not make its own"):
        train(tmp_path / "other", Short, file)


def test_an_interrupted_run_goes_on_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(tmp_path / "whole")
    stopped = train(tmp_path / "run", progress=Interrupting())
    assert (stopped["stopped_early"], stopped["updates"]) == (True, 1)
    with pytest.raises(ConfigError, match=r"training\.group_size is 4, the run was started with 3"):
        train(tmp_path / "run", settings={"training.group_size": 4}, resume=True)
    assert main(["train", "x", "--resume", "--runs", str(tmp_path), "--name", "run"]) == 1
    assert "continue with treadle.train(..., resume=True)" in capsys.readouterr().err
    assert train(tmp_path / "run", resume=True)["weights_sha256"] == whole["weights_sha256"]
    with pytest.raises(RunError, match=r"is finished.*give it more orchestration\.updates"):
        train(tmp_path / "run", resume=True)


# What Python alone can say wrong; all else is checked as the command's is: tests/cli/test_wrong_input.py.
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"settings": {"training.group_sise": 3}}, ConfigError, "did you mean 'training.group_size'"),
        ({"settings": {"training.group_size": "3"}}, ConfigError, "training.group_size: got '3'"),
        (
            {"settings": {"rollout.compaction.at": 7, "rollout.compaction.max_tokens": 8}},
            ConfigError,
            "tokens, and rollout.compaction.at is 7: every turn",
        ),
        ({"model": {**MODEL, "tokenizer": None}}, ConfigError, "model.build needs model.tokenizer"),
        ({"tasks": [Task("t")]}, ConfigError, "reset gave no messages"),
        (
            {"tasks": [{"prompt": "a?"}, {"prompt": "b?"}], "held_out": [{"prompt": "c?"}, {"prompt": "b?"}]},
            DataError,
            "1 held-out tasks are training tasks too, for example 'held_out-000001' is 'train-000001'; keep them",
        ),
        ({"tasks": [{"prompt": 3}]}, DataError, r'tasks\[0\]: prompt must be text or a JSON array.*write \[{"role"'),
        ({"tasks": [{"question": "?"}]}, DataError, r"tasks\[0\]: unknown key 'question'; keys are task_id, prompt"),
        (
            {"tasks": [{"prompt": "?", "answer": 1}]},
            DataError,
            r"unknown key 'answer'.*: data\.columns\.ground_truth=answer\)",
        ),
        (
            {"environment": lambda task, text: 0.0, "tasks": pd.DataFrame([{"ground_truth": "4", "extras": {}}])},
            DataError,
            r"tasks\[0\]: no prompt, and environment .* set data\.columns\.prompt \(there are ground_truth, extras\)",
        ),
        ({"tasks": Task("t")}, ConfigError, "tasks is one Task; give a list"),
        ({"model": None}, ConfigError, "no model to train; give model=, or a recipe that has one"),
        (
            {"environment": Shop, "model": {**MODEL, "chat_template": None, "tokenizer": "demo"}},
            ConfigError,
            "'Shop' has tools, but the chat template refuses .* one tool by heart.*or the recipe tools-small",
        ),
        ({"model": 3}, ConfigError, "model: got 3, expected an object"),
        *(
            (
                {"environment": given, "tasks": "arithmetic", "settings": COUNTS["train"]},
                ConfigError,
                f"{kind} {name!r} would play nothing: {WINS}",
            )
            for given, kind, name in (
                (Short, "environment", "Short"),
                ("lookup", "environment", "lookup"),
                (shortness, "environment", "shortness"),
                (answer, "agent", "answer"),
                (Nobody, "driver", "Nobody"),
            )
        ),
        (
            {"held_out": "arithmetic", "settings": COUNTS["held_out"]},
            ConfigError,
            "'Short' would play nothing: the tasks of data.held_out name",
        ),
        ({"environment": Short()}, ConfigError, r"environment is one Short, .* lambda: Short\(\.\.\.\)"),
        (
            {"environment": [len, sum]},
            ConfigError,
            "environment is a list of 2; add up several rewards in one function",
        ),
        ({"environment": lambda a, b, c: 0.0}, ConfigError, r"missing a required argument.*def reward\(task, text\)"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    options: dict[str, Any], error: type[TreadleError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert "no running event loop" not in "".join(traceback.format_exception(raised.value))


class DividesByZero(treadle.Callback):
    def update(self, row: Any) -> None:
        1 / 0  # noqa: B018


def test_tracebacks_have_no_lines_of_treadle_but_those_of_user_code(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("Hi")
    nothing: list[Task] = []
    for tasks in (nothing, tmp_path / "broken.jsonl"):
        with pytest.raises(TreadleError) as wrong:
            train(tmp_path / "run", tasks=tasks)
        assert wrong.value.__cause__ is None
        assert [frame.name for frame in traceback.extract_tb(wrong.value.__traceback__)][-2:] == ["train", "called"]
    with pytest.raises(TreadleError) as stopped:
        train(tmp_path / "run", callbacks=[DividesByZero()])
    assert [frame.name for frame in traceback.extract_tb(stopped.value.__traceback__)][-2:] == ["train", "called"]
    assert "1 / 0" in "".join(traceback.format_exception(stopped.value))


def test_an_error_that_user_code_raises_keeps_its_lines(tmp_path: Path) -> None:
    def tasks() -> Any:
        raise DataError("mine")
        yield

    with pytest.raises(DataError) as wrong:
        train(tmp_path / "run", tasks=tasks())
    assert [frame.name for frame in traceback.extract_tb(wrong.value.__traceback__)][-1] == "tasks"


def test_a_taken_directory_is_said_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunError, match="already in use; choose another name"):
        treadle.train("nowhere:Nothing", "missing.jsonl", model="missing", run=tmp_path)
