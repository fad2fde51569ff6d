"""The shipped agent programs, trained: the same weights as the demo's environment, also when interrupted."""

import asyncio
import contextlib
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

import treadle
from tests.runs import MODEL, SETTINGS, Interrupting, Summary, check_finished, query
from tests.worlds import CHATML, Quiet, user
from treadle.api.train import train_run
from treadle.core.errors import ConfigError, DataError, TrainingStopped
from treadle.core.types import Task
from treadle.plan.config import RunConfig, config_of, load_recipe
from treadle.plan.inputs import load_inputs, make_inputs
from treadle.record.run_directory import RunDirectory
from treadle.rollout.attempt import Players

pytestmark = pytest.mark.xdist_group("orchestration_agents")  # what its tests share is made once

AGENTS = ["with_openai", "with_anthropic", "as_program"]
SMALL = [
    "model.build.hidden_size=32",
    "model.build.intermediate_size=64",
    "model.build.num_hidden_layers=1",
    "model.build.num_attention_heads=2",
    "model.build.num_key_value_heads=2",
    "warm_start.steps=60",
    "warm_start.batch_size=16",
    "warm_start.max_loss=null",
    "warm_start.options={expert: 0.2, drill: 0.0}",
    "warm_start.learning_rate=1e-2",
    "training.tasks_per_update=2",
    "training.group_size=3",
    "training.threads=1",
    "data.held_out.options.count=2",
    "orchestration.updates=2",
    "rollout.max_steps=3",
]


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_recipe(name, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warm start for all runs of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(cache))


def started(config: RunConfig, path: Path, progress: Quiet | None = None) -> Summary:
    return train_run(config, load_inputs(config), path, progress or Quiet())


@pytest.fixture(scope="module")
def by_environment(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(cache))
        path = tmp_path_factory.mktemp("environment") / "run"
        started(recipe("demo", "evaluation.greedy_too=false"), path)
    return path


SAME = "SELECT trajectory_id, status, reward, advantage, steps, completion_tokens FROM trajectories ORDER BY 1"


@pytest.mark.quick(1)
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_program_trains_as_the_environment_does_also_resumed(
    agent: str, by_environment: Path, tmp_path: Path
) -> None:
    config = recipe("lookup_agent", f"agent=treadle.recipes.agents.{agent}:solve")
    path = tmp_path / "run"
    stopped = started(config, path, Interrupting())
    assert (stopped["stopped_early"], stopped["updates"]) == (True, 1)
    saved = config_of(RunDirectory.open(path))
    summary = train_run(saved, load_inputs(saved), path, Quiet(), resume=True)
    check_finished(path)
    expected = query(by_environment, SAME)
    assert query(path, SAME) == expected
    assert {row["status"] for row in expected} == {"done", "max_steps"}
    assert any(row["steps"] > 1 for row in expected)
    assert summary["weights_sha256"] == _weights(by_environment)


def _weights(path: Path) -> Any:
    return json.loads(RunDirectory.open(path).summary_file.read_text())["weights_sha256"]


# What is refused before anything runs

PLAIN = Task("t", (user("?"),))


async def solve(task: Task, client: Any) -> float:
    """An agent from Python: the shorter the reply, the better."""
    answer = await client.chat.completions.create(model="m", messages=list(task.prompt))
    return 1 / (1 + len(answer.choices[0].message.content))


async def too_few(task: Task) -> float:
    return 0.0


ONCE = {**SETTINGS, "orchestration.updates": 1}


def test_an_agent_can_be_trained_from_python(tmp_path: Path) -> None:
    tasks = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(3)]
    run, template, said = tmp_path / "run", tmp_path / "own.jinja", Quiet()
    template.write_text(CHATML.replace("{% if tools %}", "{% if false %}"))
    model = {**MODEL, "chat_template": str(template)}
    summary = treadle.train(solve, tasks, model=model, run=run, settings=ONCE, progress=said)
    check_finished(run)
    assert summary["updates"] == 1
    [line] = [line for line in said.lines if "tools" in line]
    assert line.startswith(f"agents' calls with tools will be refused: the chat template '{template}' does not write")
    assert config_of(RunDirectory.open(run)).agent == "solve"
    with pytest.raises(ConfigError, match="too many positional arguments"):
        treadle.train(too_few, tasks, model=MODEL, run=tmp_path / "other", settings=ONCE)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # its connections are dropped
