"""Agents with strict tools and structured output, written with real clients, are trained on what was sampled."""

from pathlib import Path
from typing import Any, Literal

import anthropic
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict

import treadle
from tests.runs import MODEL, check_finished, recorded
from tests.worlds import CHATML, Quiet, user
from treadle.core.types import Task
from treadle.record.rollout_store import read_traces
from treadle.record.run_directory import RunDirectory
from treadle.rendering.replies import FORMATS, Parser

pytestmark = [pytest.mark.xdist_group("anthropic"), pytest.mark.slow]

CALLS = Parser("calls", calls=FORMATS["hermes"])  # without thoughts, which random weights do not end
HELLO: Any = [user("hi")]


class Look(BaseModel):
    """Look somebody up."""

    model_config = ConfigDict(extra="forbid")
    who: Literal["Anna", "Bert"]
    page: Literal[1, 2, 3]


def score(found: Look) -> float:
    return float(found.who == "Anna") + found.page / 10


async def with_openai(task: Task, client: openai.AsyncOpenAI) -> float:
    tool: Any = openai.pydantic_function_tool(Look)
    called = await client.chat.completions.parse(
        model="m", messages=HELLO, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    arguments: Any = (called.choices[0].message.tool_calls or [])[0].function.parsed_arguments
    said = await client.responses.parse(model="m", input="hi", text_format=Look)
    assert said.output_parsed is not None
    return score(arguments) + score(said.output_parsed)


async def with_anthropic(task: Task, client: anthropic.AsyncAnthropic) -> float:
    tool: Any = {"name": "look", "strict": True, "input_schema": anthropic.transform_schema(Look)}
    asked: Any = {"model": "m", "max_tokens": 99, "messages": HELLO}
    called = await client.messages.create(
        **asked, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    said: Any = await client.messages.parse(**asked, output_format=Look)
    return score(Look.model_validate(called.content[0].input)) + score(said.parsed_output)


async def with_pydantic_ai(task: Task, client: openai.AsyncOpenAI) -> float:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model, total = OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client)), 0.0
    for output in (ToolOutput(Look, strict=True), NativeOutput(Look)):
        agent: Any = Agent(model, output_type=output, retries=0)
        total += score((await agent.run("hi")).output)
    return total


async def with_langchain(task: Task, client: openai.AsyncOpenAI) -> float:
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model="gpt-4o", root_async_client=client, async_client=client.chat.completions, api_key="unused"
    )
    called = await model.bind_tools([Look], tool_choice="any", strict=True).ainvoke("hi")
    said = await model.with_structured_output(Look, method="json_schema").ainvoke("hi")
    return score(Look.model_validate(called.tool_calls[0]["args"])) + score(said)


AGENTS = [with_openai, with_anthropic, with_pydantic_ai, with_langchain]
SETTINGS: dict[str, Any] = {
    "training.tasks_per_update": 2,
    "training.group_size": 3,
    "training.threads": 1,
    "rollout.max_input_tokens": 400,
    "rollout.max_completion_tokens": 400,
    "rollout.reply_parser": "tests.api.test_structured_agents:CALLS",
    "algorithm.policy_loss": "importance_sampling",
    "orchestration.updates": 1,
    "orchestration.traced_groups": 1.0,
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_update_trains_what_was_sampled(agent: Any, tmp_path: Path) -> None:
    template, run, said = tmp_path / "own.jinja", tmp_path / "run", Quiet()
    template.write_text(CHATML)
    model = {**MODEL, "chat_template": str(template)}
    model["build"] = {**model["build"], "max_position_embeddings": 1024}
    tasks = [Task(f"t{i}", HELLO) for i in range(2)]
    treadle.train(agent, tasks, model=model, run=run, settings=SETTINGS, progress=said)
    check_finished(run)
    steps = {(name, number): step for name, played in recorded(run) for number, step in enumerate(played)}
    assert len(steps) == 12 and all(step.sampling.grammar for step in steps.values())
    traces = [t for f in RunDirectory.open(run).ledger().traces().values() for t in read_traces(run / "traces", f)]
    assert len(traces) >= 6  # the others have no advantage
    for trace in traces:
        np.testing.assert_allclose(trace.logprobs, steps[trace.trajectory_id, trace.step].logprobs, atol=1e-4)
        assert trace.ratio is not None
        np.testing.assert_allclose(trace.ratio, 1, atol=1e-4)
        forced = trace.logprobs == 0
        assert forced.sum() > 5 and (trace.entropy[forced] == 0).all() and not forced.all()
    assert 0.3 < said.rows[-1]["forced_share"] < 1
