import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import make_step, tiny
from treadle.core.types import Status, Trajectory
from treadle.orchestration.sampling.rollout_scheduler import ConcurrencyController
from treadle.testing import VirtualLoop


def trajectory(seconds: float, *calls: float) -> Trajectory:
    steps = tuple(replace(make_step(), seconds=call) for call in calls)
    return Trajectory("t", "task", 0, steps, 1.0, Status.DONE, seconds=seconds)


@given(share=st.floats(0.01, 4), lengths=st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40))
def test_attempts_that_are_partly_elsewhere_leave_room_for_others(share: float, lengths: list[float]) -> None:
    """A share above 1: calls side by side."""
    limit = ConcurrencyController(64)
    for seconds in lengths:
        limit.observe(trajectory(seconds, share * seconds / 2, share * seconds / 2))
    assert limit.engine_share == pytest.approx(share)
    assert limit.limit == pytest.approx(64 / share, rel=1e-6, abs=1.001)


def test_groups_that_are_scarce_are_so_in_evaluations_too() -> None:
    assert tiny().evaluated_together == 256
    assert tiny("orchestration.max_concurrent_groups=2").evaluated_together == 2 * tiny().training.group_size


@pytest.mark.quick(2)
@pytest.mark.parametrize(("engine", "environment"), [(1.0, 0.0), (1.0, 3.0), (2.0, 1.0), (0.5, 20.0)])
def test_the_engine_is_kept_full_and_its_queue_short(engine: float, environment: float) -> None:
    """Attempts of four calls each, started as the limit allows, after a change from another world."""
    capacity, limit = 8, ConcurrencyController(8)
    for _ in range(200):
        limit.observe(trajectory(10.0, 9.0))

    async def go() -> tuple[float, float]:
        clock, places = asyncio.get_running_loop(), asyncio.Semaphore(capacity)
        busy = waited = 0.0

        async def attempt(number: int) -> None:
            nonlocal busy, waited
            await asyncio.sleep(number % 7 / 7 * environment)
            started, calls = clock.time(), []
            for _ in range(4):
                asked = clock.time()
                async with places:
                    waited += clock.time() - asked
                    await asyncio.sleep(engine)
                busy += engine
                calls.append(clock.time() - asked)
                await asyncio.sleep(environment)
            limit.observe(trajectory(clock.time() - started, *calls))

        running: set[asyncio.Task[None]] = set()
        for number in range(1500):
            while len(running) >= limit.limit:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.add(asyncio.create_task(attempt(number)))
            if number == 500:
                begun, busy, waited = clock.time(), 0.0, 0.0
        elapsed = clock.time() - begun
        await asyncio.wait(running)
        return busy / capacity / elapsed, waited / busy

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        used, waiting = runner.run(go())
    assert used > 0.9
    assert waiting < 0.5
