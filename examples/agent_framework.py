"""An agent whose loop belongs to a framework: here the tool runner of Anthropic's SDK, with a function as tool.

    python examples/agent_framework.py     (needs anthropic, beside the extra `train`)

Any other framework takes its base URL and key from `client.base_url` and `client.api_key`: with the OpenAI Agents SDK
that is `OpenAIChatCompletionsModel("policy", openai_client=client)`. Half a minute on a CPU.
"""

from anthropic import beta_async_tool
from openai import AsyncOpenAI
from small import MODEL, PAGE, SETTINGS, arguments, question

import treadle
from treadle.rollout.agents.clients import anthropic_client


async def solve(task: treadle.Task, client: AsyncOpenAI) -> float:
    """Let the framework call the model and the tool until there is an answer; grade that."""

    @beta_async_tool
    async def search(name: str) -> str:
        """Look up a page.

        Args:
            name: of the page
        """
        return f"{name} {task.ground_truth}"

    async with anthropic_client(client) as claude:
        runner = claude.beta.messages.tool_runner(
            model="policy",
            max_tokens=8,
            tools=[search],
            messages=[{"role": "user", "content": task.prompt[0]["content"]}],
        )
        last = await runner.until_done()
    text = "".join(block.text for block in last.content if block.type == "text")
    return float(text == f"<answer> {task.ground_truth}</answer>")


if __name__ == "__main__":
    options = arguments(updates=20, run="agent-framework")
    parser = {"rollout.reply_parser": "treadle.recipes.agents.questions:parse_reply"}  # how the small model calls tools
    summary = treadle.train(
        solve,
        [question(PAGE, number, number % 10) for number in range(160)],
        held_out=[question(PAGE, number, number % 10) for number in range(200, 240)],
        model=MODEL,
        run=options.run,
        settings={**SETTINGS, **parser, "orchestration.updates": options.updates},
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
