"""`Command`: an agent that is any program. It reads its task from standard input and reaches the model by environment
variables.

    solve = Command([sys.executable, "my_agent.py"])          # in my_agents.py; in the recipe: agent: my_agents:solve

Standard input: the task as one line of JSON (task_id, prompt, ground_truth, extras). Environment: that of the run, with
OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY leading to the attempt's own session. Standard
output: whatever it likes, and as its last line the reward, as JSON: {"reward": 0.5}.

The program is no prisoner: it runs with the rights of the run, on its files and network. Put a container or another
sandbox into the command where the model's words are executed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.types import Task
from treadle.rollout.clients import anthropic_base_url

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_TAIL = 4096  # bytes of an output that are looked at: its last line, and what a failure's message quotes


@dataclass(frozen=True)
class Command:
    """Plays an attempt by running a program once.

    words: the program and its arguments, run without a shell. environment: variables of its own. directory: where it
    runs (default: where the run does).

    It starts a process group of its own, and the whole group is killed when the program ends, when its time is over
    and when the run stops, so that nothing it started outlives the attempt. (A `kill -9` of the run itself leaves it
    behind, without a model.) A program that does not exist, exits with a status other than 0 or prints no reward fails
    its attempt.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float:
        """Run it; returns its reward. Raises TrajectoryFailure (agent)."""
        # Files, not pipes: a background process that keeps a pipe open cannot keep anybody waiting.
        file = tempfile.TemporaryFile
        with file() as given, file() as said, file() as complaints:
            given.write(_task_line(task))
            given.seek(0)
            status = await self._run(self._variables(client), given, said, complaints)
            if status != 0:
                last = (_tail(complaints).strip() or _tail(said).strip()).rpartition("\n")[2]
                raise TrajectoryFailure(Cause.AGENT, f"{self.words[0]} exited with status {status}: {last[-500:]}")
            return _reward(_tail(said))

    async def _run(self, variables: Mapping[str, str], given: IO[bytes], said: IO[bytes], complaints: IO[bytes]) -> int:
        process = await asyncio.create_subprocess_exec(
            *self.words,
            stdin=given,
            stdout=said,
            stderr=complaints,
            env=variables,
            cwd=self.directory,
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):  # all of the group has ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _variables(self, client: AsyncOpenAI) -> dict[str, str]:
        variables = {
            **os.environ,
            "OPENAI_BASE_URL": str(client.base_url).rstrip("/"),
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": anthropic_base_url(client),
            "ANTHROPIC_API_KEY": client.api_key,
            **self.environment,
        }
        variables.pop("ANTHROPIC_AUTH_TOKEN", None)  # the SDK would send it beside the key
        for name in ("NO_PROXY", "no_proxy"):  # a proxy must not be asked for loopback
            variables[name] = ",".join(filter(None, (variables.get(name), client.base_url.host)))
        return variables


def _task_line(task: Task) -> bytes:
    row = {
        "task_id": task.task_id,
        "prompt": list(task.prompt),
        "ground_truth": task.ground_truth,
        "extras": dict(task.extras),
    }
    return json.dumps(row).encode() + b"\n"


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read().decode(errors="replace")


def _reward(said: str) -> float:
    line = said.rstrip().rpartition("\n")[2]
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or "reward" not in row:
        raise TrajectoryFailure(
            Cause.AGENT,
            f'the last line of its output must be its reward, as in {{"reward": 0.5}}; it is {line[-200:]!r}',
        )
    return row["reward"]  # type: ignore[no-any-return]  # checked as any agent's reward
