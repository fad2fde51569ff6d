"""Recorded trajectories with their tasks, as read by supervised learning and analyses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from treadle.core.errors import Cause, ConfigError, DataError
from treadle.core.files import sha256_of
from treadle.core.metrics import Measures
from treadle.core.outcomes import as_played, reason_on_record
from treadle.core.rewards import NUMBER, is_reward
from treadle.core.text import json_problem, read_json
from treadle.core.trainer import Conversation, ConversationCall
from treadle.core.types import Failure, Message, Start, Status, Step, Task, Trajectory
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import Tool
from treadle.training.demonstrations import checked_demonstration, demonstrated_calls

_BESIDE = ("weight", "annotations")  # fields of OpenAI's messages that no template writes
AS_TEXT = "text"
"""Vocabulary of trajectories without ids, with calls as text (`Step.chat`)."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrajectory:
    """A recorded attempt at a task.

    source: the run's directory, or position in a file. split: `train` or `held_out`. vocabulary: digest of its ids'
    vocabulary (`vocabulary_sha256`).
    """

    source: str
    split: str
    group_id: str
    task: Task
    trajectory: Trajectory
    vocabulary: str

    @property
    def task_id(self) -> str:
        return self.task.task_id

    @property
    def attempt(self) -> int:
        return self.trajectory.attempt

    @property
    def reward(self) -> float | None:
        return self.trajectory.reward

    @property
    def components(self) -> dict[str, float]:
        return as_played(self.trajectory).components

    @property
    def status(self) -> str:
        return self.trajectory.status

    @property
    def played_steps(self) -> int:
        return len(as_played(self.trajectory).steps)

    def calls(self, renderer: ChatRenderer) -> Conversation:
        """Return (prompt ids, ids to learn, images) of its steps, except individually dropped ones.

        For a step with masked tokens, each run of trainable ones is a call, after everything before it.
        """
        return [call for step in self.trajectory.steps if step.dropped is None for call in _trainable(step)]


def _trainable(step: Step) -> Iterator[ConversationCall]:
    ids, start = step.full_ids, len(step.prompt_ids)
    for trained, tokens in groupby(step.mask.tolist()):
        end = start + len(list(tokens))
        if trained:
            yield ids[:start], ids[start:end], *step.images
        start = end


