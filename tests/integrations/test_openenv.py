"""OpenEnv: sessions of servers, those of the template that `openenv init` writes and one with rules of its own."""

import asyncio
import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.libraries import library_python, play_by
from tests.runs import check_finished, query, start
from tests.until import alive
from tests.worlds import END, PLAIN, plain_ids, user
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError
from treadle.core.types import Status, Task, Trajectory
from treadle.integrations.openenv.driver import OpenEnvConfig, OpenEnvDriver
from treadle.testing import FakeEngine

COUNTING = """
import os
from typing import Literal
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Move(Action):
    direction: Literal["up", "down"]
    by: int = 1


class Place(Observation):
    at: int = 0


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, start=0, **options):
        self.at = start
        return Place(at=self.at)

    def step(self, action, **options):
        self.at += action.by if action.direction == "up" else -action.by
        if self.at == 13:
            raise RuntimeError("thirteen is out of order")
        if self.at == 99:
            os._exit(1)
        return Place(at=self.at, done=self.at >= 3, reward=1.0 if self.at >= 3 else None)

    @property
    def state(self):
        return State()


app = create_app(Counting, Move, Place, env_name="counting", max_concurrent_envs=8)
"""
PROMPT = (user("Play."),)


def python() -> str:
    return library_python("TREADLE_OPENENV_VENV", ".venv-openenv")


