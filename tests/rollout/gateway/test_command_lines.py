"""Claude Code and Codex, unmodified, from npm: they play a task with two tools against every family that has tools.

What they are told is scripted, in the words of the family. Skipped where npm cannot be reached; never run in CI.
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rollout.families import World, world
from tests.rollout.gateway.servers import served
from tests.until import CEILING
from tests.worlds import user
from treadle.core.files import cache_directory
from treadle.core.types import FunctionCall, Ids, Message, SamplingParams, ToolCall
from treadle.rendering.conversation import Conversation
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.testing import FakeEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("command_lines"),
    pytest.mark.skipif("CI" in os.environ, reason="npm packages are not installed in CI"),
]
PACKAGES = {"claude": "@anthropic-ai/claude-code@2.1.197", "codex": "@openai/codex@0.169.0"}
TASK = "Write one.txt and read it."
COMMANDS = "echo one > one.txt", "cat one.txt"
CALLS = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd")}


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the command lines, installed once."""
    folder = cache_directory() / "npm" / "-".join(name.rpartition("@")[2] for name in PACKAGES.values())
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    if not (folder / "installed").exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES.values()]
        done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=CEILING)
        if done.returncode:
            pytest.skip(f"npm cannot install {', '.join(PACKAGES.values())}: {done.stderr[-300:]}")
        (folder / "installed").touch()
    return folder / "node_modules" / ".bin"


def replies(family: World, program: str) -> FakeEngine:
    """An engine that calls the tool with each command, and then is done; what has no such tool it answers at once."""
    tool, key = CALLS[program]
    left = list(COMMANDS)

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        message, tools = Message(role="assistant", content="all done"), []
        if left and tool in family.renderer.decode(prompt):
            arguments = {key: left.pop(0)}
            parameters = {"type": "object", "properties": {key: {"type": "string"}}}
            tools = [{"type": "function", "function": {"name": tool, "description": "-", "parameters": parameters}}]
            function = FunctionCall(name=tool, arguments=json.dumps(arguments))
            message = Message(
                role="assistant", content="", tool_calls=[ToolCall(id="c00000000", type="function", function=function)]
            )
        ids: list[int] = Conversation(family.renderer).demonstrated([user("q"), message], tools).tolist()
        return ids

    return FakeEngine(reply)


def words(program: str, address: SessionAddress) -> list[str]:
    if program == "claude":
        return ["-p", TASK, "--dangerously-skip-permissions", "--model", "policy"]
    provider = {"name": "mine", "base_url": address.base_url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    settings = [f"model_providers.mine.{key}={json.dumps(value)}" for key, value in provider.items()]
    options = [word for setting in ('model_provider="mine"', *settings) for word in ("-c", setting)]
    return ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", "policy", *options, TASK]


@pytest.mark.parametrize("program", PACKAGES)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "glm4moe", "gptoss", "llama3_1"])
async def test_a_task_with_two_tools(name: str, program: str, programs: Path, tmp_path: Path) -> None:
    family = world(name)
    async with served(replies(family, program), family.renderer) as server:
        address = server.open(parse=family.renderer.parser("auto"), longest=10**6, max_tokens=500)
        variables = {
            **{"PATH": os.environ["PATH"], "HOME": str(tmp_path), "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1"},
            **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_BASE_URL": address.anthropic_url},
            **{"ANTHROPIC_API_KEY": address.secret, "OPENAI_API_KEY": address.secret},
        }
        process = await asyncio.create_subprocess_exec(
            *[str(programs / program), *words(program, address)],
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), CEILING)
        finally:
            if process.returncode is None:
                process.kill()
        calls = server.sessions["s"].exchanges
        assert (process.returncode, calls.bad_requests, calls.unanswered) == (0, [], []), said.decode()[-2000:]
        assert (tmp_path / "one.txt").read_text() == "one\n" and "all done" in said.decode()
        tool, _ = CALLS[program]
        steps = [step for step in server.steps() if tool in family.renderer.decode(step.prompt_ids)]
        assert len(steps) == 3 and [step.break_cause for step in steps] == [None] * 3
        assert "one" in family.renderer.decode(steps[2].prompt_ids[len(steps[1].prompt_ids) :])
