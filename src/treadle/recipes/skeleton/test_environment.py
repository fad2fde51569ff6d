"""pytest treadle/recipes/skeleton: the environment, played by a script instead of a model."""

import asyncio

import treadle
from treadle.recipes.skeleton.environment import QUESTION, Die, demonstration, tasks

FOUR = treadle.Task("four", [QUESTION], ground_truth="4")


async def play(task: treadle.Task, replies: list[str]) -> list[treadle.EnvStep]:
    """Return the steps of one attempt with these replies."""
    environment = Die()
    await environment.reset(task)
    return [await environment.step(reply) for reply in replies]


def test_who_looks_is_shown_the_die() -> None:
    looked, answered = asyncio.run(play(FOUR, ["look", "4"]))
    assert looked == treadle.EnvStep([{"role": "tool", "content": "4"}])
    assert answered == treadle.EnvStep(reward=1.0, done=True)


def test_a_wrong_answer_ends_the_attempt_without_reward() -> None:
    assert asyncio.run(play(FOUR, ["5"])) == [treadle.EnvStep(done=True)]


def test_splits_share_no_task_and_demonstrations_end_with_a_reply() -> None:
    assert not {task.task_id for task in tasks("train", 32)} & {task.task_id for task in tasks("held_out", 32)}
    assert all(demonstration(index, 0)[-1]["role"] == "assistant" for index in range(50))
