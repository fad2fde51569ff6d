"""Attempts without a run, by an environment, an agent program or a driver."""

import asyncio
import inspect
import sys
import textwrap
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from tests.clocks import SkippingLoop
from tests.until import until
from tests.worlds import END, HELLO, PlainTokenizer, plain_ids, saying, user
from treadle.core.draws import Stream
from treadle.core.types import Ids, Message, SamplingParams, Task, Trajectory
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import ReplyParser, plain
from treadle.rollout.agents.command import Command
from treadle.rollout.attempt import CallLog, Players, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import is_driver
from treadle.rollout.replay import Prefix
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine

LIMIT = 1000.0  # seconds; nobody reaches it unless they are skipped
TASK = Task("t", (user("hello"),), agent="a")


ADDRESS = Address(seed=3, stream=Stream.TRAIN, epoch=1, position=5, attempt=2)


def open_session(
    engine: FakeEngine,
    renderer: ChatRenderer | None = None,
    parse: ReplyParser = plain,
    longest: int = 10_000,
    name: str = "s",
    **sampling: Any,
) -> Session:
    """By default with a renderer of its own: what another one has encoded is encoded again."""
    renderer = renderer or ChatRenderer(PlainTokenizer(), [END])
    return Session(SessionSpec(name, engine, renderer, SamplingParams(**sampling), longest, ADDRESS), parse)


async def played(
    agents: Mapping[str, Any] | Players,
    engine: FakeEngine,
    tasks: Sequence[Task],
    worlds: Any = None,
    tokenizer: PlainTokenizer | None = None,
    rewards: RewardsConfig | None = None,
    log: CallLog | None = None,
    prefix: Prefix | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """One attempt at each task, side by side; every session must be closed afterwards."""
    config = RolloutConfig(**{"max_completion_tokens": 16, "agent_timeout": LIMIT, **settings})
    renderer = ChatRenderer(tokenizer or PlainTokenizer(), [END])
    players = agents if isinstance(agents, Players) else Players(worlds or {}, agents)
    async with open_rollouts(engine, renderer, players, config, rewards or RewardsConfig()) as rollouts:
        keys = [Address(1, Stream.TRAIN, 0, number, 0) for number in range(len(tasks))]
        prefixes = {} if prefix is None else {0: prefix}
        running = [
            rollouts.start(f"g{n}", task, [keys[n]], log=log, prefixes=prefixes)[0] for n, task in enumerate(tasks)
        ]
        trajectories = list(await asyncio.gather(*running))
    assert not engine.open
    return trajectories


def kind_of(player: Any) -> str:
    """Which kind of player a class or function is."""
    return "agent" if not inspect.isclass(player) else "driver" if is_driver(player) else "environment"


async def attempt(
    player: Any,
    engine: FakeEngine | None = None,
    prompt: Sequence[Message] = HELLO,
    extras: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trajectory:
    """One attempt by this player. models: those of `make_models`. settings: as for `played`."""
    kind = kind_of(player)
    players = Players(**{f"{kind}s": {"p": player}}, models=models or {})
    task = Task("t", prompt, extras=extras or {}, **{kind: "p"})
    [trajectory] = await played(players, engine or saying("a"), [task], **settings)
    return trajectory


def play(
    agent: Callable[[Task, Any], Any], engine: FakeEngine | None = None, task: Task = TASK, **settings: Any
) -> Trajectory:
    [trajectory] = asyncio.run(played({"a": agent}, engine or saying("a"), [task], **settings))
    return trajectory


def overtime(attempts: Coroutine[Any, Any, list[Trajectory]], ready: Callable[[], bool]) -> list[Trajectory]:
    """What becomes of attempts whose time is over once it is `ready`."""

    async def go() -> list[Trajectory]:
        running = asyncio.ensure_future(attempts)
        await until(lambda: running.done() or ready())
        loop.skip(2 * LIMIT)
        return await running

    loop = SkippingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(go())


async def ask(client: AsyncOpenAI, messages: list[Any], **options: Any) -> str:
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    content: str | None = answer.choices[0].message.content
    assert content is not None
    return content


async def once(task: Task, client: AsyncOpenAI) -> float:
    return float(await ask(client, [*task.prompt]) == "a")


def by_seed(prompt: Ids, sampling: SamplingParams) -> list[int]:
    """Random ids, often not the canonical tokenization ("a", "b" instead of "ab"), sometimes cut by length."""
    draws = np.random.default_rng(sampling.seed)
    return [*(int(i) for i in draws.choice([*plain_ids("abc"), 3, 4], draws.integers(1, 20))), END]


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = {"model": "m", "messages": task["prompt"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
"""


def program(rest: str, **options: Any) -> Command:
    """An agent program that asks once, then does `rest`."""
    return Command([sys.executable, "-c", PROGRAM + textwrap.dedent(rest)], **options)
