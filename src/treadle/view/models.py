"""What the pages get as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

Json = dict[str, Any]


class HeldOut(BaseModel):
    """Result of one evaluation of the held-out tasks."""

    update: int
    success: float | None
    reward: float | None = None


class RunSummary(BaseModel):
    """A line of the list of runs. problems: what cannot be shown of the run, and why, in sentences."""

    key: str
    name: str
    path: str
    state: str = "unknown"
    recipe: str = ""
    about: str = ""
    seed: int | None = None
    update: int = 0
    updates: int = 0
    best: HeldOut | None = None
    last: HeldOut | None = None
    reward: float | None = None
    rewards: list[float | None] = []
    seconds_per_update: float | None = None
    wall_seconds: float | None = None
    problems: list[str] = []


class Now(BaseModel):
    """What a run does now, or how it ended, in words: `rollout 12 of 64 for 8 s`. left: `about 12 min left`."""

    state: str
    doing: str = ""
    left: str = ""
    message: str = ""


class Runs(BaseModel):
    """The list of runs. version: of Treadle. roots: the folders that are searched for runs."""

    runs: list[RunSummary]
    roots: list[str]
    version: str


class Setting(BaseModel):
    """A key of a run's configuration; the value as on a command line."""

    path: str
    value: str
    is_default: bool
    help: str


class Split(BaseModel):
    """Counts of what is recorded of training or of held-out tasks."""

    split: str
    groups: int
    trajectories: int
    steps: int
    prompt_tokens: int
    completion_tokens: int
    failed: int


class StateCount(BaseModel):
    """Number of steps with one outcome, and what it means in words."""

    split: str
    state: str
    reason: str | None
    count: int
    text: str


class FailureCount(BaseModel):
    """Number of attempts that failed in one way, with an example."""

    cause: str
    message: str
    count: int
    trajectory_id: str


class RunDetail(RunSummary):
    """What one run's page begins with. metrics: name -> unit, help and view, of each declared metric.

    no_update: why there is nothing to draw; empty where there is.
    """

    settings: list[Setting] = []
    checkpoints: list[str] = []
    metrics: dict[str, Json] = {}
    summary: Json | None = None
    no_update: str = ""


class Counts(BaseModel):
    """Counts over the whole ledger, which take a second in a large run."""

    splits: list[Split] = []
    states: list[StateCount] = []
    failures: list[FailureCount] = []


class Change(BaseModel):
    """What may have changed of a run since the last look. version: changes with what is recorded."""

    version: str
    now: Now


class Changes(BaseModel):
    """Changes by the key of the run."""

    runs: dict[str, Change]


class Metrics(BaseModel):
    """Rows of metrics.jsonl or intervals.jsonl from `start` on. generation: changes when the file is rewritten."""

    generation: str
    start: int
    rows: list[Json]


class Difference(BaseModel):
    """A setting in which runs differ, with the value of each.

    values: None if the run has no such setting; empty if its mapping lacks the key (`model.build.head_dim`).
    """

    path: str
    values: list[str | None]


class RunGroup(BaseModel):
    """Runs that differ in their seed only, by key."""

    label: str
    runs: list[str]


class Comparison(BaseModel):
    """Several runs side by side."""

    runs: list[str]
    groups: list[RunGroup]
    differences: list[Difference]
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


class Groups(BaseModel):
    """A page of the groups' table. total: groups that match. previous, next: neighbors of `around`, if given."""

    total: int
    offset: int
    rows: list[GroupRow]
    previous: str | None = None
    next: str | None = None


class Evaluation(BaseModel):
    """An evaluation of the held-out tasks. name: the prefix of its groups' ids."""

    name: str
    label: str
    is_greedy: bool


class TaskChange(BaseModel):
    """A task in two evaluations. change: gained, lost or unchanged. solved: share of its attempts, in each."""

    change: str
    solved: tuple[float, float]
    before: GroupRow
    after: GroupRow


class TaskChanges(BaseModel):
    """Two evaluations task by task. before, after: all evaluations to choose from; first, second: the chosen ones.

    only_before, only_after: how many tasks only one of them has, or with another prompt.
    """

    before: list[Evaluation]
    after: list[Evaluation]
    first: str
    second: str
    rows: list[TaskChange] = []
    only_before: int = 0
    only_after: int = 0


class Relation(BaseModel):
    """How a step's prompt relates to the steps before it (`packing.breaks.Relation`)."""

    kind: str
    base: int | None
    shared: int
    cause: str | None
    was: str | None
    now: str | None
    extra_tokens: int


class Fate(BaseModel):
    """What became of a step, in words, and the settings that decided it."""

    state: str
    reason: str | None
    text: str
    settings: list[str]


class Span(BaseModel):
    """Tokens [start, end) of a step with one role and kind: template, text, thought or call."""

    start: int
    end: int
    role: str
    kind: str


