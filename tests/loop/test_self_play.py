"""Self-play: the policy in another role (`policy: true`), in trajectories of its own that are trained."""

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout.kit import attempt
from tests.runs import Interrupting, check_finished, query, recorded, resume, start, updates
from tests.worlds import HELLO, Vowels, make_group, make_step, plain_ids, saying, tiny, tool, user
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages, has_zero_advantage
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError
from treadle.core.outcomes import by_role, leave_out, without_stale
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Message, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.packing.flat import flatten
from treadle.plan.inputs import make_inputs
from treadle.plan.other_models import check_models, make_models
from treadle.rollout.attempt import Players
from treadle.rollout.other_models import OtherModelConfig
from treadle.rollout.rewards import RewardsConfig


class Duel(Vowels):
    """A rival replies to each reply; who has the larger share of vowels wins what the other loses."""

    async def step(self, text: str) -> EnvStep:
        step = await super().step(text)
        said = await self.models["rival"].chat([*self.task.prompt, user("beat it")])
        mine, theirs = Reward.of(step.reward).total(), sum(c in "aeiou" for c in said.lower()) / max(len(said), 1) / 2
        rewards = {"rival": Reward({"own": theirs, "other": -mine})}
        return step._replace(reward=Reward({"own": mine, "other": -theirs}), rewards=rewards)


class Alone(Duel):
    async def step(self, text: str) -> EnvStep:
        return await Vowels.step(self, text)


RIVAL = "models.rival.policy=true"
DUEL = (f"environment={__name__}:Duel", RIVAL)


def test_a_run_trains_every_token_of_both_roles_once(tmp_path: Path) -> None:
    start(tmp_path, *DUEL, "data.held_out=null")
    check_finished(tmp_path)  # the learner's log-probabilities are those on record, for both
    trained = query(
        tmp_path,
        "SELECT t.trajectory_id LIKE '%.rival' AS rival, count(*) AS steps, sum(s.completion_tokens) AS tokens "
        "FROM steps s JOIN trajectories t USING (trajectory_id) WHERE state = 'trained' GROUP BY 1",
    )
    rows = updates(tmp_path)
    assert [row["steps"] for row in trained] == [4 * 6 * 2] * 2
    assert sum(row["tokens"] for row in trained) == sum(row["trainable_tokens"] for row in rows)
    assert all(row["role/rival/reward_mean"] == pytest.approx(-row["reward_mean"]) for row in rows)
    assert rows[0]["trajectories"] == 6 and rows[0]["role/rival/steps_mean"] == 2


@pytest.mark.slow
def test_a_resumed_run_repeats_both_roles_bit_for_bit(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", *DUEL)
    assert start(tmp_path / "cut", *DUEL, progress=Interrupting(which=4))["stopped_early"]
    assert resume(tmp_path / "cut")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_a_copy_that_is_never_called_changes_no_bit(tmp_path: Path) -> None:
    settings = ("orchestration.updates=2", "data.held_out=null")
    alone = start(tmp_path / "one", f"environment={__name__}:Alone", RIVAL, *settings)
    assert alone["weights_sha256"] == start(tmp_path / "other", *settings)["weights_sha256"]
    assert not any(".rival" in name for name, _ in recorded(tmp_path / "one"))


class Scripted(Environment):
    """Two turns; the rival, of a conversation of its own, opens, and is rewarded by step and at the end."""

    async def reset(self, task: Task) -> list[Message]:
        self.heard = [user("begin")]
        return [user(await self.answer())]

    async def step(self, text: str) -> EnvStep:
        self.heard.append(user(text))
        return EnvStep([tool(await self.answer())], rewards={"rival": Reward({"wit": 0.5})})

    async def answer(self) -> str:
        reply = await self.models["rival"].chat(self.heard)
        self.heard.append(Message(role="assistant", content=reply))
        return reply

    async def finish(self, ended: Status) -> Finish:
        if ended == Status.MAX_STEPS:
            await self.answer()
        return Finish(reward=1.0, rewards={"rival": -1.0})


class Broken(Scripted):
    async def finish(self, ended: Status) -> Finish:
        raise RuntimeError("broken")


class Misnamed(Scripted):
    async def finish(self, ended: Status) -> Finish:
        return Finish(rewards={"foe": 1.0})


class Asks(Scripted):
    async def reset(self, task: Task) -> list[Message]:
        return [user(await self.models["rival"].chat([user("begin")], temperature=0.2))]


async def played(environment: Any, rewards: RewardsConfig | None = None) -> Trajectory:
    models = make_models({"rival": OtherModelConfig(policy=True)})
    return await attempt(environment, saying("well"), models=models, rewards=rewards, max_steps=2)


async def test_a_copy_is_recorded_as_a_trajectory_of_its_own() -> None:
    trajectory = await played(Scripted, RewardsConfig(weights={"wit": 2.0}))
    [copy] = trajectory.copies
    assert (copy.trajectory_id, copy.role, copy.attempt, copy.status) == ("g0.0.rival", "rival", 0, "done")
    assert (trajectory.role, trajectory.reward, [len(t.steps) for t in (trajectory, copy)]) == ("", 1.0, [2, 4])
    assert copy.reward == 2 * 0.5 * 2 - 1.0 and [step.reward for step in copy.steps] == [0.0, 1.0, 1.0, -1.0]
    every = [*trajectory.steps, *copy.steps]
    assert len({step.sampling.seed for step in every}) == 6 and not any(step.calls for step in every)
    answer = plain_ids("well")
    assert all(step.completion_ids[: len(answer)].tolist() == answer for step in every)
    for one in (trajectory, copy):  # each continues its own conversation with the ids that were sampled
        pairs = itertools.pairwise(one.steps)
        assert all(b.prompt_ids[: len(a.full_ids)].tolist() == a.full_ids.tolist() for a, b in pairs)
    assert not any("model_" in name for name in trajectory.metrics)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Broken, "broken"),
        (Misnamed, "rewards of 'foe'; they belong to copies of the policy, by name: models has rival"),
        (Asks, "the model 'rival' is the policy, with sampling set by rollout; leave temperature out"),
    ],
)
async def test_an_attempt_that_fails_fails_in_all_its_roles(environment: type[Environment], message: str) -> None:
    trajectory = await played(environment)
    assert trajectory.failure is not None and message in trajectory.failure.message
    assert trajectory.failure.cause is Cause.ENVIRONMENT
    assert all(copy.failure == trajectory.failure and copy.reward is None for copy in trajectory.copies)


