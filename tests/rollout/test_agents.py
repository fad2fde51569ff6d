"""Agent programs over real sockets: the same trajectories as an environment's, and every failure attributed."""

import asyncio
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import APIError, AsyncOpenAI, OpenAI

from tests.rollout.kit import TASK, ask, by_seed, once, overtime, play, played, program
from tests.until import CEILING, until, wait_until
from tests.worlds import END, HELLO, PlainTokenizer, hang, plain_ids, saying, tool, user
from treadle.core.engine import Completion
from treadle.core.errors import Cause, ConfigError, InfrastructureError, TrajectoryFailure
from treadle.core.outcomes import as_played, computed_tokens
from treadle.core.types import DropReason, Ids, Message, SamplingParams, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.agents.agent import Recovered, check_agent, load_agent
from treadle.rollout.agents.clients import anthropic_client
from treadle.testing import FakeEngine


def test_an_agent_says_that_what_it_needs_is_down() -> None:
    async def searching(task: Task, client: AsyncOpenAI) -> float:
        await ask(client, [*task.prompt])
        raise InfrastructureError("search is down")

    failure = play(searching).failure
    assert failure is not None and (failure.cause, failure.message) == (Cause.INFRASTRUCTURE, "search is down")


def ask_plainly(client: OpenAI, messages: list[Any]) -> str:
    return str(client.chat.completions.create(model="any", messages=messages).choices[0].message.content)


# The same trajectories


class Counting(Environment):
    """Answers each reply with its length, three times; the reward is the number of letters a."""

    async def reset(self, task: Task) -> list[Message]:
        self.replies: list[str] = []
        return [user("go")]

    async def step(self, text: str) -> EnvStep:
        self.replies.append(text)
        if len(self.replies) < 3:
            return EnvStep([tool(f"{len(text)}!")])
        return EnvStep(reward=float("".join(self.replies).count("a")), done=True)


async def counting(task: Task, client: AsyncOpenAI) -> float:
    messages: list[Any] = [user("go")]
    replies = []
    for _ in range(3):
        replies.append(await ask(client, messages))
        messages += [
            {"role": "assistant", "content": replies[-1]},
            {"role": "tool", "tool_call_id": "x", "content": f"{len(replies[-1])}!"},
        ]
    return float("".join(replies).count("a"))


async def counting_claude(task: Task, client: AsyncOpenAI) -> float:
    messages: list[Any] = [user("go")]
    replies = []
    async with anthropic_client(client) as claude:
        for _ in range(3):
            answer = await claude.messages.create(model="any", max_tokens=16, messages=messages)
            replies.append("".join(block.text for block in answer.content if block.type == "text"))
            messages += [{"role": "assistant", "content": replies[-1]}, user(f"{len(replies[-1])}!")]
    return float("".join(replies).count("a"))


def asking_claude_plainly(task: Task, client: OpenAI) -> float:
    with anthropic_client(client) as claude:
        [block] = claude.messages.create(model="any", max_tokens=16, messages=[user("go")]).content  # type: ignore[list-item]
    return float(block.type == "text" and block.text == "a")


async def asking_claude(task: Task, client: AsyncAnthropic) -> float:
    answer = await client.messages.create(model="any", max_tokens=16, messages=[user("go")])  # type: ignore[list-item]
    return float([block.text for block in answer.content if block.type == "text"] == ["a"])


def asking_claude_alone(task: Task, client: "Anthropic") -> float:
    [block] = client.messages.create(model="any", max_tokens=16, messages=[user("go")]).content  # type: ignore[list-item]
    return float(block.type == "text" and block.text == "a")


def test_an_agent_leaves_the_trajectory_that_an_environment_would_have() -> None:
    tasks = [Task("t", environment="e"), Task("t", agent="a")]

    async def both() -> list[list[Trajectory]]:
        return [await played({"a": counting}, FakeEngine(by_seed), [t] * 4, {"e": Counting}) for t in tasks]

    for expected, got in zip(*asyncio.run(both()), strict=True):
        assert (got.status, got.reward, got.failure) == (Status.DONE, expected.reward, None)
        assert len(got.steps) == len(expected.steps) == 3
        for mine, theirs in zip(got.steps, expected.steps, strict=True):
            assert mine.prompt_ids.tolist() == theirs.prompt_ids.tolist()
            assert mine.completion_ids.tolist() == theirs.completion_ids.tolist()
            assert (mine.sampling, mine.reward, mine.dropped) == (theirs.sampling, theirs.reward, None)