class Column(BaseModel):
    """A value of each sampled token. scale: how it is colored."""

    name: str
    label: str
    help: str
    scale: str = Field(
        description="what stands out: low: small log-probabilities; high: large values; around_one: ratios far from 1; "
        "diverging: both signs; steps: whole numbers apart; flag: yes"
    )
    is_recorded: bool = True


class StepView(BaseModel):
    """A model call. columns: name -> a value for each of its sampled tokens, by the trajectory's `columns`.

    segment: of the tree, the one that its tokens end in; its ancestors hold the tokens before. began, waited: seconds
    from the attempt's first call to this one, and from there to its sampling; None where the run does not record them.
    traced_in: the update whose learner the columns are of, if it is traced.
    """

    step: int
    segment: int
    prompt_tokens: int
    completion_tokens: int
    relation: Relation
    fate: Fate
    spans: list[Span]
    columns: dict[str, list[Any]]
    stop_reason: str
    temperature: float
    reward: float
    shaping: float
    components: dict[str, float]
    seconds: float
    began: float | None = None
    waited: float | None = None
    traced_in: int | None = None
    versions: list[int]
    has_experts: bool


class Segment(BaseModel):
    """Consecutive tokens of the prefix tree without a fork, all read or all sampled.

    parent: index of the segment before it; -1 at a root. depth: tokens before it. steps: those it is a part of, by
    index. sampled: those that sampled it; the others read it. joined: (start, count, text) of tokens that are pieces of
    a character.
    """

    parent: int
    depth: int
    ids: list[int]
    steps: list[int] = []
    sampled: list[int] = []
    joined: list[tuple[int, int, str]] = []


class Cost(BaseModel):
    """Tokens that training computes under each packing. used: the run's packing."""

    step: int
    chain: int
    tree: int
    used: str


class TrajectoryView(BaseModel):
    """A trajectory. texts: token id -> text, of every token in it. problem: why tokens are missing."""

    run: str
    attempt: Attempt
    group: GroupRow
    split: str
    ground_truth: Any = None
    traceback: str | None = None
    metrics: dict[str, Any] = {}
    texts: dict[int, str] = {}
    special: list[int] = []
    segments: list[Segment] = []
    steps: list[StepView] = []
    columns: list[Column] = []
    cost: Cost | None = None
    problem: str | None = None
    siblings: list[str] = []
    previous: str | None = None
    next: str | None = None


class TreeStep(BaseModel):
    """A step in the tree of several attempts."""

    trajectory_id: str
    step: int
    segment: int = -1
    prompt_tokens: int
    relation: Relation
    state: str
    reason: str | None


class AttemptsTree(BaseModel):
    """Attempts at one task, and the tree of all their steps.

    apart: trajectory -> the position in its last step's sequence where it first differs from the first attempt.
    """

    texts: dict[int, str] = {}
    special: list[int] = []
    segments: list[Segment] = []
    steps: list[TreeStep] = []
    apart: dict[str, int] = {}
    problems: list[str] = []


class GroupView(AttemptsTree):
    """A group."""

    run: str
    group: GroupRow
    ground_truth: Any = None
    cost: Cost | None = None
    previous: str | None = None
    next: str | None = None


class Found(BaseModel):
    """A place where a text was found."""

    trajectory_id: str
    step: int
    before: str
    match: str
    after: str


class SearchResult(BaseModel):
    """Result of a search through the text of an update. is_complete: False if there are more places."""

    found: list[Found]
    searched: int
    is_complete: bool
    problems: list[str]


class Followed(AttemptsTree):
    """A task in all evaluations, or in all epochs of training. The tree holds the attempts that are drawn."""

    task_id: str
    question: str
    groups: list[GroupRow]


class Calls(BaseModel):
    """Times of the calls of an update's attempts. attempts: in the order of their first calls.

    calls: (index of the attempt, step, seconds since the first of all, seconds of those waited or None, seconds).
    unknown: calls of which no time is recorded.
    """

    attempts: list[str] = []
    rewards: list[float | None] = []
    calls: list[tuple[int, int, float, float | None, float]] = []
    unknown: int = 0
    problems: list[str] = []


class Activity(BaseModel):
    """Mean number of training attempts in each phase, over equal parts of some spans of time.

    sampling: calls being sampled. waiting: calls that wait for the engine. outside: attempts between two calls, in the
    environment or agent. most: maximum of all at once, in the whole run. busy: share of the spans with at least one
    call being sampled. is_recorded: whether the run records when its calls began.
    """

    is_recorded: bool = False
    sampling: list[list[float]] = []
    waiting: list[list[float]] = []
    outside: list[list[float]] = []
    most: int = 0
    busy: float = 0.0
    problems: list[str] = []


class Breaks(BaseModel):
    """A run's tokens as `treadle report` counts them: packing, relations, and shards that cannot be read.

    updates: of each update, the tokens that training computes under each packing, and again for breaks.
    """

    packing: Json
    relations: Json
    updates: list[Json]
    missing_shards: list[str]
    damaged_shards: list[str]


class Experts(BaseModel):
    """Experts chosen where one token was sampled, by layer: [M][k]."""

    layers: list[list[int]]
