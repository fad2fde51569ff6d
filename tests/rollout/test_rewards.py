"""From what was given to what is trained: weights, shaping, length penalty, overlong."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import Told, addresses, make_step, plain_rollouts, saying, tool
from treadle.core.config import build
from treadle.core.draws import Stream
from treadle.core.errors import Cause, ConfigError
from treadle.core.outcomes import as_played, as_trained
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Status, StopReason, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.rewards import (
    LengthPenaltyConfig,
    RewardsConfig,
    RewardShaper,
    apply_overlong_policy,
    apply_weights,
    is_overlong,
    length_penalty,
    load_group_reward,
    load_shaping,
)

TASK = Task("t")
PAGE = Reward({"page": 0.5})
ANSWER = Reward({"answer": 1.0, "brevity": 0.25})


def rewarded(*given: Reward, status: Status = Status.DONE, stop: StopReason = StopReason.STOP) -> Trajectory:
    steps = [replace(make_step(), given=g, reward=g.total(), stop_reason=stop) for g in given]
    return Trajectory("g.0", "t", 0, tuple(steps), math.fsum(s.reward for s in steps), status)


def trained(trajectory: Trajectory) -> list[float]:
    return [step.reward + step.shaping for step in trajectory.steps]


def shape(trajectory: Trajectory, timeout: float = 5.0, hook: Any = None, **settings: Any) -> Trajectory:
    shaper = RewardShaper(build(RewardsConfig, settings, "rewards"), timeout)
    shaper._hook = hook or shaper._hook

    async def shaped() -> Trajectory:
        return await shaper.shape(TASK, shaper.apply_weights(trajectory), UserCode("code", Cause.ENVIRONMENT))

    return asyncio.run(shaped())


# Weights


def test_weights_make_the_reward_and_the_record_keeps_what_was_given() -> None:
    found = apply_weights(rewarded(PAGE, ANSWER), {"page": 2.0, "brevity": 0.0})
    assert [s.reward for s in found.steps] == [1.0, 1.0]
    assert (found.reward, as_trained(found).reward) == (2.0, 2.0)
    assert as_played(found).components == {"page": 0.5, "answer": 1.0, "brevity": 0.25}
    given = as_played(found).given
    assert (given("answer"), given("nothing"), given()) == (1.0, 0.0, 2.0)
    plain = rewarded(Reward.of(0.5), Reward.of(1.0))
    assert (as_played(plain).given("answer"), as_played(plain).given()) == (1.5, 1.5)


# The hook


def per_step(task: Task, trajectory: Trajectory) -> Sequence[float | Reward]:
    """A plain number, names, and rewards of tokens."""
    rewards: list[float | Reward] = [0.0, 0.125, Reward({"style": 1.0}, tokens=np.array([1, -3], np.float32))]
    return rewards[: len(trajectory.steps)]


async def later(task: Task, trajectory: Trajectory) -> Any:
    await asyncio.sleep(0)
    return np.array([0.5] * len(trajectory.steps), np.float32)


def halfway(task: Task, trajectory: Trajectory) -> Any:
    yield 1.0
    raise RuntimeError("in the middle")


async def hangs(task: Task, trajectory: Trajectory) -> Any:
    await asyncio.Event().wait()


def takes_one(trajectory: Trajectory) -> Any:
    return []


def test_a_hook_adds_to_steps_by_name_and_to_tokens() -> None:
    found = shape(rewarded(PAGE, PAGE, ANSWER), shaping=f"{__name__}:per_step", weights={"style": 0.5})
    assert [s.reward for s in found.steps] == [0.5, 0.5, 1.25]
    assert [s.shaping for s in found.steps] == [0.0, 0.125, -1.5]
    assert (found.reward, as_trained(found).reward) == (2.25, 0.875)
    assert as_played(found).components == {
        "page": 1.0, "shaping": 0.125, "answer": 1.0, "brevity": 0.25, "style": 1.0, "tokens": -2.0
    }  # fmt: skip


def test_a_hook_may_be_async_and_give_an_array() -> None:
    assert trained(shape(rewarded(PAGE, ANSWER), shaping=f"{__name__}:later")) == [1.0, 1.75]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            lambda task, trajectory: dict[str, float]()["nothing here"],
            "rewards.shaping raised KeyError: 'nothing here'",
        ),
        (halfway, "rewards.shaping raised RuntimeError: in the middle"),
        (lambda task, trajectory: [1.0] * 9, "there are 9 rewards for 2 steps"),
        (lambda task, trajectory: ["good", "bad"], "a reward must be a finite number, at most 1e+12 in size, or a"),
        (
            lambda task, trajectory: [Reward(tokens=np.ones(1, np.float32))] * 2,
            "rewards 1 tokens, the completion has 2",
        ),
        (lambda task, trajectory: 3.0, "3.0, a float, no rewards; it must return a list"),
        (lambda task, trajectory: [1e12] * 2, "rewards add up to 1"),
    ],
)
def test_a_hook_that_breaks_fails_the_attempt_alone(hook: Any, message: str) -> None:
    found = shape(rewarded(PAGE, ANSWER), hook=hook, shaping=f"{__name__}:hangs")
    assert (found.reward, as_trained(found).reward, found.status) == (None, None, Status.FAILED)
    assert found.failure is not None and found.failure.cause is Cause.VERIFIER
    assert message in found.failure.message


def test_a_hook_that_hangs_fails_the_attempt() -> None:
    found = shape(rewarded(PAGE), timeout=0.05, shaping=f"{__name__}:hangs")
    assert found.failure is not None and found.failure.cause is Cause.TIMEOUT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "shaping: 'nowhere' names no module"),
        (f"{__name__}:TASK", "of type Task, it must be a function"),
        (f"{__name__}:takes_one", r"is called as shaping\(task, trajectory\), but: too many"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_at_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_shaping(name)


# Groups


def reward_group(group: Any, *members: Trajectory, timeout: float = 5.0, **settings: Any) -> list[Trajectory]:
    shaper = RewardShaper(build(RewardsConfig, settings, "rewards"), timeout)
    shaper.group = group
    return asyncio.run(shaper.reward_group(TASK, "g", members))


def test_a_group_is_rewarded_by_the_last_reply_of_each_attempt() -> None:
    lost = replace(make_step((1,), ()), dropped=DropReason.CANCELLED)
    first = replace(rewarded(PAGE, PAGE), steps=(*rewarded(PAGE, PAGE).steps, lost))

    def ranks(task: Task, trajectories: Sequence[Trajectory]) -> list[float | Reward]:
        return [2.0, Reward({"answer": 3.0})]

    one, two = reward_group(ranks, first, rewarded(ANSWER), weights={"answer": 0.5, "page": 2.0})
    assert [s.reward for s in one.steps] == [0.5, 3.0, 0.0]
    assert (as_played(one).components, one.reward) == ({"page": 1.0, "reward": 2.0}, 3.5)
    assert (as_played(two).components, two.reward) == ({"answer": 4.0, "brevity": 0.25}, 2.25)


@pytest.mark.parametrize(
    ("group", "cause", "message"),
    [
        (lambda task, trajectories: dict[int, float]()[0], Cause.VERIFIER, "rewards.group raised KeyError: 0"),
        (lambda task, trajectories: [1.0], Cause.VERIFIER, "there are 1 rewards for 2 attempts"),
        (lambda task, trajectories: [1.0, "good"], Cause.VERIFIER, "a reward must be a finite number"),
        (hangs, Cause.TIMEOUT, "rewards.group took longer than 0.05 s"),
    ],
)
def test_a_group_reward_that_breaks_fails_all(group: Any, cause: Cause, message: str) -> None:
    for member in reward_group(group, rewarded(PAGE), rewarded(ANSWER), timeout=0.05):
        assert member.failure is not None and member.failure.cause is cause and message in member.failure.message


def test_a_group_reward_may_read_the_text() -> None:
    def says(task: Task, trajectories: Sequence[Trajectory], *, decode: Any) -> Any:
        return decode(trajectories[0].steps[0].completion_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "says", says)
        assert load_group_reward(f"{__name__}:says", str)(TASK, [rewarded(PAGE)]) == "[3 4]"
    with pytest.raises(ConfigError, match=r"is called as group_reward\(task, trajectories\), but: too many"):
        load_group_reward(f"{__name__}:takes_one")


# Length


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 200), st.floats(0.1, 3))
def test_the_length_penalty_is_the_formula_of_dapo(free: int, width: int, tokens: int, most: float) -> None:
    """Eq. 13: 0 up to L_max - L_cache, then (L_max - L_cache - length) / L_cache, then -1."""
    longest, cache = free + width, width
    if tokens <= longest - cache:
        expected = 0.0
    elif tokens <= longest:
        expected = ((longest - cache) - tokens) / cache
    else:
        expected = -1.0
    config = LengthPenaltyConfig(free=free, limit=longest, max=most)
    assert length_penalty(tokens, config) == pytest.approx(-most * expected)


def test_the_length_penalty_is_a_component_of_the_last_step_that_counts() -> None:
    lost = replace(make_step((1,), ()), dropped=DropReason.CANCELLED)
    played = rewarded(PAGE, ANSWER)  # two tokens a step
    played = replace(played, steps=(*played.steps, lost))
    found = shape(played, length_penalty={"free": 2, "limit": 6, "max": 0.5})
    assert trained(found) == [0.5, 1.0, 0.0]
    assert as_played(found).components["length_penalty"] == -0.25
    assert (found.reward, as_trained(found).reward) == (1.75, 1.5)


def test_a_limit_below_what_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit is 2 and free 2"):
        build(RewardsConfig, {"length_penalty": {"free": 2, "limit": 2}}, "x")
    with pytest.raises(ConfigError, match="'tokens' are the rewards of single tokens"):
        build(RewardsConfig, {"weights": {"tokens": 2.0}}, "x")
    with pytest.raises(ConfigError, match="weight of 'a' is nan"):
        build(RewardsConfig, {"weights": {"a": math.nan}}, "x")


# Overlong


@pytest.mark.parametrize(
    ("status", "stop", "overlong"),
    [
        (Status.CONTEXT, StopReason.STOP, True),
        (Status.DONE, StopReason.LENGTH, True),
        (Status.MAX_STEPS, StopReason.LENGTH, True),
        (Status.MAX_STEPS, StopReason.STOP, False),
        (Status.DONE, StopReason.STOP, False),
    ],
)
def test_what_a_limit_on_tokens_cut_off_is_overlong(status: Status, stop: StopReason, overlong: bool) -> None:
    played = rewarded(PAGE, ANSWER, status=status, stop=stop)
    assert is_overlong(played) is overlong
    assert apply_overlong_policy(played, "keep") is played
    dropped = apply_overlong_policy(played, "drop")
    assert (dropped.dropped is DropReason.OVERLONG, as_trained(dropped).reward is None) == (overlong, overlong)
    assert dropped.reward == 1.75
    assert (as_trained(apply_overlong_policy(played, "zero_reward")).reward == 0) is overlong


@given(
    st.lists(
        st.builds(
            Reward,
            st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-9, 9)),
            st.none()
            | st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=2).map(lambda t: np.array(t, np.float32)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_zeroed_trajectory_trains_exactly_nothing_at_any_level(given_: list[Reward]) -> None:
    found = shape(rewarded(*given_, status=Status.CONTEXT), weights={"a": 0.3}, overlong="zero_reward")
    assert as_trained(found).reward == 0.0
    assert trained(found) == [0.0] * len(given_)
    assert all(step.given.tokens is None or not step.given.tokens.any() for step in found.steps)


# In an attempt


def attempt(world: Environment, stream: Stream, **rewards: Any) -> Trajectory:
    async def played() -> Trajectory:
        made = plain_rollouts(saying("a"), lambda: world)
        made._shaper = RewardShaper(build(RewardsConfig, rewards, "rewards"), 5.0)
        [running] = made.start("g000000", Task("t", environment="world"), addresses(1, stream))
        return await running

    return asyncio.run(played())


@pytest.mark.parametrize("stream", [Stream.TRAIN, Stream.EVALUATE])
def test_attempts_are_weighed_and_those_for_training_are_shaped(stream: Stream) -> None:
    world = Told(EnvStep([tool("x")], PAGE), EnvStep(reward=ANSWER, done=True))
    found = attempt(world, stream, weights={"page": 2.0}, length_penalty={"free": 0, "limit": 4})
    assert found.reward == 2.25
    assert as_trained(found).reward == (1.25 if stream is Stream.TRAIN else 2.25)
    assert ("length_penalty" in as_played(found).components) is (stream is Stream.TRAIN)