def test_a_second_ctrl_c_logs_nothing_of_the_requests_that_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def impatient(task: Task, client: openai.AsyncOpenAI) -> float:
        requests = [
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}]) for _ in range(2)
        ]
        for request in asyncio.as_completed(requests):
            await request
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        treadle.train(impatient, [PLAIN, Task("u", (user("!"),))], model=MODEL, run=tmp_path / "run", settings=ONCE)
    gc.collect()
    assert not caplog.records


def test_a_task_is_played_by_one_of_the_two() -> None:
    with pytest.raises(DataError, match="names both the environment 'e' and the agent 'a'; leave one out"):
        Task("t", (), "e", agent="a")
    with pytest.raises(ConfigError, match="environment 'lookup' and agent 'm:f' are both set; leave one out"):
        load_recipe("demo", ["agent=m:f"])
    with pytest.raises(ConfigError, match="name neither an environment nor an agent"):
        make_inputs([PLAIN], [])
    inputs = make_inputs([PLAIN], [], Players(agents={"a": solve}))
    assert (inputs.train[0].agent, inputs.players) == ("a", Players({}, {"a": solve}, {}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent=tests.api.test_agents:too_few"], "called as agent"),
        (["agent=tests.api.test_agents:nowhere"], "has no 'nowhere'"),
        (["agent=nowhere"], "agents: 'nowhere' names no module"),
        (["data.train.source=lookup"], "would play nothing: .* name what plays them, environment 'lookup', which wins"),
    ],
)
def test_what_cannot_work_is_refused_when_inputs_are_loaded(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_inputs(recipe("lookup_agent", "warm_start=null", *overrides))


class Flaky:
    """An agent of which every third attempt raises and every fourth never asks."""

    def __init__(self) -> None:
        self.attempts = 0

    async def __call__(self, task: Task, client: Any) -> float:
        self.attempts = number = self.attempts + 1
        if number % 4 == 0:
            return 1.0
        reward = await solve(task, client)
        if number % 3 == 0:
            raise LookupError("nothing to grade with")
        return reward


def test_every_step_of_failing_agents_is_accounted_for(tmp_path: Path) -> None:
    tasks = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(4)]
    run = tmp_path / "run"
    settings = {**ONCE, "training.group_size": 6, "failures.max_failed_fraction": 0.9}
    treadle.train(Flaky(), tasks, model=MODEL, run=run, settings=settings, progress=Quiet())
    states = query(run, "SELECT state, reason, count(*) AS n FROM steps GROUP BY 1, 2 ORDER BY 1")
    assert [(row["state"], row["reason"], row["n"]) for row in states] == [
        ("dropped", "failed", 3),
        ("trained", None, 6),
    ]
    failures = query(run, "SELECT failure_cause, failure_message FROM trajectories WHERE status = 'failed'")
    assert {row["failure_cause"] for row in failures} == {"agent"}
    assert {row["failure_message"].split()[2] for row in failures} == {"raised", "ended"}


async def sends_images(task: Task, client: Any) -> float:
    """Swallows the error of a request that nobody takes, as harnesses do, and grades what is left."""
    await solve(task, client)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with contextlib.suppress(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [image]}])
    return 0.0


def test_a_run_whose_agents_send_what_nobody_takes_ends_and_says_so(tmp_path: Path) -> None:
    tasks, run = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(3)], tmp_path / "run"
    with pytest.raises(TrainingStopped, match=r"6 of 6 trajectories of update 1 sent malformed requests .*messages"):
        treadle.train(sends_images, tasks, model=MODEL, run=run, settings=ONCE, progress=Quiet())
    rows = query(run, "SELECT status, reward, warning, metrics FROM trajectories")
    assert {(row["status"], row["reward"]) for row in rows} == {("done", 0.0)}
    assert all("1 of its requests were malformed" in row["warning"] for row in rows)
    assert all(json.loads(row["metrics"])["bad_requests"]["value"] == 1 for row in rows)
