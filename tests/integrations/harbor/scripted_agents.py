"""Agents of people's own, by `module:Class`; imported by Harbor, in its own Python."""

import shlex
from pathlib import Path
from typing import Any

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from treadle_terminus import DeferredTerminus2

Message = dict[str, str]


class _Asking(BaseAgent):
    def __init__(
        self, logs_dir: Path, model_name: str | None = None, *args: Any, api_base: str = "", **kwargs: Any
    ) -> None:
        super().__init__(logs_dir, model_name, *args, **kwargs)
        self._url = f"{api_base}/chat/completions"

    @staticmethod
    def name() -> str:
        return "asking"

    def version(self) -> str | None:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def ask(self, conversation: list[Message]) -> str:
        """Add a reply to the conversation, and return it."""
        async with aiohttp.ClientSession() as client:
            asked = {"model": "policy", "messages": conversation}
            async with client.post(self._url, json=asked) as answer:
                if answer.status != 200:
                    raise ValueError(f"refused: {await answer.text()}")
                conversation.append((await answer.json())["choices"][0]["message"])
        return conversation[-1]["content"]


class Delegating(_Asking):
    """Asks a sub-agent, which has a conversation of its own, between two of its turns."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        own: list[Message] = [{"role": "user", "content": instruction}]
        part = await self.ask(own)
        below: list[Message] = [{"role": "user", "content": f"You are a sub-agent. Do this: {part}"}]
        await self.ask(below)
        below.append({"role": "user", "content": "Check it."})
        found = await self.ask(below)
        own.append({"role": "user", "content": f"The sub-agent says: {found}"})
        command = await self.ask(own)
        await environment.exec(command)


class NeverEnds(_Asking):
    """Does what is asked for at once, asks until it is refused, and raises for that."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await environment.exec("touch /app/hello.txt")
        conversation: list[Message] = [{"role": "user", "content": instruction}]
        while True:
            await self.ask(conversation)
            conversation.append({"role": "user", "content": "more"})


class Misreporting(DeferredTerminus2):
    """Records other tokens of its first call than it was answered with."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await super().run(instruction, environment, context)
        assert context.rollout_details
        context.rollout_details[0]["completion_token_ids"][0].append(7)


_PROGRAM = """
import json, os, subprocess, sys, urllib.request
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
conversation = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    asked = json.dumps({"model": "policy", "messages": conversation}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, asked, headers)) as answer:
        conversation.append(json.load(answer)["choices"][0]["message"])
    done = subprocess.run(conversation[-1]["content"], shell=True, capture_output=True, text=True)
    conversation.append({"role": "user", "content": "status " + str(done.returncode)})
"""


class Program(BaseInstalledAgent):
    """A program in the sandbox, which finds the model in its environment; it keeps no record of its own."""

    @staticmethod
    def name() -> str:
        return "program"

    def version(self) -> str | None:
        return "1"

    async def install(self, environment: BaseEnvironment) -> None:
        program = self.logs_dir / "program.py"
        program.write_text(_PROGRAM)
        await environment.upload_file(program, "/installed-agent/program.py")

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self.exec_as_agent(environment, f"python3 /installed-agent/program.py {shlex.quote(instruction)}")

    def populate_context_post_run(self, context: AgentContext) -> None: ...
