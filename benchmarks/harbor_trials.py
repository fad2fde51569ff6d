"""What trials of Harbor's cost outside of the model: CPU seconds and the event loops' lag. Needs `make harbor-env`.

    python -m benchmarks.harbor_trials --trials 4 --agent terminus-2         trials of 33 turns and about 30,000 tokens
    python -m benchmarks.harbor_trials --trials 256 --turns 3                many at once

The model is scripted and answers at once; sandboxes are local. "worker" is Harbor's process alone; what sandboxes spend
(tmux, bash, nsenter) is counted by itself.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path

from tests.integrations.harbor.trials import GREETING, answer, harbor, scripted, shipped, turn
from tests.worlds import END, PLAIN
from treadle.core.draws import Stream
from treadle.integrations.harbor.driver import HarborDriver
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.attempt import Players, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.session import Address


async def _watch_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.01
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - due)


async def measure(trials: int, turns: int, agent: str, text: int) -> dict[str, object]:
    """Play the trials at once and return figures for each."""

    def reply(prompt: str) -> str:
        number = turn(prompt)
        if number < turns - 2:
            return answer(GREETING if number == 0 else f"echo {'x' * text}\n")
        return answer(done=True)

    drivers: list[HarborDriver] = []
    with tempfile.TemporaryDirectory() as folder:
        config = harbor(Path(folder), agent=agent, concurrency=trials, trials_per_second=20.0)

        def make(setup: object) -> HarborDriver:
            drivers.append(HarborDriver(setup, config))  # type: ignore[arg-type]
            return drivers[0]

        limits = RolloutConfig(max_steps=turns + 5, max_input_tokens=100_000, max_completion_tokens=4000)
        renderer, players = ChatRenderer(PLAIN, [END]), Players(drivers={"harbor": make})
        async with open_rollouts(scripted(reply), renderer, players, limits) as rollouts:
            pool, lags = drivers[0]._pool, list[float]()
            await asyncio.sleep(2.5)
            before, own, began = pool.heartbeats[0].cpu_seconds, time.process_time(), time.perf_counter()
            watching = asyncio.create_task(_watch_lag(lags))
            running = [
                rollouts.start(f"g{n}", shipped("greeting"), [Address(0, Stream.TRAIN, 0, n, 0)])[0]
                for n in range(trials)
            ]
            played = await asyncio.gather(*running)
            seconds, ours = time.perf_counter() - began, time.process_time() - own
            watching.cancel()
            await asyncio.sleep(1.5)
            beat = pool.heartbeats[0]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    sandboxes = children.ru_utime + children.ru_stime - beat.cpu_seconds
    lags.sort()
    return {
        "trials": trials,
        "rewards": sum(t.reward or 0.0 for t in played),
        "turns": max(len(t.steps) for t in played),
        "tokens": max(len(t.steps[-1].prompt_ids) for t in played),
        "seconds": round(seconds, 1),
        "worker_cpu_per_trial": round((beat.cpu_seconds - before) / trials, 3),
        "treadle_cpu_per_trial": round(ours / trials, 3),
        "sandbox_cpu_per_trial": round(sandboxes / trials, 3),
        "worker_lag_p99_ms": round(1000 * beat.lag_p99, 1),
        "treadle_lag_p99_ms": round(1000 * lags[int(0.99 * (len(lags) - 1))], 1),
        "worker_memory_mb": round(beat.memory / 1e6),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--turns", type=int, default=33)
    parser.add_argument("--agent", default="terminus-2")
    parser.add_argument("--text", type=int, default=100, help="characters that each command prints")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.trials, options.turns, options.agent, options.text)), indent=2))


if __name__ == "__main__":
    main()
