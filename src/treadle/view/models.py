"""The larger answers to the pages, as JSON. The smaller ones are dicts, described where they are made."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]


class RunSummary(BaseModel):
    """A line of the list of runs. best, last: evaluations. problems: what cannot be shown of the run, and why."""

    key: str
    name: str
    path: str
    state: str = "unknown"
    recipe: str = ""
    about: str = ""
    seed: int | None = None
    update: int = 0
    updates: int = 0
    best: Json | None = None
    last: Json | None = None
    reward: float | None = None
    rewards: list[float | None] = []
    seconds_per_update: float | None = None
    wall_seconds: float | None = None
    problems: list[str] = []


class Attempt(BaseModel):
    """A trajectory as a table shows it. states: number of its steps by outcome, `{"dropped: stale": 2}`."""

    trajectory_id: str
    attempt: int
    status: str
    reward: float | None
    trained_reward: float | None
    advantage: float | None
    components: dict[str, float]
    steps: int
    completion_tokens: int
    seconds: float
    failure_cause: str | None
    failure_message: str | None
    warning: str
    states: dict[str, int]


class GroupRow(BaseModel):
    """A line of the groups' table. update: the one that trained it, or after which it was evaluated.

    when: that in words, or why there is none: `update 3`, `no update: stale`.
    """

    group_id: str
    split: str
    task_id: str
    question: str
    played_by: str
    update: int | None
    version: int | None
    when: str
    attempts: list[Attempt]


class Span(BaseModel):
    """Tokens [start, end) of a step with one role and kind: template, text, thought or call."""

    start: int
    end: int
    role: str
    kind: str


class Segment(BaseModel):
    """Consecutive tokens of the prefix tree without a fork, all read or all sampled.

    parent: index of the segment before it; -1 at a root. depth: tokens before it. steps: indices of those it is part
    of. sampled: of those that sampled it; the others read it. joined: (start, count, text) of tokens that are pieces of
    a character.
    """

    parent: int
    depth: int
    ids: list[int]
    steps: list[int] = []
    sampled: list[int] = []
    joined: list[tuple[int, int, str]] = []


class TokenTree(BaseModel):
    """Base: the prefix tree of some steps. texts: token id -> text, of every token in it. special: special tokens."""

    texts: dict[int, str] = {}
    special: list[int] = []
    segments: list[Segment] = []


class TrajectoryView(TokenTree):
    """A trajectory. cost: tokens that training computes under each packing. problem: why tokens are missing.

    steps: model calls, as `trajectories._add_tokens` makes them. columns: values of sampled tokens (`texts.COLUMNS`).
    """

    run: str
    attempt: Attempt
    group: GroupRow
    split: str
    ground_truth: Any = None
    traceback: str | None = None
    metrics: dict[str, Any] = {}
    steps: list[Json] = []
    columns: list[Json] = []
    cost: Json | None = None
    problem: str | None = None
    siblings: list[str] = []
    previous: str | None = None
    next: str | None = None


class AttemptsTree(TokenTree):
    """Attempts at one task, and the tree of all their steps.

    apart: trajectory -> the position in its last step's sequence where it first differs from the first attempt.
    """

    steps: list[Json] = []
    apart: dict[str, int] = {}
    problems: list[str] = []


class GroupView(AttemptsTree):
    """A group. cost: as of a trajectory."""

    run: str
    group: GroupRow
    ground_truth: Any = None
    cost: Json | None = None
    previous: str | None = None
    next: str | None = None


class Followed(AttemptsTree):
    """A task in all evaluations, or in all epochs of training. The tree holds the attempts that are drawn."""

    task_id: str
    question: str
    groups: list[GroupRow]
