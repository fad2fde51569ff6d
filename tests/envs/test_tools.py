"""Tools of environments are plain functions: described, called, answered, and told what was wrong."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

import treadle
from tests.runs import check_finished
from tests.worlds import CHATML, END, PLAIN, ROOT, PlainTokenizer, Quiet, plain_ids, plain_renderer, user
from treadle.core.draws import Stream
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.types import Message, Task, ToolCall, Trajectory
from treadle.envs.base import Environment, EnvStep, Reply
from treadle.envs.tools import ToolEnvironment
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import hermes
from treadle.rollout.attempt import Rollouts, user_code
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentDriver, IsolatedEnvironment
from treadle.rollout.session import Address
from treadle.testing import FakeEngine


def double(x: int, unit: Literal["cm", "m"] = "m") -> str:
    """Double a length.

    x: the length
    unit: of the length
    """
    return f"{2 * x} {unit}"


class Shop(ToolEnvironment):
    """Three tools: a method, one that ends the episode, and a function."""

    def price(self, item: str) -> float:
        """Look up what an item costs."""
        return float(self.task.extras["prices"][item])

    def pay(self, amount: Annotated[float, Field(description="in euros")]) -> EnvStep:
        """Pay the bill."""
        return EnvStep(reward=float(amount == self.task.ground_truth), done=True)

    tools = (price, pay, double)

    def answered(self, text: str) -> float:
        return -1.0


TASK = Task("t", (user("Buy tea."),), environment="world", extras={"prices": {"tea": 2.5}}, ground_truth=2.5)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(world: Any, *replies: str, template: str = CHATML, task: Task = TASK) -> Trajectory:
    """An attempt in which the model says this."""
    said = iter(replies)
    engine = FakeEngine(lambda prompt, sampling: [*plain_ids(next(said)), END])
    config = RolloutConfig(max_completion_tokens=500, max_input_tokens=9000, environment_timeout=300.0)
    renderer = plain_renderer() if template is CHATML else ChatRenderer(PlainTokenizer(template), [END])
    rollouts = Rollouts(
        engine, renderer, {("environment", "world"): EnvironmentDriver({"world": world}, config, hermes)}, config
    )

    async def play() -> Trajectory:
        [playing] = rollouts.start("g0", task, [Address(0, Stream.TRAIN, 0, 0, 0)])
        return await playing

    return asyncio.run(play())


def prompt(trajectory: Trajectory, step: int) -> str:
    return str(PLAIN.decode(trajectory.steps[step].prompt_ids))


def test_an_episode_with_tools() -> None:
    trajectory = played(Shop, call("price", item="tea") + call("double", x=2), call("pay", amount=2.5))
    assert (trajectory.reward, len(trajectory.steps), trajectory.failure) == (1.0, 2, None)
    assert '"name": "price"' in prompt(trajectory, 0)  # the model is told of them
    assert "<|im_start|>tool\n2.5<|im_end|>\n<|im_start|>tool\n4 m<|im_end|>" in prompt(trajectory, 1)
    assert trajectory.steps[1].break_cause is None
    assert dict(trajectory.metrics) == {"tool_calls": 3.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call("prices", item="tea"), "error: there is no tool 'prices'; there are price, pay, double"),
        (call("price"), "error: item: Field required"),
        (call("price", item="tea", much=1), "error: much: Extra inputs are not permitted"),
        (call("double", x="long"), "error: x: Input should be a valid integer"),
        (call("price", item="gold"), "error: KeyError: 'gold'"),
    ],
)
def test_what_is_wrong_is_told_to_the_model(made: str, told: str) -> None:
    trajectory = played(Shop, made, "I give up.")
    assert trajectory.reward == -1.0 and told in prompt(trajectory, 1)
    assert trajectory.metrics["tool_errors"] == 1.0


def test_too_many_calls_and_long_answers_are_cut() -> None:
    class Few(Shop):
        max_calls = 2
        max_answer = 3

    trajectory = played(Few, call("double", x=500) * 3, "enough")
    assert prompt(trajectory, 1).count("100... (3 more characters are left out)") == 2
    assert "err... (" in prompt(trajectory, 1)


@pytest.mark.parametrize("graded", [None, "1", float("nan")])
def test_a_grade_that_is_none_is_said_of_answered(graded: Any) -> None:
    class Wrong(Shop):
        def answered(self, text: str) -> Any:
            return graded

    failure = played(Wrong, "2.5").failure
    assert failure is not None and "`answered` gave" in failure.message


def test_a_tool_that_gives_an_object_fails_the_attempt() -> None:
    class Opaque(ToolEnvironment):
        def look(self) -> object:
            """Look."""
            return object()

        tools = (look,)

    failure = played(Opaque, call("look")).failure
    assert failure is not None and "a tool gave a object; return text" in failure.message


def test_a_forgotten_comma_is_said() -> None:
    with pytest.raises(ConfigError, match=r"tools of One is one function; write tools = \(double,\)"):

        class One(ToolEnvironment):
            tools = double  # type: ignore[assignment]


def test_what_ends_the_attempt_is_not_told() -> None:
    class Lost(ToolEnvironment):
        def look(self) -> None:
            """Look."""
            raise TrajectoryFailure(Cause.INFRASTRUCTURE, "no light")

        tools = (look,)

    trajectory = played(Lost, call("look"))
    assert trajectory.failure is not None
    assert (trajectory.failure.cause, trajectory.failure.message) == (Cause.INFRASTRUCTURE, "no light")


def test_one_tool_cannot_reject_the_turn() -> None:
    class Rash(ToolEnvironment):
        def look(self) -> EnvStep:
            """Look."""
            return EnvStep(rejected=True)

        tools = (look,)

    failure = played(Rash, call("look")).failure
    assert failure is not None and failure.message.startswith("tool 'look' gave history or rejected")


def test_plain_tools_share_the_attempts_thread_and_async_ones_the_loop() -> None:
    threads: list[str] = []

    class Plain(ToolEnvironment):
        def reset(self, task: Task) -> Any:
            threads.append(threading.current_thread().name)
            return task.prompt

        def look(self) -> str:
            """Look."""
            threads.append(threading.current_thread().name)
            return "a"

        tools = (look,)

    class Async(Plain):
        async def think(self) -> str:
            """Think."""
            await asyncio.sleep(0)
            threads.append(threading.current_thread().name)
            return "b"

        tools = (Plain.look, think)  # type: ignore[assignment]

    assert played(Plain, call("look"), "done").metrics["tool_errors"] == 0
    assert len(set(threads)) == 1 and threads[0] != "MainThread"
    threads.clear()
    trajectory = played(Async, call("think") + call("look"), "done")
    assert threads[1] == "MainThread" and threads[2] != "MainThread"
    assert "tool\nb<|im_end|>\n<|im_start|>tool\na<|im_end|>" in prompt(trajectory, 1)


def test_schemas_come_from_signatures_and_docstrings() -> None:
    price, pay, doubled = (schema["function"] for schema in Shop().tool_schemas)
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    described = {"parameters": {**parameters, "additionalProperties": False}}
    assert price == {"name": "price", "description": "Look up what an item costs.", **described}
    assert pay["parameters"]["properties"]["amount"] == {"type": "number", "description": "in euros"}
    assert doubled["parameters"]["properties"] == {
        "x": {"type": "integer", "description": "the length"},
        "unit": {"type": "string", "enum": ["cm", "m"], "default": "m", "description": "of the length"},
    }


def untyped(x) -> None:  # type: ignore[no-untyped-def]
    """Do."""


def several(*x: int) -> None:
    """Do."""


def unknown(x: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821
    """Do."""


def counting(x: int) -> Iterator[int]:
    """Do."""
    yield from range(x)


def strange(x: threading.Thread) -> None:
    """Do."""


def fails(tools: Sequence[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = type("World", (ToolEnvironment,), {"tools": tools})().tool_schemas


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (untyped, "tool 'untyped': parameter 'x' has no type; write 'x: str'"),
        (several, "tool 'several': parameter 'x' has no name that a model could give"),
        (strange, "tool 'strange' cannot be described in JSON"),
        (unknown, "tool 'unknown': its signature cannot be read: name 'Nowhere' is not defined"),
        (counting, "tool 'counting' is a generator; return a list"),
        (partial(double, 3), r"tool functools.partial.* has no name; define it by 'def'"),
        (lambda: 3, "has no name; define it by 'def'"),
        ("double", "tool 'double' has no name"),
    ],
)
def test_tools_that_cannot_be_described_are_refused(tool: Any, said: str) -> None:
    fails([tool], said)
    fails([double, double], "2 tools have the name 'double'")


def answer(tool: Any, **arguments: Any) -> EnvStep:
    """What a call of a tool is answered."""

    made = type("World", (ToolEnvironment,), {"tools": [tool]})()
    function = {"name": made.tool_schemas[0]["function"]["name"], "arguments": json.dumps(arguments)}
    step: Any = made.step(Reply("", tool_calls=(ToolCall(id="c", type="function", function=function),)))  # type: ignore[typeddict-item]
    assert isinstance(step, EnvStep)
    return step


def text(step: EnvStep) -> str:
    [message] = step.observations
    return str(message["content"])


def named(json: str, copy: int = 2, _hidden: int = 3, model_fields: str = "m", model_config: str = "c") -> str:
    """Take what pydantic's models have names for."""
    return f"{json} {copy} {_hidden} {model_fields} {model_config}"


