"""`Recording`: clients' use of `treadle serve`, appended to a .jsonl file as it happens.

    gateway -> Recorder.call, drop, reward -> Recording.append(part(...)) -> trajectory_files.read_files

A line is on file before its call is answered, so that a killed server loses only undelivered calls.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from treadle.core.errors import ConfigError
from treadle.core.types import DropReason, Message, Status, Task, Trajectory
from treadle.record.recorded import UNREWARDED, RecordedTrajectory, vocabulary_sha256
from treadle.record.trajectory_files import as_record, is_torn, part
from treadle.rendering.texts import TokenTexts
from treadle.rollout.gateway.request import ApiError, CompletionRequest
from treadle.rollout.session import Reply


class Recording:
    """A .jsonl file that one server appends to; existing lines are kept, except one truncated by a kill.

    model: directory of the served model.

    Raises ConfigError for a file that is not writable, or in use by another server.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, model: str) -> None:
        self._model = model
        self.path, self._texts, self._vocabulary = path, TokenTexts(tokenizer), vocabulary_sha256(tokenizer)
        self._prefix, self._attempts = secrets.token_hex(4), Counter[str]()
        self.calls, self.trajectories = 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--record {path}: cannot write there: {error.strerror}; name another file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"--record {path}: another server records into this file; name another") from error
        except OSError:
            pass  # the file system lacks locks
        self._mend()

    def _mend(self) -> None:
        with self.path.open("rb") as file:
            at, line = 0, b""
            for line in file:
                at += len(line)
        if is_torn(line):
            self._file.truncate(at - len(line))
        elif line and not line.endswith(b"\n"):
            self._file.write(b"\n")

    def close(self) -> None:
        self._file.close()

    def begin(self, task_id: str = "") -> tuple[str, str, int]:
        """Begin a trajectory; return its id, its task's id, and the number of the attempt at the task."""
        ident = f"{self._prefix}-{self.trajectories:06d}"
        self.trajectories += 1
        task_id = task_id or ident
        self._attempts[task_id] += 1
        return ident, task_id, self._attempts[task_id] - 1

    def add_call(
        self, begun: tuple[str, str, int], reply: Reply, request: CompletionRequest, reward: float | None
    ) -> None:
        ident, task_id, attempt = begun
        status, failure = (Status.FAILED, UNREWARDED) if reward is None else (Status.DONE, None)
        trajectory = Trajectory(ident, task_id, attempt, (reply.step,), reward, status, failure)
        recorded = RecordedTrajectory(str(self.path), "train", task_id, Task(task_id), trajectory, self._vocabulary)
        messages = None if request.prompts is not None else _messages(request, reply.message)
        self.append(reply.number, ident, as_record(recorded, self._texts, messages, request.tools, self._model))
        self.calls += 1

    def append(self, number: int | None, ident: str, facts: Mapping[str, Any]) -> None:
        """Append a line. Raises ApiError, leaving the file unchanged, if the disk refuses."""
        line, size = part(number, ident, facts), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(size)
            raise ApiError(503, f"could not record in {self.path}: {error.strerror}; free disk space") from error


class Recorder:
    """Records one session (a `rollout.gateway.gateway.Recorder`).

    task_id: task of the session's trajectory, "" for a new task; None if each conversation is a trajectory.
    """

    def __init__(self, recording: Recording, task_id: str | None = None) -> None:
        self._recording = recording
        self._whole = None if task_id is None else recording.begin(task_id)
        self._begun: dict[int, tuple[str, str, int]] = {}  # by first call of the conversation
        self._idents: dict[int, str] = {}  # trajectory of each recorded call
        self._dropped: dict[int, DropReason] = {}
        self._rewards: dict[str, float] = {}

    @property
    def ident(self) -> str:
        return self._whole[0] if self._whole else ""

    def call(self, reply: Reply, request: CompletionRequest) -> None:
        """Record a call, as part of the session's trajectory or of the conversation it continues."""
        begun = self._whole or self._begun.get(reply.first) or self._recording.begin()
        self._begun[reply.first] = begun
        self._recording.add_call(begun, reply, request, self._rewards.get(begun[0]))
        self._idents[reply.number] = begun[0]

    def drop(self, number: int, reason: DropReason | None) -> None:
        if number in self._idents and reason != self._dropped.get(number):
            self._recording.append(number, self._idents[number], {"dropped": reason})
            self._dropped.pop(number, None)
            if reason is not None:
                self._dropped[number] = reason

    def reward(self, reward: float, numbers: Sequence[int] = ()) -> None:
        for ident in dict.fromkeys(self._idents[number] for number in numbers) if not self._whole else [self.ident]:
            self._recording.append(None, ident, {"reward": reward, "status": Status.DONE, "failure": None})
            self._rewards[ident] = reward


def _messages(request: CompletionRequest, reply: Message) -> list[Message]:
    """Return the conversation with the reply, joined to the last message if it continues that."""
    messages = list(request.messages)
    if request.options.continue_final_message:
        begun = messages.pop()
        reply = {**reply, "content": begun["content"] + reply["content"]}
    return [*messages, reply]
