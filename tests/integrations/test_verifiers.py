"""verifiers, both generations: its environments unmodified, with the rewards of its own loop and exact tokens."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.libraries import KeptWorkers, library_python, play_by
from tests.integrations.verifiers_environments import scripted_model
from tests.runs import check_finished, query, start
from tests.worlds import END, PLAIN, plain_ids
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, EngineError
from treadle.core.types import Status, Task, Trajectory
from treadle.data.rows import task_from_row
from treadle.integrations.verifiers.driver import VerifiersConfig, VerifiersDriver, verifiers
from treadle.testing import FakeEngine

pytestmark = pytest.mark.xdist_group("verifiers")  # workers import the library once
ENVIRONMENTS = Path(__file__).with_name("verifiers_environments")
WORKER = {"environment": {"PYTHONPATH": str(ENVIRONMENTS)}}
CHAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module", autouse=True)
def _listed_by_kept_workers(kept: KeptWorkers) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.integrations.verifiers.driver.asyncio", SimpleNamespace(run=kept.run))
        yield


@dataclass(frozen=True)
class Case:
    """An environment; steps: of each of its rows that is played."""

    environment: str
    arguments: dict[str, Any] = field(hash=False)
    steps: tuple[int, ...]

    @property
    def python(self) -> str:
        if self.environment.endswith("v1"):
            return library_python("TREADLE_VERIFIERS_VENV", ".venv-verifiers")
        return library_python("TREADLE_VERIFIERS_CLASSIC_VENV", ".venv-verifiers-classic")

    @cache  # noqa: B019  # a few cases, and importing the library takes seconds
    def tasks(self, split: str = "train", **options: Any) -> list[Task]:
        rows = verifiers(
            split, self.environment, self.arguments, python=self.python, worker=WORKER, count=len(self.steps), **options
        )
        return [task_from_row(dict(row), "row", "") for row in rows]


SINGLE = Case("reverse_text_classic", {}, (1, 1, 1))
MULTI = Case("guess_classic", {"max_turns": 5}, (1, 3, 2, 5))
TOOLS = Case("calculator_classic", {}, (2, 2, 2, 1))
SINGLE_V1 = Case("reverse_text_v1", {"agent": CHAT}, (1, 1))
MULTI_V1 = Case("guess_v1", {"player": CHAT}, (1, 3, 2))
TOOLS_V1 = Case("calculator_v1", {"agent": CHAT}, (2, 2))


Played = Callable[..., list[Trajectory]]


def scripted(fail_at: int = 99) -> FakeEngine:
    """Says what the script does; raises at its reply number `fail_at`, counted from 0."""

    def completion(ids: list[int], sampling: Any) -> list[int]:
        text = str(PLAIN.decode(ids))
        turns = text.count("<|im_start|>assistant") - 1
        if turns == fail_at:
            raise EngineError("the engine is gone")
        return [*plain_ids(scripted_model.reply(text, turns)), END]

    return FakeEngine(lambda prompt, sampling: completion(list(prompt), sampling))


async def play(case: Case, tasks: list[Task], engine: FakeEngine | None = None, **settings: Any) -> list[Trajectory]:
    limits = {"max_steps": 10, "max_input_tokens": 8000, "max_completion_tokens": 200, "reply_parser": "hermes"}
    options = build(VerifiersConfig, {"python": case.python, "worker": WORKER})
    engine = engine or scripted()
    return await play_by(
        "verifiers", lambda setup: VerifiersDriver(setup, options), engine, tasks, **{**limits, **settings}
    )


@pytest.fixture
def played(kept: KeptWorkers) -> Played:
    return lambda case, tasks, engine=None, **settings: kept.run(play(case, tasks, engine, **settings))


def own_loop(cases: list[Case]) -> list[list[dict[str, Any]]]:
    """Return what the library's own loop gives for the rows of cases of one Python."""
    asked = [[case.environment, case.arguments, [*range(len(case.steps))]] for case in cases]
    words = [cases[0].python, "own_loop.py", json.dumps(asked)]
    environment = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS)}
    done = subprocess.run(words, cwd=ENVIRONMENTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize(
    "cases",
    [
        [SINGLE_V1],
        pytest.param([MULTI, TOOLS], marks=pytest.mark.slow),  # the quick tests play it below
        pytest.param([MULTI_V1, TOOLS_V1], marks=pytest.mark.slow),
    ],
    ids=lambda cases: "-".join(case.environment for case in cases),
)
def test_rewards_and_metrics_are_those_of_the_librarys_own_loop(played: Played, cases: list[Case]) -> None:
    for case, answers in zip(cases, own_loop(cases), strict=True):
        check_rewards(played, case, answers)


def check_rewards(played: Played, case: Case, answers: list[dict[str, Any]]) -> None:
    trajectories = played(case, case.tasks())
    assert [t.failure for t in trajectories] == [None] * len(case.steps)
    assert tuple(len(t.steps) for t in trajectories) == case.steps
    for trajectory, expected in zip(trajectories, answers, strict=True):
        assert trajectory.reward == pytest.approx(expected["reward"], abs=1e-12)
        assert dict(trajectory.metrics) == pytest.approx({f"verifiers_{k}": v for k, v in expected["metrics"].items()})
        assert trajectory.status is Status.DONE and not trajectory.warning
    assert len({t.reward for t in trajectories}) > 1 or case is TOOLS_V1
    for step in (step for trajectory in trajectories for step in trajectory.steps):
        text = str(PLAIN.decode(step.prompt_ids.tolist()))
        turns = text.count("<|im_start|>assistant") - 1
        assert step.completion_ids.tolist() == [*plain_ids(scripted_model.reply(text, turns)), END]


@pytest.mark.slow
def test_rows_become_tasks() -> None:
    train, held_out = SINGLE.tasks(), SINGLE.tasks("held_out")
    assert [task.task_id for task in train] == [f"reverse_text_classic-train-{n:06d}" for n in range(3)]
    assert [task.ground_truth for task in train] == ["cba", "ereht olleh", "eerht owt eno"]
    assert train[0].prompt[-1]["content"] == "Reverse: abc" and train[0].driver == "verifiers"
    assert len(held_out) == 1 and held_out[0].extras["split"] == "held_out"
    assert [task.extras["row"] for task in SINGLE.tasks(first=1)] == [1, 2]


@pytest.mark.slow
def test_a_limit_on_calls_ends_an_attempt_with_the_reward_so_far(played: Played) -> None:
    [trajectory] = played(MULTI, MULTI.tasks()[3:], max_steps=2)
    assert (trajectory.status, len(trajectory.steps)) == (Status.MAX_STEPS, 2)
    assert trajectory.reward == pytest.approx(0.25)  # quick: half of one half; not right
    assert "max_steps" in trajectory.warning


@pytest.mark.slow
def test_of_v1_the_limit_is_the_agents_own(played: Played) -> None:
    """It grades nothing of an episode whose call was refused; the sum of no rewards is 0, and would be trained on."""
    limited = replace(MULTI_V1, arguments={"player": {**CHAT, "max_turns": 2}})
    [graded] = played(limited, limited.tasks()[1:2], max_steps=4)
    [refused] = played(MULTI_V1, MULTI_V1.tasks()[1:2], max_steps=2)
    assert len(graded.steps) == len(refused.steps) == 2
    assert graded.reward == pytest.approx(0.25)  # it took part
    assert refused.failure is not None
    assert refused.failure.cause == Cause.VERIFIER


@pytest.mark.slow
def test_an_engine_that_fails_is_the_engines_failure(played: Played) -> None:
    [trajectory] = played(MULTI, MULTI.tasks()[3:], scripted(fail_at=1))
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENGINE


def test_what_fails_fails_its_attempt_alone(played: Played) -> None:
    """An environment that raises, and a row that is another one in this process, with which there is no group."""
    first, second = MULTI.tasks()[:2]
    other = replace(first, task_id="other", extras={**first.extras, "digest": "x"})
    engine = FakeEngine(
        lambda prompt, sampling: [*plain_ids("many" if "row 4" in PLAIN.decode(list(prompt)) else "3"), END]
    )
    well, badly, changed = played(MULTI, [first, second, other], engine)
    assert well.reward == 1.5
    assert badly.failure is not None and badly.failure.cause is Cause.AGENT
    assert "invalid literal for int() with base 10: 'many'" in badly.failure.message
    assert "guess_classic.py" in badly.failure.traceback
    assert changed.failure is not None and not changed.steps
    assert "differs from the row listed as a task" in changed.failure.message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {"environment": "no_such"}, "'no_such' gives no train data: .*no_such", marks=pytest.mark.slow, id="name"
        ),
        pytest.param(
            {"arguments": {"size": 3}}, "unexpected keyword argument 'size'", marks=pytest.mark.slow, id="arguments"
        ),
        pytest.param(
            {"environment": "guess_v1", "arguments": {"player": CHAT}, "python": None},
            r"has no end; say how many tasks are wanted \(count\)",
            marks=pytest.mark.slow,
            id="endless",
        ),
        ({"python": "/no/python"}, "verifiers: '/no/python' is not an interpreter; name an interpreter"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(options: dict[str, Any], expected: str) -> None:
    options = {"environment": "reverse_text_classic", "python": SINGLE.python, "worker": WORKER, **options}
    options["python"] = options["python"] or MULTI_V1.python
    with pytest.raises(ConfigError, match=expected) as error:
        list(verifiers("train", **options))
    assert "\n" not in str(error.value)


def test_a_python_without_the_library_is_one_line_with_its_remedy() -> None:
    python = library_python("TREADLE_OPENENV_VENV", ".venv-openenv")
    with pytest.raises(ConfigError, match="No package metadata was found for verifiers; name an interpreter with"):
        list(verifiers("train", "reverse_text_classic", python=python, worker=WORKER))


@pytest.mark.slow
def test_uv_is_asked_for_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = Path(SINGLE_V1.python)
    (tmp_path / "python").symlink_to(python)
    monkeypatch.setenv("PATH", os.defpath)
    site = next(python.parents[1].glob("lib/python3*/site-packages"))
    worker = {"environment": {"PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), str(site)])}}
    with pytest.raises(ConfigError, match="no uv on the PATH, which verifiers needs to start programs; pip install uv"):
        list(verifiers("train", "reverse_text_v1", python=str(tmp_path / "python"), worker=worker, count=1))


@pytest.mark.slow
def test_a_run_trains_on_an_environment(tmp_path: Path) -> None:
    options = json.dumps({"python": SINGLE.python, "worker": WORKER})
    source = json.dumps({"environment": SINGLE.environment, "python": SINGLE.python, "worker": WORKER})
    start(
        tmp_path / "run",
        'environment=""',
        "driver=verifiers",
        f"driver_options={options}",
        "data.train.source=verifiers",
        f"data.train.options={source}",
        "data.held_out=null",
        "rollout.max_input_tokens=100",
        "orchestration.updates=2",
        "orchestration.checkpoint_every=1",
    )
    check_finished(tmp_path / "run")
    assert {row["status"] for row in query(tmp_path / "run", "SELECT status FROM trajectories")} == {"done"}
