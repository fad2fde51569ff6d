"""`Command`: any program as an agent. It reads its task from stdin and finds the model by environment variables.


    solve = Command([sys.executable, "my_agent.py"])          # in my_agents.py; in the recipe: agent: my_agents:solve

Standard input: the task as one line of JSON (task_id, prompt, ground_truth, extras). Environment: the run's `INHERITED`
variables, plus OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY of the attempt's own session.
Standard output: anything, with the reward as JSON in the last line: {"reward": 0.5}; add "recovered": true if it
recovered from unanswered calls (`Recovered`).

The program is not confined: it has the run's rights to its files and network. If it executes model output, include a
container or another sandbox in the command.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.types import Task
from treadle.rollout.agents.agent import Recovered
from treadle.rollout.agents.clients import anthropic_base_url
from treadle.workers.program import Program, how_it_ended, inherited_variables

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True)
class Command:
    """Plays an attempt by running a program once.

    words: program and arguments, run without a shell. environment: additional variables. directory: working directory
    (default: the run's).
    inherit: names of further variables to pass on from the run, beside `INHERITED`; patterns such as "AWS_*".

    When the program ends or times out, or the run stops or is killed, all processes it started are killed; on systems
    other than Linux, its process group (`workers.reaper`). Only the end of its output is kept.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    inherit: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.words, str):
            raise ConfigError(f"Command: {self.words!r} is one text; give words: {shlex.split(self.words)!r}")

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | Recovered:
        """Run the program and return its reward. Raises TrajectoryFailure (agent)."""
        row = {name: getattr(task, name) for name in ("task_id", "prompt", "ground_truth", "extras")}
        # A file, so that a program that never reads it blocks nothing.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(row, default=dict).encode() + b"\n")
            stdin.seek(0)
            variables = self._variables(client)
            program = Program(self.words, variables, stdin.fileno(), self.directory)
            try:
                result = await program.result()
            finally:
                await program.stop()
        if result is None or "error" in result or result["status"]:
            raise TrajectoryFailure(Cause.AGENT, f"{self.words[0]} {how_it_ended(result)}")
        return _reward(result["stdout"])

    def _variables(self, client: AsyncOpenAI) -> dict[str, str]:
        variables = {
            **inherited_variables(self.inherit),
            "OPENAI_BASE_URL": str(client.base_url).rstrip("/"),
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": anthropic_base_url(client),
            "ANTHROPIC_API_KEY": client.api_key,
            **self.environment,
        }
        # The SDK would send it in addition to the key.
        variables.pop("ANTHROPIC_AUTH_TOKEN", None)
        for name in ("NO_PROXY", "no_proxy"):  # loopback must bypass proxies
            variables[name] = ",".join(filter(None, (variables.get(name), client.base_url.host)))
        return variables


def _reward(stdout: str) -> float | Recovered:
    line = stdout.rstrip().rpartition("\n")[2]
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or "reward" not in row:
        wanted = 'the last line of its output must be its reward, as in {"reward": 0.5}'
        raise TrajectoryFailure(Cause.AGENT, f"{wanted}; it is {line[-200:]!r}")
    reward: float = row["reward"]  # checked like any agent's reward
    return Recovered(reward) if row.get("recovered") is True else reward
