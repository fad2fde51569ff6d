"""`OneReply`: a minimal agent, for the tasks of `treadle.integrations.harbor.tasks`.

It requests one reply to the instruction and leaves it in the sandbox, as /app/reply.txt. No import of Treadle.
"""

import shlex
from pathlib import Path
from typing import Any

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class OneReply(BaseAgent):
    """Makes one call. api_base: URL of the model, as for Terminus-2."""

    def __init__(
        self, logs_dir: Path, model_name: str | None = None, *args: Any, api_base: str = "", **kwargs: Any
    ) -> None:
        super().__init__(logs_dir, model_name, *args, **kwargs)
        self._url = f"{api_base}/chat/completions"

    @staticmethod
    def name() -> str:
        """Return the agent's name in Harbor."""
        return "one-reply"

    def version(self) -> str | None:
        """Return its version."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """No-op: nothing needs to be installed."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Request the reply, and leave it in the sandbox. Raises RuntimeError for a refused call."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": instruction}]}
        async with aiohttp.ClientSession() as client, client.post(self._url, json=asked) as answer:
            if answer.status != 200:
                raise RuntimeError(f"the model's server answered {answer.status}: {(await answer.text())[:500]}")
            text = (await answer.json())["choices"][0]["message"]["content"]
        # Commands cannot contain a zero byte.
        sayable = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
        await environment.exec(f"printf %s {shlex.quote(sayable)} > /app/reply.txt")