@pytest.mark.xdist_group("anthropic")
def test_anthropics_clients_reach_the_same_session() -> None:
    assert [play(agent).reward for agent in (asking_claude_plainly, asking_claude, asking_claude_alone)] == [1.0] * 3
    claude, other = play(counting_claude, FakeEngine(by_seed)), play(counting, FakeEngine(by_seed))
    assert claude.status is Status.DONE and len(claude.steps) == 3
    assert claude.steps[0].completion_ids.tolist() == other.steps[0].completion_ids.tolist()
    for before, after in zip(claude.steps, claude.steps[1:], strict=False):
        assert after.prompt_ids[: len(before.full_ids)].tolist() == before.full_ids.tolist()


def test_an_agent_that_asks_elsewhere_is_told_of_its_client() -> None:
    async def elsewhere(task: Task, client: AsyncOpenAI) -> float:
        async with AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="x", max_retries=0) as mine:
            return await once(task, mine)

    async def late(task: Task, client: AsyncOpenAI) -> float:
        await once(task, client)
        return await elsewhere(task, client)

    failures = [play(agent).failure for agent in (elsewhere, late)]
    assert failures[0] and "Connection error; the agent did not use the client passed to it" in failures[0].message
    assert failures[1] and failures[1].message.endswith("Connection error.")


def test_sub_agents_are_forks_of_the_trajectory() -> None:
    async def fanned(task: Task, client: AsyncOpenAI) -> float:
        first = await ask(client, [user("plan")])
        shared = [user("plan"), {"role": "assistant", "content": first}]
        parts = await asyncio.gather(*(ask(client, [*shared, user(f"part {n}")]) for n in range(4)))
        await ask(client, [*shared, user(" ".join(parts))])
        return 1.0

    trajectory = play(fanned, FakeEngine(by_seed))
    assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.DONE, 1.0, 6)
    first, *others = (step.full_ids.tolist() for step in trajectory.steps)
    assert all(ids[: len(first)] == first for ids in others)
    assert len({step.sampling.seed for step in trajectory.steps}) == 6
    assert all(step.dropped is None for step in trajectory.steps)


def test_many_attempts_side_by_side_may_open_their_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, limits[1]))
    try:
        trajectories = asyncio.run(
            played({"a": once}, saying("a"), [Task(str(n), HELLO, agent="a") for n in range(80)])
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 80


# Limits


def test_a_call_that_is_answered_later_hides_no_refusal() -> None:
    """Two calls side by side, of which one is too many: it is refused while the other is sampled."""
    refused = asyncio.Event()

    async def pair(task: Task, client: AsyncOpenAI) -> float:
        first = asyncio.ensure_future(ask(client, [user("a")]))
        await until(lambda: bool(engine.calls))
        try:
            await ask(client, [user("b")])
        finally:
            refused.set()
            await first
        return 1.0

    class Waiting(FakeEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            completion = await super().generate(*arguments, **options)
            await refused.wait()
            return completion

    engine = Waiting(saying("a").reply)
    trajectory = play(pair, engine, max_steps=1)
    assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.MAX_STEPS, 0.0, 1)
    assert trajectory.warning.startswith("the agent raised BadRequestError")


# Failures


class Boom(Exception):
    pass


def returning_plainly(value: Any) -> Any:
    def agent(task: Task, client: OpenAI) -> Any:
        ask_plainly(client, [*task.prompt])
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    return agent


def endless_plainly(task: Task, client: OpenAI) -> float:
    while True:
        ask_plainly(client, [*task.prompt])


def test_a_plain_agent_ends_as_an_async_one_does() -> None:
    over, threads = threading.Event(), threading.active_count()
    try:
        ends = [
            (returning_plainly(Boom("bang")), Cause.AGENT, "the agent raised Boom: bang"),
            (returning_plainly(SystemExit(3)), Cause.AGENT, "the agent tried to exit the process (3)"),
            (returning_plainly(None), Cause.AGENT, "the agent returned None"),
            (returning_plainly(TrajectoryFailure(Cause.VERIFIER, "no tests")), Cause.VERIFIER, "no tests"),
            (returning_plainly(over.wait), Cause.TIMEOUT, "the agent took longer than 1000 s"),
        ]
        tasks = [Task("t", HELLO, agent=str(n)) for n in range(len(ends))]
        agents = {str(n): agent for n, (agent, _, _) in enumerate(ends)}
        engine = saying("a")
        found = overtime(
            played(agents, engine, tasks), lambda: len(engine.calls) == len(tasks) and len(engine.open) == 1
        )
        for trajectory, (_, cause, message) in zip(found, ends, strict=True):
            assert trajectory.failure is not None and len(trajectory.steps) == 1
            assert (trajectory.failure.cause, message in trajectory.failure.message) == (cause, True)
    finally:
        over.set()
    limited = play(endless_plainly, max_steps=3)
    assert (limited.status, limited.reward, len(limited.steps)) == (Status.MAX_STEPS, 0.0, 3)
    bounded = play(endless_plainly, max_steps=9, max_total_tokens=computed_tokens(limited.steps))
    assert (bounded.status, bounded.reward, len(bounded.steps)) == (Status.MAX_STEPS, 0.0, 3)
    wait_until(lambda: threading.active_count() <= threads)


def test_a_timed_out_agent_may_clean_up_and_leaves_no_task() -> None:
    begun, cleaned = [], []

    async def slow(task: Task, client: AsyncOpenAI) -> None:
        begun.append(task.task_id)
        try:
            await hang()
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(task.task_id)

    async def attempts() -> list[Trajectory]:
        trajectories = await played({"a": slow}, saying("a"), [TASK])
        assert len(asyncio.all_tasks()) == 2  # this one, and who waits for it
        return trajectories

    overtime(attempts(), lambda: bool(begun))
    assert cleaned == ["t"]


class Stuck(FakeEngine):
    """Never answers one of its calls."""

    def __init__(self, reply: Callable[[Ids, SamplingParams], list[int]], stuck: int) -> None:
        super().__init__(reply)
        self.stuck = stuck

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, **where: Any) -> Completion:
        completion = await super().generate(prompt_ids, sampling, **where)
        if len(self.calls) == self.stuck:
            await hang()
        return completion

    async def asked(self, client: AsyncOpenAI) -> asyncio.Task[str]:
        """A call that hangs, once it has reached the engine."""
        call = asyncio.create_task(ask(client.with_options(max_retries=0), [user("slow")]))
        await until(lambda: len(self.calls) >= self.stuck)
        return call


