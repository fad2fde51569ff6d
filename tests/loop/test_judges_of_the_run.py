"""Judges that are the policy, or a model directory, in the process of the run."""

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.runs import Interrupting, check_finished, query, recorded, resume, start, updates
from tests.worlds import Vowels, plain_renderer, saying, user
from treadle.core.draws import Stream
from treadle.core.errors import Cause, EngineError, TrajectoryFailure
from treadle.core.types import Task, Trajectory
from treadle.envs.base import EnvStep, Finish
from treadle.judge import Criterion, Judge
from treadle.plan.other_models import PolicyModel
from treadle.rollout.session import Address, CallOptions

HERE = "tests.loop.test_judges_of_the_run"
CRITERION = Criterion("letters", "How good is it?", lambda reply: sum(map(ord, reply)) % 97 / 97)
GRADED: dict[Any, list[float]] = {}  # of every question
OPTIONS = {"max_tokens": 64, "stop": list("aeiou")}  # replies of random weights end, too


@cache
def judge(name: str) -> Judge:
    return Judge(name, [CRITERION], options=OPTIONS)


async def grade(name: str, text: str) -> float:
    reward = (await judge(name).grade(text)).components["letters"]
    GRADED.setdefault(text, []).append(reward)
    return reward


class Judged(Vowels):
    """Judged while the attempt's session is open, and after it has ended."""

    def __init__(self, judge: str = "policy") -> None:
        self.judge, self.said = judge, ""

    async def step(self, text: str) -> EnvStep:
        self.said += text
        return (await super().step(text))._replace(reward=await grade(self.judge, text))

    async def finish(self, ended: str) -> Finish:
        return Finish(await grade(self.judge, f"all: {self.said}"))


async def together(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    return [await grade("policy", str([step.completion_ids.tolist() for step in each.steps])) for each in trajectories]


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
    settings = (
        *SETTINGS,
        f"environment={HERE}:Judged",
        "environment_options.judge=grader",
        f"models.grader.path={path}",
    )
    GRADED.clear()
    whole = start(tmp_path / "whole", *settings)
    assert {len(set(rewards)) for rewards in GRADED.values()} == {1} and len(GRADED) > 8
    assert start(tmp_path / "again", *settings)["weights_sha256"] == whole["weights_sha256"]


async def test_where_the_policy_cannot_judge_it_says_so() -> None:
    async def ask(model: PolicyModel) -> str:
        chat = model.chat("judge", Address(1, Stream.OTHER_MODEL, 0, 0, 0))
        return (await chat([user("good?")], (), CallOptions())).message["content"]

    at_once = PolicyModel(saying("well"), plain_renderer(), lock_step=False)
    assert await ask(at_once) == "well"
    with pytest.raises(EngineError, match="await it in an async function"):
        await asyncio.to_thread(asyncio.run, ask(at_once))
    with pytest.raises(EngineError, match=r"set engine\.lock_step=false"):
        await ask(PolicyModel(saying("well"), plain_renderer(), lock_step=True))


async def test_outside_of_a_run_no_name_is_a_model() -> None:
    with pytest.raises(TrajectoryFailure, match="the judge 'policy': no such model is open here") as caught:
        await judge("policy").grade("text")
    assert caught.value.cause is Cause.VERIFIER
