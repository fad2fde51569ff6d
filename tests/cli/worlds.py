"""Environments that misbehave, and commands run in this process and in one of their own."""

import contextlib
import fcntl
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

from tokenizers import Tokenizer

from tests.forks import ForkedProcess
from tests.runs import recorded_run
from tests.worlds import END, chatml, make_step, tiny, tool, user
from treadle.cli.main import main
from treadle.core.metrics import Metric
from treadle.core.types import BreakCause, DropReason, Message, Status, Step, StopReason, Task, Trajectory
from treadle.envs import arithmetic
from treadle.envs.arithmetic import Arithmetic
from treadle.envs.base import EnvStep

ROOT = Path(__file__).parents[2]  # where `tests.cli.worlds` can be imported

TINY = """
about: sums of two digits by a model of one layer, for tests
environment: arithmetic
data:
  train: {source: arithmetic, options: {count: 16}}
  held_out: {source: arithmetic, options: {count: 12}}
  table_by: a
model:
  tokenizer: demo
  build:
    model_type: qwen3
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    head_dim: 16
    max_position_embeddings: 128
    tie_word_embeddings: true
    initializer_range: 0.1
warm_start:
  demonstrations: arithmetic
  options: {expert: 0.5}
  steps: 90
  batch_size: 16
  learning_rate: 1e-2
rollout: {max_steps: 1, max_input_tokens: 64, max_completion_tokens: 8}
training: {packing: chain, tasks_per_update: 4, group_size: 4, threads: 1, optimizer: {learning_rate: 1e-3}}
evaluation: {every: 2}
orchestration: {updates: 4, checkpoint_every: 2}
"""


@dataclass
class Done:
    """status, and what a command printed."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        lines = [line for line in self.err.splitlines() if not line.startswith("evaluation ")]
        assert len(lines) == 1, self.err
        return lines[0]


def treadle(*words: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def start_treadle(*words: object, before: str = "") -> subprocess.Popen[str]:
    """Start a command in a process of its own; `before` is code run first."""
    code = f"import sys; {before}\nfrom treadle.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    return ForkedProcess(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate()
    return Done(process.returncode, out, err)


def files(directory: Path) -> dict[str, int]:
    """Path -> modification time of everything below, without what SQLite makes for its readers and what runs do now."""
    found = (
        p
        for p in sorted(directory.rglob("*"))
        if p.is_file() and not p.name.startswith(("ledger.sqlite-", "status.json"))
    )
    return {str(p.relative_to(directory)): p.stat().st_mtime_ns for p in found}


# Tasks and demonstrations


def tasks(split: str, count: int, environment: str = "") -> list[Task]:
    """Sums, played in one of the environments below (of this module, by class name)."""
    name = f"tests.cli.worlds:{environment}" if environment else ""
    return [replace(task, environment=name) for task in arithmetic.tasks(split, count)]


def playing(environment: str, held_out: bool = False) -> list[str]:
    """Overrides that put the tiny recipe's tasks into an environment of this module."""
    overrides = ['environment=""']
    for split in ("train", "held_out") if held_out else ("train",):
        overrides += [f"data.{split}.source=tests.cli.worlds:tasks", f"data.{split}.options.environment={environment}"]
    return overrides if held_out else [*overrides, "data.held_out=null", "data.table_by=null"]


def interrupted_demonstration(index: int, seed: int) -> Sequence[Message]:
    """Somebody presses Ctrl-C in the third step of a warm start."""
    if index == 40:
        os.kill(os.getpid(), signal.SIGINT)
    return arithmetic.demonstration(index, seed)


# Environments


class Measures(Arithmetic):
    metrics = (Metric("characters", "step", "mean", "characters", "of a reply"),)

    async def step(self, text: str) -> EnvStep:
        return (await super().step(text))._replace(info={"characters": len(text)})


class FailsInReset(Arithmetic):
    async def reset(self, task: Task) -> Sequence[Message]:
        raise ConnectionError("no backend on port 1")


class TakesTheRunDirectory(Arithmetic):
    """Another process starts a run of the same name, between this one's first check and its own start."""

    path: ClassVar[Path]
    lock: ClassVar[IO[str]]

    async def reset(self, task: Task) -> Sequence[Message]:
        self.path.mkdir(parents=True)
        for name in ("config.yaml", "lock"):
            (self.path / name).touch()
        TakesTheRunDirectory.lock = (self.path / "lock").open("a+")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        opening: Sequence[Message] = await super().reset(task)
        return opening


class FailsInStep(Arithmetic):
    async def step(self, text: str) -> EnvStep:
        raise ZeroDivisionError("a bug in step")


class FailsInClose(Arithmetic):
    async def close(self) -> None:
        raise OSError("the socket was gone")


class FailsNowAndThen(Arithmetic):
    async def step(self, text: str) -> EnvStep:
        if int(self.task.ground_truth) % 4 == 1:
            raise ZeroDivisionError(f"{self.task.ground_truth} leaves one over")
        return await super().step(text)