@pytest.mark.parametrize(("stuck", "cancelled"), [(1, True), (1, False), (2, False)])
@pytest.mark.parametrize("recovered", [True, False])
def test_a_call_that_the_agent_does_not_wait_for_is_recorded_and_never_trained(
    stuck: int, cancelled: bool, recovered: bool
) -> None:
    """The agent says that it does without the answer, or has no reward, which stands on the last step that counts."""
    engine = Stuck(lambda prompt, sampling: [*plain_ids("a"), END], stuck)
    left: list[asyncio.Task[str]] = []

    async def impatient(task: Task, client: AsyncOpenAI) -> float | Recovered:
        if stuck == 2:
            await ask(client, [user("first")])
        left.append(await engine.asked(client))
        if cancelled:
            left[0].cancel()
        reward = 1.0 if stuck == 2 else float(await ask(client, [user("fast")]) == "a")
        return Recovered(reward) if recovered else reward

    async def go() -> Trajectory:
        [trajectory] = await played({"a": impatient}, engine, [TASK])
        with pytest.raises(asyncio.CancelledError if cancelled else APIError):
            await left[0]
        return trajectory

    trajectory = asyncio.run(go())
    if not recovered:
        assert trajectory.reward is None and trajectory.failure and trajectory.failure.cause is Cause.INFRASTRUCTURE
        assert "its client gave it up after" in trajectory.failure.message
        return
    assert (trajectory.status, trajectory.reward, trajectory.failure) == (Status.DONE, 1.0, None)
    steps = [(DropReason.CANCELLED, 0.0), (None, 1.0)]
    assert [(step.dropped, step.reward) for step in trajectory.steps] == (steps if stuck == 1 else steps[::-1])
    assert len(as_played(trajectory).steps) == 1


class HeldBack(FakeEngine):
    """Says "a"; does not answer what is slow, or only once `gate` is set if it is asked again."""

    def __init__(self) -> None:
        super().__init__(saying("a").reply)
        self.gate = asyncio.Event()

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, **where: Any) -> Completion:
        text = PlainTokenizer().decode(prompt_ids)
        if "slow" in text:
            await (self.gate.wait() if "again" in text else hang())
        return await super().generate(prompt_ids, sampling, **where)


AFTERWARDS = {
    # what an agent does when its call has timed out -> its reward
    "gives up": None,
    "raises": None,
    "asks something else": None,
    "asks again": 1.0,
    "recovers": 0.5,
}


async def ask_openai(client: AsyncOpenAI, text: str, patience: float) -> None:
    timeout = openai.Timeout(CEILING, read=patience)
    await ask(client.with_options(timeout=timeout, max_retries=0), [user(text)])


async def ask_anthropic(client: AsyncOpenAI, text: str, patience: float) -> None:
    async with anthropic_client(client) as claude:
        patient = claude.with_options(timeout=anthropic.Timeout(CEILING, read=patience), max_retries=0)
        await patient.messages.create(model="any", max_tokens=16, messages=[user(text)])  # type: ignore[list-item]


