"""Judges that are the policy, or a model directory, in the process of the run."""

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.runs import Interrupting, check_finished, query, recorded, resume, start, updates
from tests.worlds import Vowels, plain_renderer, saying, user
from treadle.core.errors import Cause, ConfigError, EngineError, TrajectoryFailure
from treadle.core.types import Task, Trajectory
from treadle.envs.base import EnvStep, Finish
from treadle.judge import Criterion, Judge
from treadle.plan.other_models import JudgingModels

HERE = "tests.loop.test_judges_of_the_run"
CRITERION = Criterion("letters", "How good is it?", lambda reply: sum(map(ord, reply)) % 97 / 97)
GRADED: dict[Any, list[float]] = {}  # of every question
OPTIONS = {"max_tokens": 64, "stop": list("aeiou")}  # replies of random weights end, too


@cache
def judge(path: str | None) -> Judge:
    return Judge(rubric=[CRITERION], path=path, policy=path is None, options=OPTIONS)


async def grade(path: str | None, text: str) -> float:
    reward = (await judge(path).grade(text)).components["letters"]
    GRADED.setdefault(text, []).append(reward)
    return reward


class Judged(Vowels):
    """Judged while the attempt's session is open, and after it has ended."""

    def __init__(self, path: str | None = None) -> None:
        self.path, self.said = path, ""

    async def step(self, text: str) -> EnvStep:
        self.said += text
        return (await super().step(text))._replace(reward=await grade(self.path, text))

    async def finish(self, ended: str) -> Finish:
        return Finish(await grade(self.path, f"all: {self.said}"))


async def together(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    return [await grade(None, str([step.completion_ids.tolist() for step in each.steps])) for each in trajectories]


SETTINGS = ("model.build.max_position_embeddings=1024", "data.held_out=null", "orchestration.updates=2")


@pytest.mark.slow
def test_the_policy_judges_in_lock_step_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"environment={HERE}:Judged", f"rewards.group={HERE}:together")
    whole = start(tmp_path / "whole", *settings)
    check_finished(tmp_path / "whole")
    assert {len(steps) for _, steps in recorded(tmp_path / "whole")} == {2}  # no call of a judge is a step
    assert updates(tmp_path / "whole")[0]["env/judge_calls"] == 6 * 4
    assert start(tmp_path / "cut", *settings, progress=Interrupting(which=1))["stopped_early"]
    assert resume(tmp_path / "cut")["weights_sha256"] == whole["weights_sha256"]


def test_engines_that_start_calls_at_once_take_them_too(tmp_path: Path) -> None:
    start(tmp_path / "run", *SETTINGS, f"environment={HERE}:Judged", "orchestration.max_staleness=1")
    check_finished(tmp_path / "run")
    assert query(tmp_path / "run", "SELECT 1 FROM trajectories WHERE reward IS NULL") == []


@pytest.mark.slow
def test_a_directory_judges_the_same_text_the_same(tmp_path: Path) -> None:
    start(tmp_path / "first", *SETTINGS)
    path = tmp_path / "first" / "checkpoints" / "step-000002"
    settings = (*SETTINGS, f"environment={HERE}:Judged", f"environment_options.path={path}")
    GRADED.clear()
    whole = start(tmp_path / "whole", *settings)
    assert {len(set(rewards)) for rewards in GRADED.values()} == {1} and len(GRADED) > 8
    assert start(tmp_path / "again", *settings)["weights_sha256"] == whole["weights_sha256"]


async def test_where_the_policy_cannot_judge_it_says_so() -> None:
    question: Any = ("policy", [user("good?")], {}, 1)
    at_once = JudgingModels(saying("well"), plain_renderer(), lock_step=False)
    assert (await at_once.chat(*question)).message["content"] == "well"
    with pytest.raises(EngineError, match="await it in an async function"):
        await asyncio.to_thread(asyncio.run, at_once.chat(*question))
    with pytest.raises(EngineError, match=r"set engine\.lock_step=false"):
        await JudgingModels(saying("well"), plain_renderer(), lock_step=True).chat(*question)


async def test_outside_of_a_run_only_a_url_judges() -> None:
    with pytest.raises(TrajectoryFailure, match="the judge 'policy': only available in the process of a run") as caught:
        await judge(None).grade("text")
    assert caught.value.cause is Cause.VERIFIER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of url, path and policy"),
        ({"url": "http://a", "model": "m", "policy": True}, "exactly one of url, path and policy"),
        ({"path": "/no/such"}, "path '/no/such' of a judge is no directory"),
        ({"policy": True, "cache": "replies"}, "leave out its cache"),
        ({"policy": True, "api_key_env": "KEY"}, "belong to a judge's url"),
        ({"policy": True, "options": {"seed": 1}}, "'seed' is none of max_tokens"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Judge(rubric=[CRITERION], **options)
