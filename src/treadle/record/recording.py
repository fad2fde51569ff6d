"""`Recording`: clients' use of `treadle serve`, recorded in a run directory as it happens.

    gateway -> Recorder.call, drop, reward -> Recording.record -> Ledger.record_open --(every 256 calls)--> a shard

A call is recorded before it is answered, so that a killed server loses only undelivered calls. Readers see it at once:
its tokens are in the ledger until a shard has them.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from treadle.core.config import Config
from treadle.core.errors import ConfigError, RunError
from treadle.core.types import DropReason, Group, ModelCall, Status, Step, Task, Trajectory
from treadle.record.ledger import Ledger
from treadle.record.record import Record
from treadle.record.recorded import vocabulary_sha256
from treadle.record.rollout_store import images_beside, open_steps, packed_step, write_table
from treadle.record.run_directory import RunDirectory
from treadle.rollout.gateway.request import ApiError, CompletionRequest
from treadle.rollout.session import Reply

_SHARD = 256  # calls


@dataclass(slots=True)
class Attempt:
    """A trajectory that may continue. index: of the group of attempts at its task. steps: by number of the call."""

    ident: str
    task_id: str
    index: int
    attempt: int
    steps: dict[int, Step] = field(default_factory=dict)
    reward: float | None = None

    def group(self) -> Group:
        steps = tuple(self.steps[number] for number in sorted(self.steps))
        began = [step.started or 0.0 for step in steps]
        seconds = max(start + step.seconds for start, step in zip(began, steps, strict=True)) - min(began)
        status = Status.UNRATED if self.reward is None else Status.DONE
        trajectory = Trajectory(self.ident, self.task_id, self.attempt, steps, self.reward, status, seconds=seconds)
        return Group(self.task_id, self.index, 0, self.index, Task(self.task_id), (trajectory,))


class Recording:
    """A run directory that one server records into; earlier trajectories are kept.

    config: of the run, if it is new. model: name of the served model, for the messages of calls.

    Raises ConfigError for a run with another tokenizer, RunError for any other run or if another server records.
    """

    def __init__(self, path: Path, config: Config, tokenizer: Tokenizer, model: str) -> None:
        self.path, self.model = path, model
        run = RunDirectory(path)
        if run.recording_file.is_file():
            run.lock()
            if run.is_text or vocabulary_sha256(Record(path).tokenizer()) != vocabulary_sha256(tokenizer):
                run.close()
                raise ConfigError(f"--record {path}: was recorded with another vocabulary; name another directory")
        else:
            run = RunDirectory.create_recorded(path, config, "treadle serve", tokenizer)
        self._run, self._ledger = run, Ledger(run.ledger_file)
        self._ledger.note_files(run.written)
        rows = self._ledger.query(
            "SELECT group_id, idx, count(*) AS n FROM groups JOIN trajectories USING (group_id) GROUP BY 1"
        )
        self._tasks: dict[str, tuple[int, int]] = {row["group_id"]: (row["idx"], row["n"]) for row in rows}
        self._indices = itertools.count(1 + max((row["idx"] for row in rows), default=-1))
        self._prefix, self._shards = secrets.token_hex(4), 0
        self._open: set[str] = set()  # trajectories with all steps in the ledger
        self._unsettled, self.calls, self.trajectories = 0, 0, 0
        self._settle()  # calls of a killed server

    def close(self) -> None:
        self._settle()
        self._ledger.close()
        self._run.close()

    def log(self, row: Mapping[str, Any]) -> None:
        """Write a line of metrics."""
        self._run.log(row)

    def rewrite_log(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines of metrics."""
        self._run.rewrite_log(rows)

    def begin(self, task_id: str = "") -> Attempt:
        ident = f"{self._prefix}-{self.trajectories:06d}"
        self.trajectories += 1
        if not task_id:
            return Attempt(ident, ident, next(self._indices), 0)
        index, attempts = self._tasks.get(task_id) or (next(self._indices), 0)
        self._tasks[task_id] = index, attempts + 1
        return Attempt(ident, task_id, index, attempts)

    def record(self, attempt: Attempt, changed: Iterable[int]) -> None:
        """Record an attempt. changed: numbers of new and changed calls. Raises ApiError if the disk refuses."""
        try:
            if self._unsettled >= _SHARD:
                self._settle()
            group, numbers = attempt.group(), sorted(attempt.steps)
            [trajectory] = group.trajectories
            first = min((numbers.index(number) for number in changed), default=len(numbers))
            first = first if attempt.ident in self._open else 0
            steps = enumerate(trajectory.steps[first:], first)  # later ones move if an earlier call is answered last
            put = images_beside(self._run.rollouts).put
            rows = {n: packed_step(group.group_id, attempt.ident, n, step, put) for n, step in steps}
            self._ledger.record_open(group, rows)
        except RunError as error:
            raise ApiError(
                503, f"could not record in {self.path}: {error.__cause__ or error}; free disk space"
            ) from error
        self._open.add(attempt.ident)
        self._unsettled += len(rows)

    def _settle(self) -> None:
        """Move all steps from the ledger to a shard."""
        if table := open_steps(self._ledger):
            self._ledger.settle(write_table(self._run.rollouts, f"{self._prefix}-{self._shards:06d}.parquet", table))
            self._shards += 1
        self._open.clear()
        self._unsettled = 0


class Recorder:
    """Records one session (a `rollout.gateway.gateway.Recorder`).

    task_id: task of the session's trajectory, "" for a new task; None if each conversation is a trajectory.
    """

    def __init__(self, recording: Recording, task_id: str | None = None) -> None:
        self._recording = recording
        self._whole = None if task_id is None else recording.begin(task_id)
        self._begun: dict[int, Attempt] = {}  # by first call of the conversation
        self._attempts: dict[int, Attempt] = {}  # of each recorded call

    @property
    def ident(self) -> str:
        return self._whole.ident if self._whole else ""

    def call(self, reply: Reply, request: CompletionRequest) -> None:
        """Record a call, as part of the session's trajectory or of the conversation it continues."""
        attempt = self._whole or self._begun.get(reply.first) or self._recording.begin()
        chat = None if request.prompts is not None else _chat(self._recording.model, request, reply)
        attempt.steps[reply.number] = replace(reply.step, chat=chat)
        try:
            self._recording.record(attempt, [reply.number])
        except ApiError:
            del attempt.steps[reply.number]
            raise
        self._recording.calls += 1
        self._begun[reply.first] = self._attempts[reply.number] = attempt

    def drop(self, number: int, reason: DropReason | None) -> None:
        attempt = self._attempts.get(number)
        if attempt is not None and attempt.steps[number].dropped != reason:
            attempt.steps[number] = replace(attempt.steps[number], dropped=reason)
            self._recording.record(attempt, [number])

    def reward(self, reward: float, numbers: Sequence[int] = ()) -> None:
        rewarded = [self._whole] if self._whole else [self._attempts[number] for number in numbers]
        for attempt in {attempt.ident: attempt for attempt in rewarded}.values():
            attempt.reward = reward
            if attempt.steps:
                self._recording.record(attempt, ())


def _chat(model: str, request: CompletionRequest, reply: Reply) -> ModelCall:
    """Return the call as its client sent it, with the reply joined to the last message if it continues that."""
    messages, answer, step = list(request.messages), reply.message, reply.step
    if request.options.continue_final_message:
        begun = messages.pop()
        answer = {**answer, "content": begun["content"] + answer["content"]}
    counts = (step.prompt_tokens, step.completion_tokens)
    return ModelCall(model, tuple(messages), answer, *counts, step.started or 0.0, step.seconds, tuple(request.tools))