async def ask_for_a_stream(client: AsyncOpenAI, text: str, patience: float) -> None:
    timeout, body = httpx.Timeout(CEILING, read=patience), {"messages": [user(text)], "stream": True}
    async with (
        httpx.AsyncClient(base_url=str(client.base_url), timeout=timeout) as http,
        http.stream("POST", "chat/completions", json=body) as answer,
    ):
        await answer.aread()


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("call", [ask_openai, ask_anthropic, ask_for_a_stream])
def test_a_slow_engine_is_no_reward_of_0(call: Callable[[AsyncOpenAI, str, float], Any]) -> None:
    engine = HeldBack()

    def agent(afterwards: str) -> Any:
        async def play(task: Task, client: AsyncOpenAI) -> float | Recovered:
            slow = f"slow {afterwards}"
            await call(client, "first", CEILING)
            try:
                await call(client, slow, 0.1)
                raise AssertionError("answered")
            except (openai.APITimeoutError, anthropic.APITimeoutError, httpx.ReadTimeout):
                if afterwards == "asks again":
                    engine.gate.set()
                if afterwards == "raises":
                    raise
            if afterwards != "gives up":
                await call(client, slow if afterwards == "asks again" else "other", CEILING)
            return Recovered(0.5) if afterwards == "recovers" else float(afterwards == "asks again")

        return play

    agents = {name: agent(name) for name in AFTERWARDS}
    found = asyncio.run(played(agents, engine, [Task("t", HELLO, agent=name) for name in agents]))
    assert {name: t.reward for name, t in zip(AFTERWARDS, found, strict=True)} == AFTERWARDS
    failures = [t.failure for t in found if t.failure]
    for failure in failures:
        assert failure.cause is Cause.INFRASTRUCTURE
        assert "a call was not answered: its client gave it up after" in failure.message
    assert "; raise its time limit, or an agent that continues" in failures[0].message
    assert failures[1].message.startswith("the agent raised ") and "Timeout" in failures[1].message


# Commands


def test_a_program_plays_an_attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "real")
    agent = program(
        """
        print("some talk")
        names = ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "NO_PROXY", "MINE")
        told = {name: os.environ.get(name) for name in names}
        json.dump([task, told, os.getcwd()], open("told.json", "w"))
        print(json.dumps({"reward": float(said == task["ground_truth"])}))
        print()
        """,
        environment={"MINE": "1"},
        directory=tmp_path,
        inherit=["NO_PROXY", "*_proxy", "ANTHROPIC_*"],
    )
    task = Task("t", (user("hello"),), "", "a", {"n": [1, None]}, agent="a")
    trajectory = play(agent, task=task)
    assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.DONE, 1.0, 1), trajectory.failure
    told, variables, where = json.loads((tmp_path / "told.json").read_text())
    assert told == {"task_id": "t", "prompt": [user("hello")], "ground_truth": "a", "extras": {"n": [1, None]}}
    assert (variables["MINE"], variables["ANTHROPIC_AUTH_TOKEN"]) == ("1", None)
    assert variables["NO_PROXY"] == "example.org,127.0.0.1"
    assert not variables["ANTHROPIC_BASE_URL"].endswith("/v1")
    assert Path(where) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("print('no such luck', file=sys.stderr)\nsys.exit(3)", "exited with status 3: no such luck"),
        ("os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print(0.5)", """the last line of its output must be its reward, as in {"reward": 0.5}; it is '0.5'"""),
        ("", "it is ''"),
        ('print(\'{"reward": "1"}\')', "the agent returned '1'"),
        ("print('{\"reward\": NaN}')", "the agent returned nan"),
        ("print('x' * 10**7)", "it is 'xxx"),
    ],
)
def test_a_program_that_fails(rest: str, message: str) -> None:
    trajectory = play(program(rest))
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.AGENT
    assert message in trajectory.failure.message
    assert len(trajectory.failure.message) < 1000 and len(trajectory.steps) == 1


# What is refused before anything runs


async def too_many(task: Task, client: AsyncOpenAI, tools: Any) -> float:
    return 0.0


async def no_client(task: Task) -> float:
    return 0.0


def waits_for_nothing(task: Task, client: AsyncOpenAI) -> float:
    return 0.0


async def cannot_wait(task: Task, client: OpenAI) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (too_many, r"is called as agent\(task, client\), but: missing a required argument: 'tools'"),
        (no_client, r"is called as agent\(task, client\), but: too many positional arguments"),
        (waits_for_nothing, "plain def, which is given a client of class OpenAI, .* annotated as AsyncOpenAI"),
        (cannot_wait, "an async def, which is given a client of class AsyncOpenAI, .* or write a plain def"),
        (Counting, r"it must be a function: agent\(task, client\)"),
        (3, "is of type int"),
    ],
)
def test_what_is_no_agent_is_refused(found: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_agent(found, "mine:it")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_a_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="No module named 'no_such_package'; install the package with 'no_such"):
        load_agent("needs_a_package:solve")
    monkeypatch.setattr("treadle.rollout.agents.agent._PACKAGES", ("openai", "no_such_package"))
    with pytest.raises(ConfigError, match=r"needs no_such_package; pip install 'treadle\[train\]'"):
        check_agent(once, "mine:it")