@dataclass(frozen=True, slots=True, eq=False)
class LoggedConversation:
    """A conversation logged as text by other software; its ids are made here.

    source: position in a file. untrained: numbers of messages that are only context.
    """

    source: str
    task_id: str
    attempt: int
    split: str
    reward: float | None
    components: dict[str, float]
    status: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    untrained: frozenset[int] = frozenset()

    @property
    def turns(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def played_steps(self) -> int:
        return len(self.turns)

    def calls(self, renderer: ChatRenderer) -> Conversation:
        """Return (prompt ids, ids to learn, images) of the assistant's messages. Raises DataError, naming where."""
        try:
            calls = demonstrated_calls(self.messages, renderer, self.tools)
        except DataError as error:
            raise DataError(f"{self.source}: {error}") from error
        return [call for number, call in zip(self.turns, calls, strict=True) if number not in self.untrained]


def logged(row: Mapping[str, Any], where: str, untrained: Iterable[int] = ()) -> LoggedConversation:
    """Return a conversation from a fine-tuning file: `messages`, `tools`; a message of weight 0 is only context.

    Optional: task_id, attempt, split, reward, components, status. Raises DataError.
    """
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(
            f"{where}: 'messages' must be a list of objects, got {messages!r:.80}; write objects, not JSON text"
        )
    plain = [{k: v for k, v in m.items() if v is not None and k not in _BESIDE} for m in messages]
    tools, reward = row.get("tools") or (), row.get("reward")
    tools = read_json(tools) if isinstance(tools, str) else tools
    demonstration = checked_demonstration({"messages": plain, "tools": tools}, where)
    if reward is not None and not is_reward(reward):
        raise DataError(f"{where}: the reward must be a {NUMBER}, got {reward!r:.80}")
    components = dict(row.get("components") or {})
    if problem := json_problem({"components": components}):
        raise DataError(f"{where}: {problem}")
    task = row.get("task")
    task_id = row.get("task_id") or (task.get("task_id") if isinstance(task, Mapping) else None) or where
    return LoggedConversation(
        source=where,
        task_id=str(task_id),
        attempt=int(row.get("attempt") or 0),
        split=str(row.get("split") or "train"),
        reward=None if reward is None else float(reward),
        components=components,
        status=str(row.get("status") or Status.DONE),
        messages=tuple(demonstration.messages),
        tools=tuple(demonstration.tools),
        untrained=frozenset(untrained) | {n for n, m in enumerate(messages) if m.get("weight") == 0},
    )


class Trajectories(list[RecordedTrajectory | LoggedConversation]):
    """Result of `treadle.load_run`: trajectories, with a table of them."""

    def __repr__(self) -> str:
        """Show only count and sources, because each trajectory has thousands of tokens."""
        sources = ", ".join(dict.fromkeys(re.sub(r":\d+$", "", t.source) for t in self)) or "no source"
        return f"<{len(self)} trajectories of {sources}>"

    def table(self) -> pa.Table:
        """Return a table with one row per trajectory; `component.NAME` is a component of the reward.

        version: policy version that sampled the first token. prompt: content of the task's last message.
        """
        names = dict.fromkeys(name for t in self for name in t.components)
        return pa.Table.from_pylist([_facts(t, names) for t in self])

    def dataframe(self) -> Any:
        """Return `table` as a pandas DataFrame."""
        return self.table().to_pandas()


def _facts(t: RecordedTrajectory | LoggedConversation, components: Iterable[str]) -> dict[str, Any]:
    facts = {name: getattr(t, name) for name in ("source", "split", "task_id", "attempt", "reward", "status")}
    facts |= {"status": str(t.status), "steps": t.played_steps}
    if isinstance(t, RecordedTrajectory):
        made = t.trajectory
        facts |= {
            "group_id": t.group_id,
            "prompt": t.task.prompt[-1].get("content") if t.task.prompt else None,
            "trajectory_id": made.trajectory_id,
            "version": _version(made),
            "completion_tokens": as_played(made).completion_tokens,
            "seconds": made.seconds,
            "failure": f"{made.failure.cause}: {made.failure.message}" if made.failure else None,
        }
    return facts | {
        f"component.{name}": None if t.reward is None else t.components.get(name, 0.0) for name in components
    }


def _version(trajectory: Trajectory) -> int | None:
    versions = (int(version) for step in trajectory.steps for version in step.policy_versions)
    return next(versions, None)


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of all tokens with their ids: equal if ids have the same meaning."""
    return sha256_of(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def check_vocabulary(
    trajectories: Iterable[RecordedTrajectory | LoggedConversation], vocabulary: str, tokenizer: Path
) -> None:
    """Raise ConfigError for a trajectory with ids of another meaning to this tokenizer."""
    for trajectory in trajectories:
        if isinstance(trajectory, RecordedTrajectory) and trajectory.vocabulary != vocabulary:
            raise ConfigError(
                f"{trajectory.source}: {trajectory.trajectory.trajectory_id} was recorded with another vocabulary than "
                f"that of {tokenizer}, where its ids mean other text; start from a model with the same tokenizer"
            )


def start_on_record(row: Mapping[str, Any]) -> Start | None:
    """Return the start of a trajectory from its row; None for one that began at the beginning, and in older files."""
    if row.get("start_source") is None:
        return None
    return Start(row["start_source"], row["start_steps"], row.get("start_probability"))


def trajectory_on_record(row: Mapping[str, Any], task_id: str, steps: Sequence[Step]) -> Trajectory:
    """Assemble a trajectory from its row of the ledger and its steps."""
    cause = row["failure_cause"]
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        task_id=task_id,
        attempt=row["attempt"],
        steps=tuple(steps),
        reward=row["reward"],
        status=Status(row["status"]),
        failure=Failure(Cause(cause), row["failure_message"], row["failure_traceback"]) if cause else None,
        warning=row["warning"],
        seconds=row["seconds"],
        metrics=Measures.from_json(json.loads(row["metrics"])),
        dropped=reason_on_record(row["reward"], row["trained_reward"]),
        blocked_seconds=row["blocked_seconds"],
        start=start_on_record(row),
    )