def test_parameters_may_have_any_name() -> None:
    assert text(answer(named, json="j")) == "j 2 3 m c"
    assert text(answer(named, json="j", _hidden=7, model_config="d")) == "j 2 7 m d"
    assert text(answer(named, json="j", p0="k")) == "error: p0: Extra inputs are not permitted"


@dataclass
class Point:
    x: int


class Book(BaseModel):
    title: str


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Book(title="é"), '{"title": "é"}'),
        ([Point(1), Book(title="a")], '[{"x": 1}, {"title": "a"}]'),
        ({"at": date(2020, 1, 2)}, '{"at": "2020-01-02"}'),
        ((n for n in range(2)), "[0, 1]"),
        (np.int64(3), "3"),
        ({"three", "one", "two"}, '["one", "three", "two"]'),
        ({"a": np.arange(2)}, '{"a": [0, 1]}'),
        (1j, '"1j"'),
        ("\udc80", "\\udc80"),
    ],
)
def test_what_a_tool_returns_is_told_as_json(value: Any, said: str) -> None:
    def look() -> Any:
        """Look."""
        return value

    assert text(answer(look)) == said


def test_a_subclass_may_override_a_tool() -> None:
    class Dearer(Shop):
        def price(self, item: str, pieces: int = 1) -> float:
            """Look up what some cost."""
            return 2 * pieces * super().price(item)

    class Async(Shop):
        async def price(self, item: str) -> float:  # type: ignore[override]
            """Look up, slowly."""
            return 7.0

    assert "5.0<" in prompt(played(Dearer, call("price", item="tea"), "so"), 1)
    assert Dearer().tool_schemas[0]["function"]["description"] == "Look up what some cost."
    assert "7.0<" in prompt(played(Async, call("price", item="tea"), "so"), 1)


