"""`OneReply`: the smallest agent there is, for the tasks of `treadle.integrations.harbor.tasks`.

It asks the model for one reply to the instruction and leaves that in the sandbox, as /app/reply.txt. No import of
Treadle.
"""

import shlex
from pathlib import Path
from typing import Any

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class OneReply(BaseAgent):
    """Makes one call. api_base: of the model, as Terminus-2 has it."""

    def __init__(
        self, logs_dir: Path, model_name: str | None = None, *args: Any, api_base: str = "", **kwargs: Any
    ) -> None:
        super().__init__(logs_dir, model_name, *args, **kwargs)
        self._url = f"{api_base}/chat/completions"

    @staticmethod
    def name() -> str:
        """Return the name under which Harbor shows it."""
        return "one-reply"

    def version(self) -> str | None:
        """Return its version."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: nothing needs to be installed."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Ask, and leave the reply in the sandbox. Raises RuntimeError for a call that is refused."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": instruction}]}
        async with aiohttp.ClientSession() as client, client.post(self._url, json=asked) as answer:
            if answer.status != 200:
                raise RuntimeError(f"the model's server answered {answer.status}: {(await answer.text())[:500]}")
            text = (await answer.json())["choices"][0]["message"]["content"]
        sayable = text.replace("\0", "\N{REPLACEMENT CHARACTER}")  # no command can hold a zero byte
        await environment.exec(f"printf %s {shlex.quote(sayable)} > /app/reply.txt")