def rewarded(number: int, reward: float, rival: float | None) -> Trajectory:
    def made(name: str, reward: float) -> Trajectory:
        return Trajectory(name, "t0", number, (make_step(reward=reward),), reward, Status.DONE)

    copies = () if rival is None else (made(f"g000000.{number}.rival", rival),)
    return replace(made(f"g000000.{number}", reward), copies=copies)


def test_baselines_compare_attempts_of_one_role() -> None:
    group = make_group(0, rewarded(0, 1.0, 0.0), rewarded(1, 2.0, 10.0), rewarded(2, 3.0, None))
    algorithm = build(AlgorithmConfig, {"advantage": "rloo"})
    batch = flatten(by_role([group, make_group(1, rewarded(0, 1.0, None))]))
    assert [group.group_id for group in batch.groups] == ["g000000", "g000000", "g000001"]
    by_hand = {"g000000.0": 1 - 2.5, "g000000.1": 0.0, "g000000.2": 3 - 1.5, "g000000.0.rival": -10.0}
    first = advantages(batch, algorithm)[batch.step_start[:-1]]
    found = dict(zip([t.trajectory_id for t in batch.trajectories[:5]], first[:5].tolist(), strict=True))
    assert found == {**by_hand, "g000000.1.rival": 10.0}
    same = make_group(0, rewarded(0, 1.0, 0.0), rewarded(1, 1.0, 1.0))
    assert not has_zero_advantage(same, algorithm)
    assert has_zero_advantage(make_group(0, rewarded(0, 1.0, 2.0), rewarded(1, 1.0, 2.0)), algorithm)


def test_what_is_dropped_is_dropped_in_all_roles() -> None:
    group = make_group(0, rewarded(0, 1.0, 0.0))
    assert [t.dropped for t in leave_out(group, DropReason.FILTERED).everyone] == [DropReason.FILTERED] * 2
    stale = without_stale(group, 1)
    assert [step.dropped for t in stale.everyone for step in t.steps] == [DropReason.STALE] * 2
    assert without_stale(group, 0) is group


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.rival.path=a", "exactly one of url, path and policy"),
        ("models.rival.options={temperature: 0.5}", "options is for other models"),
        ("rewards.group=tests.loop.test_group_rewards:unique", "rewards.group rewards only one role"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_models(tiny(RIVAL, override))


def test_agent_programs_cannot_call_a_copy() -> None:
    async def solve(task: Task, client: Any) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"models\.rival is a copy .* only environments may call, but the agent 'a'"):
        make_inputs([Task("t", HELLO)], [], Players(agents={"a": solve}, models=make_models(tiny(RIVAL).models)))


@pytest.mark.slow
def test_both_roles_learn_a_game_from_nothing(tmp_path: Path) -> None:
    """Zero-sum, so that no reward rises; what does is the share of vowels in what each role says."""
    quickly = ("rollout.max_completion_tokens=1", "training.group_size=8", "training.optimizer.learning_rate=0.01")
    start(tmp_path, *DUEL, "orchestration.updates=30", "data.held_out=null", "algorithm.entropy_coef=0", *quickly)
    rows = query(tmp_path, "SELECT trajectory_id, trained_version AS v FROM trajectories JOIN groups USING (group_id)")
    version, own = {row["trajectory_id"]: row["v"] for row in rows}, defaultdict[tuple[bool, int], list[float]](list)
    for name, steps in recorded(tmp_path):
        own[name.endswith(".rival"), version[name] // 10] += [step.given.components["own"] for step in steps]
    for rival in (False, True):
        first, _, last = (float(np.mean(own[rival, third])) for third in range(3))
        assert last > 1.4 * first, (rival, first, last)
