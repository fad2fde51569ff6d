"""Summaries of models that think: what goes into the next prompt is what was said, whatever the environment takes."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.rollout.families import FAMILIES, world
from tests.worlds import DONE, Told, addresses, user
from treadle.core.outcomes import was_played
from treadle.core.types import Ids, SamplingParams, Status, Task, Trajectory
from treadle.envs.base import INTRODUCTION, EnvStep, Reply
from treadle.rollout.attempt import Rollouts
from treadle.rollout.config import CompactionConfig, RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentDriver
from treadle.testing import FakeEngine

ASK, PLAN, NOTES = "Sum up.", "SECRET plan", "Read page 1."


class Parsed(Told):
    """Takes replies parsed."""

    async def step(self, reply: Reply) -> EnvStep:  # type: ignore[override]
        return await super().step(reply.text)


def written(name: str, thought: str | None, said: str | None) -> str:
    """A reply as the model writes it. said: None: the thought does not end."""
    kind = FAMILIES[name].thoughts
    if kind == "harmony":
        analysis = "" if thought is None else f"<|channel|>analysis<|message|>{thought}"
        final = "" if said is None else f"<|channel|>final<|message|>{said}"
        return f"{analysis}<|end|><|start|>assistant{final}" if analysis and final else analysis + final
    tags = {"[THINK]": ("[THINK]", "[/THINK]"), "<|channel>": ("<|channel>thought\n", "\n<channel|>")}
    opening, closing = tags.get(kind, ("<think>\n", "\n</think>\n\n"))
    if kind == "prompt" or thought is None:
        opening = ""
    return f"{opening}{thought or ''}{'' if said is None or thought is None else closing}{said or ''}"


def summed_up(name: str, summaries: Sequence[str], takes: type[Told]) -> Trajectory:
    """Play three turns, of which the first two are summed up, by the first summary that is accepted."""
    family, asked = world(name), 0

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        nonlocal asked
        asks = ASK in family.decode(prompt)
        asked += asks
        text = summaries[asked - 1] if asks else written(name, PLAN, "go")
        return [*map(int, family.renderer.encode(text)), family.stops[0]]

    compaction = CompactionConfig(at=1200, prompt=ASK, keep_last=0, max_tokens=199, attempts=len(summaries))
    config = RolloutConfig(max_input_tokens=4000, max_completion_tokens=200, max_steps=4, compaction=compaction)
    make = {"world": lambda: takes(EnvStep([user("more")]), EnvStep([user("x" * 1500)]), DONE)}
    driver = EnvironmentDriver(make, config, family.renderer.parser("auto"))
    rollouts = Rollouts(FakeEngine(reply), family.renderer, {("environment", "world"): driver}, config)

    async def play() -> Trajectory:
        [playing] = rollouts.start("g", Task("t", environment="world"), addresses(1))
        return await playing

    return asyncio.run(play())


@pytest.mark.parametrize("takes", [Told, Parsed])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thoughts not in ("", "off")])
def test_a_summary_is_what_was_said_and_a_thought_alone_is_none(name: str, takes: type[Told]) -> None:
    cut, empty, thoughtless = written(name, PLAN, None), written(name, PLAN, ""), written(name, "", NOTES)
    for summaries, used in (([cut, empty, written(name, PLAN, NOTES)], 3), ([thoughtless], 1)):
        trajectory = summed_up(name, summaries, takes)
        assert (trajectory.status, trajectory.failure) == (Status.DONE, None)
        found = [was_played(step) for step in trajectory.steps if step.summary]
        assert found == [False] * (used - 1) + [True]
        prompt = world(name).decode(trajectory.steps[-1].prompt_ids)
        assert f"{INTRODUCTION}{NOTES}" in prompt and "SECRET" not in prompt
    trajectory = summed_up(name, [cut, empty], takes)
    assert trajectory.status is Status.CONTEXT