def test_info_and_state_of_tools_are_kept() -> None:
    def turn(pages: int) -> EnvStep:
        """Turn pages."""
        return EnvStep(info={"pages": pages, "kind": "a"}, state=f"at {pages}")

    class World(ToolEnvironment):
        metrics = (treadle.Metric("pages", "trajectory", "mean", "pages", "pages turned"),)
        tools = (turn,)

    step = answer(turn, pages=2)
    assert (step.info, step.state) == ({"pages": 2, "kind": "a", "tool_calls": 1, "tool_errors": 0}, "at 2")
    trajectory = played(World, call("turn", pages=2) + call("turn", pages=3), "so")
    assert trajectory.metrics["pages"] == 5 and trajectory.steps[1].state_key


def test_a_plain_tool_that_gives_a_coroutine_fails_the_attempt() -> None:
    async def slowly() -> str:
        return "a"

    def look() -> Any:
        """Look."""
        return slowly()

    with pytest.raises(TypeError, match="tool 'look' gave a coroutine; define it by 'async def'"):
        answer(look)


def test_any_environment_may_take_the_parsed_reply() -> None:
    class Reading(treadle.Environment):
        tool_schemas: Sequence[Any] = Shop().tool_schemas

        def step(self, reply: Reply) -> EnvStep:  # type: ignore[override]
            [made] = reply.tool_calls
            read = reply.text, reply.thoughts, made["function"]["name"]
            return EnvStep(reward=float(read == ("so", "hm", "price")), done=True)

    assert played(Reading, "<think>hm</think>so" + call("price", item="tea")).reward == 1.0