def serve(app: str, folder: Path) -> list[str]:
    return ["env", "-C", str(folder), python(), "-m", "uvicorn", app, "--port", "{port}", "--log-level", "warning"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `openenv init` writes, with 8 sessions where it says that the number may be raised."""
    folder = tmp_path_factory.mktemp("openenv")
    command = [python(), "-m", "openenv.cli", "init", "my_env", "--output-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    app = folder / "my_env" / "server" / "app.py"
    assert "max_concurrent_envs=1," in app.read_text()
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=8,"))
    return folder / "my_env"


@pytest.fixture
def counting(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "counting.py").write_text(textwrap.dedent(COUNTING))
    return {"server": serve("counting:app", tmp_path)}


async def play(
    options: dict[str, Any], tasks: list[Task], reply: Callable[[str], str], **settings: Any
) -> list[Trajectory]:
    engine = FakeEngine(lambda prompt, sampling: [*plain_ids(reply(str(PLAIN.decode(list(prompt))))), END])
    limits = {"max_steps": 4, "max_input_tokens": 4000, "max_completion_tokens": 64, **settings}
    made = build(OpenEnvConfig, {"python": python(), **options})
    return await play_by("openenv", lambda setup: OpenEnvDriver(setup, made), engine, tasks, **limits)


def played(
    options: dict[str, Any], tasks: list[Task], reply: Callable[[str], str], **settings: Any
) -> list[Trajectory]:
    return asyncio.run(play(options, tasks, reply, **settings))


def tasks(count: int, **extras: Any) -> list[Task]:
    return [Task(f"t{n}", PROMPT, driver="openenv", extras=extras) for n in range(count)]


@pytest.mark.slow  # `openenv init` and its template import for seconds
def test_the_template_of_openenv_init_with_more_attempts_than_sessions(template: Path) -> None:
    """24 attempts and 8 sessions: those for whom the server is full wait. It has no end: the limit on calls is ours."""
    options = {"server": serve("server.app:app", template), "observation": "echoed_message"}
    trajectories = played(options, tasks(24), lambda text: "word" * text.count("<|im_start|>assistant"), max_steps=3)
    assert [t.failure for t in trajectories] == [None] * 24
    for trajectory in trajectories:
        assert trajectory.status is Status.MAX_STEPS and len(trajectory.steps) == 3
        assert trajectory.reward == pytest.approx(0.1 * 4 * (1 + 2 + 3))
        assert trajectory.metrics["openenv_turns"] == 3
        last = PLAIN.decode(trajectory.steps[-1].prompt_ids.tolist())
        assert "environment ready!" in last and "<|im_start|>user\nwordword<|im_end|>" in last
        assert [step.break_cause for step in trajectory.steps] == [None] * 3


def test_actions_as_json_mistakes_of_the_model_and_failures(counting: dict[str, Any]) -> None:
    """Four attempts side by side, told apart by where they are reset to."""
    moves = {1: ["up", '["up"]', '{"direction": "left"}', '{"direction": "up", "by": 2}']}

    def reply(text: str) -> str:
        turn = text.count("<|im_start|>assistant") - 1
        if '{"at": 0}' in text:
            return '{"direction": "down"}'
        return moves[1][turn] if '{"at": 1}' in text else '{"direction": "up"}'

    resets = [{"start": 1}, {"start": 12}, {}]
    attempts = [Task(f"t{n}", PROMPT, driver="openenv", extras={"reset": reset}) for n, reset in enumerate(resets)]
    mistaken, failing, without = played(counting, attempts, reply, max_steps=5)
    assert (mistaken.status, mistaken.reward, len(mistaken.steps)) == (Status.DONE, 1.0, 4), mistaken.failure
    last = PLAIN.decode(mistaken.steps[-1].prompt_ids.tolist())
    for said in ('{"at": 1}', "Not JSON", "Not a JSON object", "Not a valid action. Its fields are: direction, by"):
        assert said in last
    assert failing.failure is not None and failing.failure.cause is Cause.ENVIRONMENT
    assert "thirteen is out of order" in failing.failure.message
    assert without.failure is not None and without.failure.cause is Cause.VERIFIER
    assert "gave the reward None" in without.failure.message


@pytest.mark.slow
def test_a_server_that_dies_is_infrastructure(counting: dict[str, Any]) -> None:
    [trajectory] = played(counting, tasks(1, reset={"start": 98}), lambda text: '{"direction": "up"}')
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.INFRASTRUCTURE
    assert "the session with the server ended" in trajectory.failure.message


@pytest.mark.slow
async def test_a_running_server_goes_on_after_the_run(counting: dict[str, Any], tmp_path: Path) -> None:
    words = [word.replace("{port}", "0") for word in serve("counting:app", tmp_path)]
    server = await asyncio.create_subprocess_exec(
        *words[:-2], "--log-level", "info", cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert server.stderr is not None
        while b"running on" not in (line := await server.stderr.readline()):
            assert line, "the server has ended"
        url = line.decode().partition("running on ")[2].split()[0]
        [trajectory] = await play({"server": url}, tasks(1), lambda text: '{"direction": "up", "by": 5}')
        assert trajectory.reward == 1.0
        with pytest.raises(ConfigError, match="its actions have no field 'text', only direction, by"):
            await play({"server": url, "action": "text"}, tasks(1), lambda text: "")
        assert alive(server.pid)
    finally:
        server.terminate()
        await server.communicate()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(  # it imports the library
            {"server": "http://127.0.0.1:9"}, "no OpenEnv server answers at http://127.0.0.1:9", marks=pytest.mark.slow
        ),
        ({"server": ["/no/program", "{port}"]}, "'/no/program .*' cannot be run: .*No such file"),
        ({"server": ["false", "{port}"]}, "'false .*' exited with status 1"),
        ({"server": ["true"]}, "the command 'true' has no {port}, the port that the server must take"),
        ({}, "missing key 'server'"),
        ({"server": "localhost:8000"}, "'localhost:8000' is not a base URL"),
    ],
)
def test_what_cannot_work_is_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        played(options, tasks(1), lambda text: "")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_trains_on_a_server_that_it_starts(template: Path, tmp_path: Path) -> None:
    """With one place for four attempts at a time: they wait for it, and the engine does not wait for them."""
    app = template / "server" / "app.py"
    written = app.read_text()
    app.write_text(written.replace("max_concurrent_envs=8,", "max_concurrent_envs=1,"))
    options: dict[str, Any] = {"python": python(), "server": serve("server.app:app", template)}
    options |= {"observation": "echoed_message"}
    rows = tmp_path / "tasks.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say much, {n}."}) + "\n" for n in range(4)))
    try:
        start(
            tmp_path / "run",
            'environment=""',
            "driver=openenv",
            f"driver_options={json.dumps(options)}",
            f"data.train.source={rows}",
            "data.train.options={}",
            "data.held_out=null",
            "rollout.max_input_tokens=120",
            "rollout.max_steps=2",
            "orchestration.updates=2",
            "orchestration.checkpoint_every=1",
        )
    finally:
        app.write_text(written)
    check_finished(tmp_path / "run")
    found = query(tmp_path / "run", "SELECT status, reward FROM trajectories")
    assert {row["status"] for row in found} == {"max_steps"} and all(row["reward"] > 0 for row in found)
