"""Learner and engines that take turns."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engines.test_remote import Fake, Nowhere, sampled
from tests.worlds import tiny
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.engines.pool import PoolSync
from treadle.loop.config import PlacementConfig
from treadle.placement.reserve import Bundle, bundles_of, places_of
from treadle.placement.turns import ColocatedPool, ColocatedTrainer
from treadle.plan.validation import check_settings


class Ranks:
    """Say what they do (`rank_group.Calls`)."""

    busy = False

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def call(self, name: str, *arguments: Any) -> Sequence[Any]:
        if name == "facts":
            return [(None, 0, None)]
        self._said.append(name)
        return [arguments[0].write({}, []) if name == "stage" else None]

    def kill(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Engine(Fake):
    """Says what it does, and refuses calls while it sleeps."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(0)
        self._said = said

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        assert not self.asleep
        self._said.append("sample")
        await asyncio.sleep(0.01)
        self._said.append("sampled")
        return await super().generate(*arguments, **named)

    async def update_weights(self, stage: Any, version: int) -> None:
        self._said.append("load")
        self.asleep = False
        await super().update_weights(stage, version)

    async def sleep(self) -> None:
        self._said.append("sleep")
        await super().sleep()

    async def wake(self) -> None:
        self._said.append("wake")
        await super().wake()


async def colocated() -> tuple[list[str], ColocatedTrainer, ColocatedPool]:
    said: list[str] = []
    trainer = ColocatedTrainer(Ranks(said))
    async with trainer.turns.of("engines"):
        return said, trainer, ColocatedPool([Engine(said)], trainer.turns)


async def test_each_side_sleeps_in_the_others_turn() -> None:
    said, trainer, pool = await colocated()
    publish = PoolSync(trainer, pool, Nowhere()).publish
    await publish(0)
    pool.open_session("a")
    await asyncio.gather(sampled(pool, "a"), sampled(pool, "a"))
    assert said == [
        *("offload", "sleep", "reload", "stage", "offload", "load"),
        *("sample", "sample", "sampled", "sampled"),
    ]
    said.clear()
    await trainer.train_batch([])
    await publish(1)
    assert said == ["sleep", "reload", "train_batch", "stage", "offload", "load"]
    said.clear()
    await trainer.digest()  # as for a checkpoint
    await sampled(pool, "a")
    assert said == ["sleep", "reload", "digest", "offload", "wake", "sample", "sampled"]
    assert pool.route("a") is None


async def test_a_turn_waits_for_the_calls_of_the_other_side() -> None:
    said, trainer, pool = await colocated()
    await PoolSync(trainer, pool, Nowhere()).publish(0)
    pool.open_session("a")
    said.clear()
    running = asyncio.create_task(sampled(pool, "a"))
    while "sample" not in said:
        await asyncio.sleep(0)
    await asyncio.gather(trainer.train_batch([]), running)
    assert said == ["sample", "sampled", "sleep", "reload", "train_batch"]


def test_an_engine_shares_the_place_of_its_rank() -> None:
    settings = {"kind": "ray", "colocate": True, "engines": {"count": 2}, "rollout": {"workers": 1}}
    config = build(PlacementConfig, {**settings, "learner": {"ranks": 2}})
    bundles = bundles_of(config, "cuda")
    assert bundles[1] == Bundle("learner rank", 1, {"CPU": 1.0, "GPU": 0.5})
    assert bundles[3] == Bundle("engine", 1, {"CPU": 1.0, "GPU": 0.5}, beside=1)
    assert [[str(bundle) for bundle in place] for place in places_of(bundles)] == [
        ["learner rank 0", "engine 0"],
        ["learner rank 1", "engine 1"],
        ["rollout worker 0"],
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("placement.colocate=true",), "placement.kind 'embedded' has no cluster"),
        (("placement.kind=ray", "placement.colocate=true", "placement.engines.count=2"), "placement.engines.count=1"),
        (("placement.kind=ray", "placement.colocate=true", "orchestration.max_staleness=1"), "max_staleness is 1"),
        (("placement.kind=ray", "placement.colocate=true", "engine.kind=vllm"), "engine.kind is 'vllm'"),
    ],
)
def test_what_cannot_take_turns_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(tiny(*settings))


async def test_nothing_is_sampled_in_the_learners_turn() -> None:
    said, trainer, pool = await colocated()
    await PoolSync(trainer, pool, Nowhere()).publish(0)
    pool.open_session("a")
    await asyncio.gather(*(trainer.train_batch([]) if n % 3 == 0 else sampled(pool, "a") for n in range(12)))
    inside = 0
    for word in said:
        inside += {"sample": 1, "sampled": -1}.get(word, 0)
        assert not (inside and word in ("train_batch", "sleep", "reload"))
    assert said.count("train_batch") == 4
