"""`python -m tests.loop.killed_episodes FOLDER KILLS OPTION...`: a run of long episodes, killed over and over.

Each process of the run kills itself at a random moment: a few milliseconds after its n-th answered call in training.
The tokens are a function of prompt and seed. FOLDER/run is the run, FOLDER/said what it logged, FOLDER/answered a line
for each of these calls: process, attempt, seed.
"""

import asyncio
import os
import random
import signal
import sys
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401  # a run imports it late: each fork would anew

from tests.loop.killed_runs import Logged, in_child
from tests.runs import _check_counted, _check_trained, check_finished, query, resume, start, updates
from tests.worlds import END, Vowels, tool, user
from treadle.core.engine import Completion
from treadle.core.types import Ids, Message, SamplingParams
from treadle.envs.base import EnvStep
from treadle.loop.runtime import Runtime
from treadle.plan.config import config_of
from treadle.record.run_directory import RunDirectory
from treadle.testing import FakeEngine

CALLS = 20
OPTIONS = (
    "environment=tests.loop.killed_episodes:Long",
    "model.build.max_position_embeddings=512",
    f"rollout.max_steps={CALLS}",
    "rollout.max_input_tokens=480",
    "engine.lock_step=false",
    "orchestration.updates=8",
    "orchestration.checkpoint_every=1",
)


class Long(Vowels):
    """CALLS replies, each rewarded with its share of vowels and answered with its length."""

    async def step(self, text: str) -> EnvStep:
        self.replies += 1
        await asyncio.sleep(0.001)
        reward = sum(c in "aeiou" for c in text.lower()) / max(len(text), 1) / CALLS
        return EnvStep([tool(str(len(text)))], reward, self.replies == CALLS)


class Duel(Long):
    """The policy replies in another role, too, in a conversation of its own, and wins what the other loses."""

    async def step(self, text: str) -> EnvStep:
        self.said = [*getattr(self, "said", []), user(str(len(text)))][-5:]
        said = await self.models["rival"].chat(self.said)
        self.said.append(Message(role="assistant", content=said))
        step = await super().step(text)
        return step._replace(rewards={"rival": len(said) / 100})


class Unreplayable(Long):
    replayable = False


class Deadly(FakeEngine):
    """Kills the process after so many answers in training, unless None; writes each into a file."""

    def __init__(self, left: int | None, answered: int) -> None:
        super().__init__(self._tokens, delay=lambda: 0.004)
        self._left, self._answered = left, answered

    def _tokens(self, prompt: Ids, sampling: SamplingParams) -> list[int]:
        rng = np.random.default_rng([sampling.seed, zlib.crc32(prompt.tobytes())])
        return [*map(int, rng.integers(200, 700, int(rng.integers(1, 5)))), END]

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        completion = await super().generate(prompt_ids, sampling, session=session, **more)
        if not session.startswith("g"):  # of an evaluation
            return completion
        os.write(self._answered, f"{os.getpid()} {session} {sampling.seed}\n".encode())
        if self._left is not None:
            self._left -= 1
            if not self._left:
                threading.Timer(random.random() * 0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return completion


def go(run: Path, left: int | None, *options: str) -> Any:
    """Start or resume the run, which kills itself after so many answers; the summary."""
    answered = os.open(run.parent / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def open_engine(*_: Any) -> tuple[Deadly, Deadly]:
        engine = Deadly(left, answered)
        return engine, engine

    async def unchecked(*_: Any) -> None:
        """A fake engine has logprobs of its own."""

    runtime = Runtime(open_engine=open_engine, check_engine=unchecked)
    if not run.exists():
        return start(run, *OPTIONS, *options, runtime=runtime)
    with (run.parent / "said").open("a", buffering=1) as file:
        return resume(run, progress=Logged(file), runtime=runtime)


def main(folder: Path, kills: str, *options: str) -> None:
    run, rng = folder / "run", random.Random(7)
    for number in range(int(kills)):
        left = rng.randint(1, 48)
        ended = in_child(partial(go, run, left, *options))
        assert ended == -signal.SIGKILL, (number, ended)
    assert in_child(partial(go, run, None, *options)) == 0
    config = config_of(RunDirectory.open(run))
    if config.orchestration.max_staleness:
        check_finished(run)
    else:  # which would compare the engine's logprobs
        _check_trained(run, config)
        _check_counted(run, updates(run), config.training.epochs_per_batch)
    assert not query(run, "SELECT * FROM open_calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