def test_it_trains_in_a_few_lines_and_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    tasks = [Task(f"t{n}", (user(f"Buy {n}."),), extras={"prices": {}}, ground_truth=1.0) for n in range(2)]
    template = tmp_path / "tools.jinja"
    template.write_text(CHATML)
    settings = {
        "model.chat_template": str(template),
        "training.tasks_per_update": 2,
        "training.group_size": 2,
        "orchestration.updates": 1,
        "rollout.max_completion_tokens": 4,
        "rollout.max_input_tokens": 3000,
    }
    build = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    model = {"build": build, "tokenizer": "demo"}
    run = tmp_path / "run"
    treadle.train(Shop, tasks, model=model, run=run, settings=settings, progress=Quiet())
    check_finished(run)
    template.write_text(CHATML.replace("{% if tools %}", "{% if false %}"))
    with pytest.raises(
        ConfigError, match=r"environment 'Shop' has tools, but .* does not write tools.*describe them in"
    ):
        treadle.train(Shop, tasks, model=model, run=tmp_path / "other", settings=settings, progress=Quiet())


def documented(what: str) -> str:
    """Return the block of Python in docs/environments.md that has this text."""
    blocks = (ROOT / "docs" / "environments.md").read_text().split("```python\n")[1:]
    [block] = [block.split("```")[0] for block in blocks if what in block.split("```")[0]]
    return block


def test_the_shaping_of_the_documentation_pays_each_milestone_once() -> None:
    found: dict[str, Any] = {"__name__": "my_shop"}
    exec(documented("# my_shop.py"), found)
    task = Task("t", (user("?"),), "world", "8", {"item": "tea", "stock": {"tea": 4, "milk": 1}})
    looking = [call("stock", item=item) for item in ("milk", "tea", "tea", "tea")]
    attempt = played(found["Orders"], *looking, call("order", item="tea", number=8), task=task)
    assert [step.given.components for step in attempt.steps] == [
        *({"looked": paid} for paid in (0.0, 0.2, 0.0, 0.0)),
        {"answer": 1.0},
    ]


def test_the_example_of_the_documentation_plays() -> None:
    code, _, training = documented("class Shop(").partition("treadle.train(")
    assert len(list(filter(str.strip, code.splitlines()))) < 15 and training.count("\n") == 1
    found: dict[str, Any] = {"__name__": "shop"}
    exec(code, found)
    first = found["tasks"][0]
    task = Task("t", (user(first["prompt"]),), "world", first["ground_truth"], first["extras"])
    assert played(found["Shop"], call("price", item="bread"), first["ground_truth"], task=task).reward == 1.0


def test_the_task_is_there_though_reset_does_not_keep_it() -> None:
    class Own(Environment):
        def reset(self, task: Task) -> Sequence[Message]:
            return [user(f"Say {self.task.ground_truth}.")]

        def step(self, text: str) -> EnvStep:
            return EnvStep(reward=float(self.task.ground_truth == "yes"), done=True)

    task = Task("t", (user("?"),), "world", "yes")
    world = IsolatedEnvironment("world", Own, user_code(task, "as a test"), RolloutConfig())

    async def played() -> tuple[list[Message], EnvStep]:
        await world.make()
        return await world.reset(task), await world.step(Message(role="assistant", content="yes"), "yes")

    messages, step = asyncio.run(played())
    assert messages == [user("Say yes.")]
    assert treadle.Reward.of(step.reward).total() == 1