class WithoutStep(Arithmetic):
    step = None  # type: ignore[assignment]


class PressesCtrlC(Arithmetic):
    """Somebody presses Ctrl-C once, in the middle of the third batch (16 attempts each)."""

    played = 0

    async def step(self, text: str) -> EnvStep:
        PressesCtrlC.played += 1
        if PressesCtrlC.played == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return await super().step(text)


_TOKENIZER = Tokenizer.from_file(str(ROOT / "src" / "treadle" / "recipes" / "tokenizer" / "tokenizer.json"))
Call = tuple[list[int], list[int]]  # (prompt, completion)
Calls = list[Call]


def ids(text: str) -> list[int]:
    return [int(i) for i in _TOKENIZER.encode(text, add_special_tokens=False).ids]


def text_of(tokens: list[int]) -> str:
    return str(_TOKENIZER.decode(tokens, skip_special_tokens=False))


def whole(call: Call) -> list[int]:
    return [*call[0], *call[1]]


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


SYSTEM = Message(role="system", content="Search, then answer.")
QUESTION = [SYSTEM, user("What city?")]
SPELLED = [i for letter in "page" for i in ids(letter)]  # sampled as four tokens, written as one
READ = tool("page Acme, boss Zoe, city Rome, product lamps")


def tokenizing_again() -> Calls:
    """Extends; is tokenized again; asks a sub-agent; goes on; forgets its first turn; asks about something else."""
    opening = ids(chatml(QUESTION))
    calls = [(opening, [*SPELLED, END])]
    calls.append(([*opening, *SPELLED, END, *ids("\n" + chatml([READ]))], [*ids(" Rome"), END]))
    calls.append((ids(text_of(whole(calls[1])) + "\n" + chatml([READ])), [*ids(" Oslo"), END]))
    calls.append((ids(chatml([SYSTEM, user("Is Rome a city?")])), [*ids(" Acme"), END]))
    calls.append(([*whole(calls[2]), *ids("\n" + chatml([tool("nothing found")]))], [*ids(" Lima"), END]))
    rest = [said(" Oslo"), tool("nothing found"), said(" Lima"), tool("nothing found")]
    calls.append((ids(chatml([SYSTEM, READ, *rest])), [END]))
    calls.append(([700, 701], [702]))
    return calls


def editing() -> Calls:
    opening = ids(chatml(QUESTION))
    calls = [(opening, [*ids(" Rome"), END])]
    calls.append(([*whole(calls[0]), *ids("\n" + chatml([READ]))], [*ids(" Oslo"), END]))
    edited = [*QUESTION, said(" Rome"), tool("page Acme, gone"), said(" Oslo"), READ]
    calls.append((ids(chatml(edited)), [*ids(" Lima"), END]))
    return calls


TRAJECTORIES = (tokenizing_again(), editing())


def compacted() -> list[Step]:
    """An attempt that is asked for a summary twice, as the first one is cut off, and goes on from the second.

    Then its environment replaces the conversation, and throws a reply away.
    """
    calls = [(ids(chatml(QUESTION)), [*ids(" Acme"), END])]
    calls.append(([*whole(calls[0]), *ids("\n" + chatml([READ]))], [*ids(" Zoe"), END]))
    request = [*whole(calls[1]), *ids("\n" + chatml([READ, user("Write down what you know.")]))]
    calls += [(request, ids(" Acme, boss")), (request, [*ids(" Acme, boss Zoe, city Rome"), END])]
    calls.append((ids(chatml([*QUESTION, user("Your summary: Acme, boss Zoe, city Rome")])), [*ids(" Ro"), END]))
    calls.append(([*whole(calls[4]), *ids("\n" + chatml([tool("nothing found")]))], [*ids(" Acme"), END]))
    calls += [
        (ids(chatml([user("City of Acme? It begins with Ro.")])), [*ids(answer), END]) for answer in (" ?", " Rome")
    ]
    first, second, cut, summary, third, fourth, lost, last = (make_step(*call) for call in calls)
    goes_on, rejected = BreakCause.SUMMARY, DropReason.REJECTED
    return [
        first,
        second,
        replace(cut, summary=True, dropped=rejected, stop_reason=StopReason.LENGTH),
        replace(summary, summary=True),
        replace(third, break_cause=goes_on),
        fourth,
        replace(lost, break_cause=goes_on, dropped=rejected),
        replace(last, break_cause=goes_on, reward=1.0),
    ]


def record(path: Path, *attempts: Sequence[Step]) -> Path:
    """One group with both trajectories, or these, as training records it before the first checkpoint."""
    attempts = attempts or tuple([make_step(*call) for call in calls] for calls in TRAJECTORIES)
    made = [Trajectory(f"g000000.{n}", "t0", n, tuple(steps), 1.0, Status.DONE) for n, steps in enumerate(attempts)]
    return recorded_run(path, tiny(), *made).path
