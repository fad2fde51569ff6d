"""How an attempt ended, by who drove it and what happened: one table of status, cause, reward and warning."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.rollout.test_agents import ask, played
from tests.worlds import CHATML, END, HELLO, PlainTokenizer, Told, hang, plain_ids, saying, tool, user
from treadle.core.errors import Cause, EngineError, TrajectoryFailure
from treadle.core.rewards import Reward
from treadle.core.types import Ids, SamplingParams, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.agents.agent import Recovered
from treadle.testing import FakeEngine

DONE, MORE = EnvStep(reward=1.0, done=True), EnvStep([tool("more")], 0.25)
OTHER_TOKENS = Reward(tokens=np.array([1.0] * 7, np.float32))
HUGE = EnvStep([tool("x")], 1e12, done=True)
VERIFIER, GAVE_UP = TrajectoryFailure(Cause.VERIFIER, "no tests"), TrajectoryFailure(Cause.AGENT, "gave up")
NO_TESTS = Cause.VERIFIER, "no tests"
TOO_LONG = Cause.TIMEOUT, "(rollout.trajectory_timeout)"
REFUSED = Cause.AGENT, "no bad; an agent that does without the answer returns treadle.Recovered(reward)"
OVER_IT = Recovered(Reward({"page": 0.5}))
MALFORMED = "1 of its requests were malformed, the first: messages"
REFUSING = f"{{% for m in messages if m.role == 'tool' %}}{{{{ raise_exception('no tools') }}}}{{% endfor %}}{CHATML}"
CHOOSY = f"{{% for m in messages if m.content == 'bad' %}}{{{{ raise_exception('no bad') }}}}{{% endfor %}}{CHATML}"


class Boom(Exception):
    pass


def failing(*calls: int) -> FakeEngine:
    """An engine that fails at these calls, counted from 1, and answers "a" otherwise."""

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        if len(engine.calls) in calls:
            raise EngineError("out of memory")
        return [*plain_ids("a"), END]

    engine = FakeEngine(reply)
    return engine


def broken() -> Environment:
    raise Boom("no room")


def world(*answers: Any, **more: Any) -> Callable[[], Environment]:
    return lambda: Told(*answers, **more)


IMAGE: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
Turn = Callable[[AsyncOpenAI], Any]


def agent(*turns: str, returns: Any = 1.0, caught: int = 0) -> Any:
    """Asks each turn by itself ("" is an image), then returns, raises or awaits `returns`.

    caught: errors of calls that it gets over.
    """

    async def play(task: Task, client: AsyncOpenAI) -> Any:
        left = caught
        for turn in turns:
            try:
                await ask(client.with_options(max_retries=0), [user(turn)] if turn else [IMAGE])
            except APIStatusError:
                if not left:
                    raise
                left -= 1
        if isinstance(returns, BaseException):
            raise returns
        return await returns() if callable(returns) else returns

    return play


@dataclass(frozen=True)
class Row:
    """What plays, in what circumstances, and what its trajectory says. warning: what it begins with."""

    name: str
    player: Any
    status: Status
    reward: float | None
    cause: Cause | None = None
    message: str = ""
    warning: str = ""
    engine: Callable[[], FakeEngine] = lambda: saying("a")
    settings: tuple[tuple[str, Any], ...] = ()
    template: str = CHATML

    @property
    def is_agent(self) -> bool:
        return asyncio.iscoroutinefunction(self.player)


def failed(name: str, player: Any, cause: Cause, message: str, **more: Any) -> Row:
    return Row(name, player, Status.FAILED, None, cause, message, **more)


def limited(**settings: Any) -> dict[str, Any]:
    return {"settings": tuple(settings.items())}


LONG = "x" * 200
TIGHT = limited(max_input_tokens=80)
FIRST: dict[str, Any] = {"engine": lambda: failing(1)}
SECOND: dict[str, Any] = {"engine": lambda: failing(2)}
NO_MEMORY = Cause.ENGINE, "out of memory"
AT_LIMIT: dict[str, Any] = {"warning": "the agent raised BadRequestError"}
TABLE = [
    # an environment
    Row("it is done", world(MORE, DONE), Status.DONE, 1.25),
    Row("steps used up", world(*[MORE] * 9), Status.MAX_STEPS, 0.5, **limited(max_steps=2)),
    Row("a later prompt is too long", world(*[MORE] * 9), Status.CONTEXT, 0.75, **TIGHT),
    failed("the first prompt is too long", world(opening=[user(LONG)]), Cause.CONTEXT, "tokens,", **TIGHT),
    failed("the engine fails later", world(MORE, DONE), *NO_MEMORY, **SECOND),
    failed("the template refuses", world(MORE, DONE), Cause.ENVIRONMENT, "no tools", template=REFUSING),
    failed("it cannot be made", broken, Cause.ENVIRONMENT, "create raised Boom: no room"),
    failed("step raises", world(MORE, Boom("x")), Cause.ENVIRONMENT, "step raised Boom: x"),
    failed("step knows better", world(VERIFIER), Cause.VERIFIER, "no tests"),
    failed("step hangs", world(hang), Cause.TIMEOUT, "step took longer", **limited(environment_timeout=0.05)),
    failed("it exits", world(SystemExit(3)), Cause.ENVIRONMENT, "step tried to exit"),
    failed("a reward of other tokens", world(EnvStep(reward=OTHER_TOKENS, done=True)), Cause.ENVIRONMENT, "7 tokens"),
    failed("rewards too large", world(HUGE._replace(done=False), HUGE), Cause.ENVIRONMENT, "the steps' rewards add up"),
    Row("close raises", world(DONE, closing=Boom("x")), Status.DONE, 1.0, warning="close raised Boom: x"),
    failed(
        "all raises", world(Boom("x"), closing=Boom("y")), Cause.ENVIRONMENT, "step raised Boom: x", warning="close"
    ),
    failed("its attempt takes too long", world(hang), *TOO_LONG, **limited(trajectory_timeout=0.2)),
    # an agent program
    Row("it returns", agent("x", "y"), Status.DONE, 1.0),
    Row("it raises at the limit", agent("x", "y", "z"), Status.MAX_STEPS, 0.0, **AT_LIMIT, **limited(max_steps=2)),
    Row("it returns after it", agent("x", "y", caught=1), Status.MAX_STEPS, 1.0, **limited(max_steps=1)),
    Row("it raises for a long prompt", agent("x", LONG), Status.CONTEXT, 0.0, **AT_LIMIT, **TIGHT),
    Row("it returns after one", agent("x", LONG, caught=1), Status.CONTEXT, 1.0, **TIGHT),
    Row("it makes do with a shorter one", agent(LONG, "x", caught=1), Status.DONE, 1.0, **TIGHT),
    failed("it raises for a long first prompt", agent(LONG), Cause.CONTEXT, "tokens,", **TIGHT),
    failed("it returns after a long first one", agent(LONG, caught=1), Cause.CONTEXT, "tokens,", **TIGHT),
    Row("it gives up", agent("x", LONG, caught=1, returns=GAVE_UP), Status.CONTEXT, 0.0, warning="gave up", **TIGHT),
    failed("it raises as the engine fails later", agent("x", "y"), *NO_MEMORY, **SECOND),
    failed("it raises for want of an answer", agent("x", "y", caught=1, returns=Boom("x")), *NO_MEMORY, **FIRST),
    failed("a limit after a failure", agent(*"xyzw", caught=1), *NO_MEMORY, **{**SECOND, **limited(max_steps=2)}),
    Row("it asks again", agent("x", "x", caught=1), Status.DONE, 1.0, **FIRST),
    Row("a failed call is no step", agent(*"xxy", caught=1), Status.DONE, 1.0, **FIRST, **limited(max_steps=2)),
    failed("it swallows a failure", agent("x", "y", caught=1), *NO_MEMORY, **SECOND),
    Row("it gets over one", agent("x", "y", caught=1, returns=Recovered(0.5)), Status.DONE, 0.5, **SECOND),
    failed("it swallows a refusal", agent("x", "bad", caught=1, returns=0.0), *REFUSED, template=CHOOSY),
    Row("it gets over one, too", agent("x", "bad", caught=1, returns=OVER_IT), Status.DONE, 0.5, template=CHOOSY),
    Row("it sends what nobody takes", agent("x", "", caught=1, returns=0.0), Status.DONE, 0.0, warning=MALFORMED),
    failed("no number, recovered", agent("x", returns=Recovered(None)), Cause.AGENT, "the agent returned None"),  # type: ignore[arg-type]
    failed("it knows better than the engine", agent("x", caught=1, returns=VERIFIER), *NO_TESTS, **FIRST),
    failed("it raises", agent("x", returns=Boom("bang \ud800")), Cause.AGENT, "the agent raised Boom: bang \\ud800"),
    failed("it exits", agent("x", returns=SystemExit(3)), Cause.AGENT, "the agent tried to exit the process (3)"),
    failed("it knows better", agent("x", returns=VERIFIER), *NO_TESTS),
    failed("no number", agent("x", returns=None), Cause.AGENT, "the agent returned None"),
    failed("not a number", agent("x", returns=float("nan")), Cause.AGENT, "the agent returned nan"),
    failed("it never asks", agent(), Cause.AGENT, "without a single answer"),
    failed("it rewards other tokens", agent("x", returns=OTHER_TOKENS), Cause.AGENT, "the agent's reward: "),
    failed("it hangs", agent("x", returns=hang), Cause.TIMEOUT, "the agent took longer", **limited(agent_timeout=1.0)),
    failed("its attempt takes too long", agent("x", returns=hang), *TOO_LONG, **limited(trajectory_timeout=1.0)),
]


def play(row: Row) -> Trajectory:
    task = Task("t", HELLO, agent="a") if row.is_agent else Task("t", environment="e")
    worlds, agents = ({}, {"a": row.player}) if row.is_agent else ({"e": row.player}, {})
    tokenizer = PlainTokenizer(row.template)
    [trajectory] = asyncio.run(played(agents, row.engine(), [task], worlds, tokenizer, **dict(row.settings)))
    return trajectory


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{'agent' if row.is_agent else 'environment'}: {row.name}")
def test_what_happened_decides_what_the_trajectory_says(row: Row) -> None:
    trajectory = play(row)
    failure = trajectory.failure
    assert (trajectory.status, trajectory.reward) == (row.status, row.reward), failure
    assert (None if failure is None else failure.cause) == row.cause
    assert failure is None or row.message in failure.message
    assert trajectory.warning.startswith(row.warning) and bool(trajectory.warning) == bool(row.warning)
    if row.is_agent:
        assert trajectory.metrics.get("bad_requests", 0) == ("malformed" in row.warning)
