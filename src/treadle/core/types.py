"""Recorded data: Task, Step, ModelCall, Trajectory, Group.

Legend of shapes: P prompt tokens, C completion tokens of one step, M layers with experts, k experts per token.

Arrays have fixed dtypes, are checked at construction and read-only afterwards: a record that exists is a
record that can be trained. For example, a step whose stop string was hit after two sampled tokens:

    Step(prompt_ids=[1, 17, 4], completion_ids=[9, 12], logprobs=[-0.3, -1.2], policy_versions=[4, 4],
         sampling=SamplingParams(temperature=1.0, max_tokens=16, stop=("</a>",)), stop_reason=StopReason.STOP)

The end-of-turn token that Treadle then appends for the model belongs to the *next* step's prompt.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.core.errors import Cause, DataError
from treadle.core.images import CHECKED, PLACE, ImageIds, ImageLimits, PromptImage, data_url
from treadle.core.metrics import Measures
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.support import Probabilities, Support
from treadle.core.text import json_problem

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Routing = NDArray[np.int16]

_NOTHING = Reward()


class FunctionCall(TypedDict):
    """The name and arguments of a function call; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an assistant message, in the shape of OpenAI's chat completions."""

    id: str
    type: str
    function: FunctionCall


class Message(TypedDict):
    """One chat message; `role` is system, user, assistant or tool.

    reasoning_content, tool_calls: only in assistant messages. tool_call_id: id of the call that a tool message answers.
    images: data URLs of its images, whose places are the characters `core.images.PLACE` of `content`; never in
    assistant messages. `as_messages` makes them of parts: `{"type": "image", "image": pillow_image}`.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    images: NotRequired[list[str]]


PLAYERS = ("environment", "agent", "driver")
"""Fields of a task that name its player."""


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(StrEnum):
    """How a trajectory ended."""

    DONE = "done"  # the environment said so
    MAX_STEPS = "max_steps"  # the agent loop's limit on LLM calls
    CONTEXT = "context"  # the next prompt would not have fitted
    FAILED = "failed"  # something raised or timed out; there is no reward
    GRADED = "graded"  # as FAILED, with the reward of `failures.causes`
    UNRATED = "unrated"  # recorded by `treadle serve`; no reward was given


class StepState(StrEnum):
    """State of a recorded step. All but RECORDED are terminal."""

    RECORDED = "recorded"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a recorded step was not trained."""

    FAILED = "failed"  # its trajectory has no reward
    RESAMPLED = "resampled"  # its batch was interrupted and sampled again in full
    REFUSED = "refused"  # the learner's model cannot train its trajectory
    REPLAYED = "replayed"  # context: a recorded step, from which its attempt goes on (`Trajectory.start`)
    CANCELLED = "cancelled"  # its caller no longer waited for the answer
    REJECTED = "rejected"  # its answer was discarded: later steps do not build on it
    DIVERGED = "diverged"  # its attempt could not begin where most of its group did (`rollout.starts`)
    MASKED = "masked"  # a summary, and `rollout.compaction.trained` is false
    STALE = "stale"  # sampled by a policy too old to be trained now
    FILTERED = "filtered"  # nothing can be learned from its group: all advantages are 0
    ROLLED_BACK = "rolled back"  # sampled by weights that were lost when the run went back to a checkpoint
    OVERLONG = "overlong"  # its trajectory was cut off, and `rewards.overlong` is `drop`
    DAMAGED = "damaged"  # still waiting to be trained when its tokens were found damaged on disk
    UNUSED = "unused"  # still waiting to be trained when the run was finished


class BreakCause(StrEnum):
    """Why a step's prompt does not extend the ids of the step it continues.

    The first three can also be recognized from ids and text alone (`packing.breaks`), the others only while rendering
    messages.
    """

    TOKENIZATION = "tokenization"  # the same text as different tokens
    TRUNCATED = "truncated"  # a part is missing
    CHANGED = "changed"  # a part is replaced
    THINKING_STRIPPED = "thinking stripped"  # the template leaves out an earlier thought
    TOOL_CALL_REWRITTEN = "tool call rewritten"  # the template leaves out a tool call, or its name
    REWRITTEN = "rewritten by template"  # the template renders earlier messages, or the text around them, differently
    END_TOKEN_REWRITTEN = "end token rewritten"  # sampled one stop token, the template writes another
    TOOLS_CHANGED = "tools changed"  # other tools, or other options of the template
    HISTORY_EDITED = "history edited"  # the agent sent an earlier message in another form
    CALLS_WITHHELD = "calls withheld"  # the agent accepts one tool call at a time and got only the first
    SUMMARY = "summary"  # the agent replaced several messages by fewer


def _array(owner: str, name: str, value: ArrayLike, dtype: type[np.generic], kinds: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.ndim != 1:
        raise DataError(f"{owner}.{name} must have one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in kinds:
        raise DataError(f"{owner}.{name} must hold {np.dtype(dtype).name} values, got {array.dtype.name}")
    if array.size and dtype is np.int32 and not (array.min() >= 0 and array.max() < 2**31):
        raise DataError(f"{owner}.{name} must lie in [0, 2**31), got {array.min()} .. {array.max()}")
    # Values beyond float32 become infinite, and are refused later.
    with np.errstate(over="ignore"):
        array = np.array(array, dtype=dtype)  # a private copy
    array.flags.writeable = False
    return array


def _routing(value: ArrayLike, tokens: int) -> Routing:
    array = np.asarray(value)
    if array.ndim != 3 or len(array) > tokens:
        raise DataError(
            f"Step.routing must be [tokens, layers, experts] of at most {tokens} tokens, got shape {array.shape}"
        )
    if array.size and not (array.dtype.kind in "iu" and array.min() >= 0 and array.max() < 2**15):
        raise DataError(
            f"Step.routing must hold experts in [0, 2**15), got {array.dtype.name} {array.min()} .. {array.max()}"
        )
    if (np.diff(np.sort(array, -1)) == 0).any():
        raise DataError("Step.routing names an expert twice for one token of one layer")
    array = np.array(array, dtype=np.int16)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    temperature: 0 is greedy (such tokens are never trained). max_tokens: maximum length of the completion.
    stop: strings that end the completion. seed: seed of this call's draws (`core.draws.call_seed`).
    min_p: keep tokens with p >= min_p * max p. top_k: keep the k most probable tokens and any ties with the last of
    them (0: all). top_p: keep the fewest tokens with a total probability of at least p. They apply in this order
    (vLLM's), after temperature, each to the renormalized result of the previous one; logprobs refer to the final
    distribution. grammar: what the completion must follow, in llguidance's Lark (`rendering.grammars`); "": anything.
    forbidden: ids that are not sampled. Both apply before temperature and filters.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    grammar: str = ""
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            raise DataError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.max_tokens < 1:
            raise DataError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.seed < 2**63:
            raise DataError(f"seed must lie in [0, 2**63), got {self.seed}")
        if any(not s for s in self.stop):
            raise DataError("a stop string must not be empty")
        if self.top_k < 0:
            raise DataError(f"top_k must be >= 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise DataError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise DataError(f"min_p must lie in [0, 1], got {self.min_p}")
        if any(ident < 0 for ident in self.forbidden):
            raise DataError(f"forbidden ids must be at least 0, got {min(self.forbidden)}")

    @property
    def constrains(self) -> bool:
        """Return whether a grammar or forbidden ids leave out tokens: `Step.support` is then derived from these and
        the tokens, unless filters left out others."""
        return bool(self.grammar or self.forbidden)

    @property
    def truncates(self) -> bool:
        """Return whether top-k, top-p or min-p truncate the distribution: logprobs are then over `Step.support`."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Form:
    """What the content of a reply must look like: `Form.json({"type": "object"})`, `Form("regex", "yes|no")`.

    kind: `json` (text: a JSON schema), `regex`, `choice` (a JSON list of texts) or `grammar` (llguidance's Lark, or
    llama.cpp's GBNF). where: what errors call it. Raises DataError for an unknown kind, or text not of its kind.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    where: str = field(default="the form", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in ("json", "regex", "choice", "grammar"):
            raise DataError(f"the kind of a form is {self.kind!r}; known: json, regex, choice, grammar")
        if self.kind not in ("json", "choice"):
            return
        try:
            value = json.loads(self.text)
        except ValueError as error:
            raise DataError(f"{self.where}: a form of kind {self.kind} needs JSON, got {self.text!r:.60}") from error
        texts = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
        if self.kind == "choice" and not texts:
            raise DataError(f"{self.where}: a form of kind choice needs a list of texts, got {self.text!r:.60}")

    @classmethod
    def json(cls, schema: Mapping[str, Any], where: str = "the schema") -> Form:
        """Return the form of JSON that a schema describes."""
        return cls("json", json.dumps(schema), where)

    @classmethod
    def choice(cls, texts: Sequence[str], where: str = "the choice") -> Form:
        """Return the form of one of these texts."""
        return cls("choice", json.dumps(texts), where)


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row. `task_id` is stable; everything in it is plain JSON data.

    prompt: messages an agent starts from, unless the environment's `reset` makes its own. Images in it have no limits
    here: those of a source of tasks are checked by `rollout.images` before.
    environment, agent, driver: the player, at most one of them (a registered name or `module:attribute`); all empty for
    the recipe's player. ground_truth, extras: data the player needs to run and grade the task.

    Raises DataError for invalid values.
    """

    task_id: str
    prompt: Sequence[Message] = ()
    environment: str = ""
    ground_truth: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    agent: str = ""
    driver: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.task_id, str) or not self.task_id:
            raise DataError(f"a task needs a task_id as text, got {self.task_id!r:.100}")
        named = {kind: name for kind in PLAYERS if (name := getattr(self, kind))}
        if len(named) > 1:
            both = " and ".join(f"the {kind} {name!r}" for kind, name in named.items())
            raise DataError(f"task {self.task_id} names both {both}; leave one out")
        object.__setattr__(self, "prompt", as_messages(self.prompt, f"task {self.task_id}: prompt", CHECKED))
        parts = {"task_id": self.task_id, "ground_truth": self.ground_truth, "extras": dict(self.extras)}
        if problem := json_problem(parts | named):
            raise DataError(f"task {self.task_id}: {problem}")

    @property
    def player(self) -> tuple[str, str]:
        """Return kind and name of its player: `("environment", "lookup")`; the name is "" if the task names none."""
        return next(((kind, name) for kind in PLAYERS if (name := getattr(self, kind))), ("environment", ""))

    def copy(self) -> Task:
        """Return a deep copy, which its player may change."""
        # Several times as fast as deepcopy.
        return pickle.loads(pickle.dumps(self))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call recorded as text and never trained: of a model beside the policy (`models` of a recipe), or of a model
    behind a URL that plays in the policy's place (`Step.chat`).

    model: name of the model. messages: the whole conversation sent to it. prompt_tokens, completion_tokens: counts
    reported by its server. started: time in seconds since 1970. seconds: duration until its answer. tools: tools
    offered to it; not recorded for models beside the policy.
    """

    model: str
    messages: tuple[Message, ...]
    reply: Message
    prompt_tokens: int
    completion_tokens: int
    started: float
    seconds: float
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One LLM call, exactly as the engine saw and answered it.

    prompt_ids      int32[P]    the prompt as sent
    completion_ids  int32[C]    the sampled tokens only
    logprobs        float32[C]  log-probability of each sampled token under the sampling distribution
    policy_versions int32[C]    policy version that sampled each token
    mask            bool[C]     trainable tokens; default: all, or none if greedy
    reward          weighted reward from the environment for this step (0.0 if it only rewards at the end)
    shaping         reward added in training by `rewards` of the configuration
    given           source of both: components by name, before weights, and token rewards
    state_key       key of the environment's state at this step, if it has one; equal keys mean equal states
    started         time of the engine call, in seconds since 1970; None: not recorded
    seconds         duration of the engine call
    waited          part of `seconds` before the engine began to compute; None: not reported
    summary         whether the agent loop requested it to shorten the conversation (`rollout.compaction`)
    break_cause     why the prompt does not extend an earlier step's ids, if the recorder knows it from messages
    dropped         why this step alone is not trained, if so
    routing         int16[<= C, M, k]  experts that the engine chose while predicting each sampled token, that is while
                    reading the token before, so that the first row belongs to the prompt's last token. None, or fewer
                    rows than tokens: the engine did not report it, or not for the last tokens
    calls           calls of other models between this step and the next; the first step also has those before it
    withheld        number of tool calls in the completion withheld from an agent that accepts one at a time
    support         ids that could have been sampled at each token, where a filter left some out; None: every id could,
                    or those left by `sampling.grammar` and `.forbidden` alone, or the engine did not report it
    probabilities   the sampler's, of its most probable ids at each token; None: not recorded, as without
                    `algorithm.centered_scores`
    answer          the environment's answer, and a snapshot of its state after it, as JSON; "" unless `rollout.starts`
                    or `rollout.forks` restores such environments
    images          the images of the prompt, in order of their places
    chat            the call as text: as a client of `treadle serve` sent it, or of a model behind a URL that returns no
                    ids; the arrays are then empty

    Raises DataError, naming the field, for invalid lengths, dtypes or values.
    """

    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Floats
    policy_versions: Ids
    sampling: SamplingParams
    stop_reason: StopReason
    mask: Mask = None  # type: ignore[assignment]  # filled in __post_init__
    reward: float = 0.0
    seconds: float = 0.0
    break_cause: BreakCause | None = None
    dropped: DropReason | None = None
    routing: Routing | None = None
    given: Reward = _NOTHING
    shaping: float = 0.0
    state_key: str = ""
    started: float | None = None
    waited: float | None = None
    summary: bool = False
    calls: tuple[ModelCall, ...] = ()
    withheld: int = 0
    chat: ModelCall | None = None
    support: Support | None = None
    probabilities: Probabilities | None = None
    answer: str = ""
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        fix = object.__setattr__
        for name in ("prompt_ids", "completion_ids", "policy_versions"):
            fix(self, name, _array("Step", name, getattr(self, name), np.int32, "iu"))
        fix(self, "logprobs", _array("Step", "logprobs", self.logprobs, np.float32, "f"))
        length = len(self.completion_ids)
        trainable = np.full(length, self.sampling.temperature > 0) if self.mask is None else self.mask
        fix(self, "mask", _array("Step", "mask", trainable, np.bool_, "b"))
        if self.routing is not None:
            fix(self, "routing", _routing(self.routing, length))
        if not len(self.prompt_ids) and (self.chat is None or length):
            raise DataError("Step.prompt_ids is empty: a completion needs at least one token before it")
        for name in ("logprobs", "policy_versions", "mask"):
            if len(getattr(self, name)) != length:
                raise DataError(f"Step.{name} has {len(getattr(self, name))} entries for {length} completion tokens")
        for image in self.images:
            image.places(self.prompt_ids)
        if self.support is not None:
            if len(self.support) != length:
                raise DataError(f"Step.support is of {len(self.support)} tokens, the completion has {length}")
            if not (inside := self.support.contains(self.completion_ids)).all():
                token = int(np.argmin(inside))
                raise DataError(f"Step.support of token {token} lacks the sampled id {self.completion_ids[token]}")
        if self.probabilities is not None and len(self.probabilities) != length:
            raise DataError(f"Step.probabilities is of {len(self.probabilities)} tokens, the completion has {length}")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-5).any():
            worst = self.logprobs[~(np.isfinite(self.logprobs) & (self.logprobs <= 1e-5))][0]
            raise DataError(f"Step.logprobs must be finite and <= 0, got {worst}")
        if self.sampling.temperature == 0 and self.mask.any():
            raise DataError("Step.mask marks greedy tokens (temperature 0) as trainable")
        for name in ("reward", "shaping"):
            if not is_reward(getattr(self, name)):
                raise DataError(f"Step.{name} must be a {NUMBER}, got {getattr(self, name)}")
        if self.given.tokens is not None and len(self.given.tokens) != length:
            raise DataError(f"Step.given rewards {len(self.given.tokens)} tokens, the completion has {length}")

    def __reduce__(self) -> tuple[type[Step], tuple[Any, ...]]:
        return Step, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def full_ids(self) -> Ids:
        return np.concatenate([self.prompt_ids, self.completion_ids])

    @property
    def is_text(self) -> bool:
        """Return whether the call is recorded as text alone, without ids."""
        return not len(self.prompt_ids)

    @property
    def prompt_tokens(self) -> int:
        return self.chat.prompt_tokens if self.chat and self.is_text else len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        return self.chat.completion_tokens if self.chat and self.is_text else len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trajectory has no reward. traceback: stack of the user's code; equal failures may differ in it."""

    cause: Cause
    message: str
    traceback: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """Place in user code that raised: `my_env.py, line 12`, or ""."""
        lines = re.findall(r'^  File "(.*)", (line \d+)', self.traceback, re.MULTILINE)
        return ", ".join(lines[-1]) if lines else ""


@dataclass(frozen=True, slots=True)
class Start:
    """The place in a recorded attempt from which another one goes on: after its first `steps` steps.

    source: id of the recorded trajectory, or its place in a file. steps: 0 for an attempt that was to branch from a
    sibling with no step to fork at. probability: with which a fork's step was drawn among the sibling's; None: it was
    set beforehand.
    """

    source: str
    steps: int
    probability: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One attempt at a task: its steps in call order and its reward. `core.outcomes` draws the conclusions.

    `reward is None` means that the attempt could not be graded; it is not 0.0 and enters no baseline.
    warning: a problem without influence on the reward (an environment that failed to close).
    metrics: values declared and measured by the environment.
    dropped: why the whole attempt trains nothing despite its reward.
    blocked_seconds: time that its user code blocked the event loop, a second or longer at a time.
    copies: in self-play, the trajectories of the policy's other roles in the same attempt (`role`), as far as they were
    called, each with its own reward; a copy has no copies.
    start: where the attempt began, if in the middle of a recorded one: its first `start.steps` steps are that one's,
    replayed as context (`DropReason.REPLAYED`, never trained); None: at the beginning.
    """

    trajectory_id: str
    task_id: str
    attempt: int
    steps: tuple[Step, ...]
    reward: float | None
    status: Status
    failure: Failure | None = None
    warning: str = ""
    seconds: float = 0.0
    metrics: Measures = field(default_factory=Measures)
    dropped: DropReason | None = None
    blocked_seconds: float = 0.0
    copies: tuple[Trajectory, ...] = ()
    start: Start | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.FAILED) != (self.failure is not None):
            raise DataError(f"trajectory {self.trajectory_id}: status {self.status} with failure {self.failure}")
        if (self.reward is None) != (self.status in (Status.FAILED, Status.UNRATED)):
            raise DataError(f"trajectory {self.trajectory_id}: status {self.status} with reward {self.reward}")
        if self.reward is not None and not is_reward(self.reward):
            raise DataError(f"trajectory {self.trajectory_id}: reward must be a {NUMBER}, got {self.reward}")

    @property
    def role(self) -> str:
        """Return `opponent` for `g000012.3.opponent`; "" for the policy's main role."""
        return role_of(self.trajectory_id)

    @property
    def engine_seconds(self) -> float:
        return math.fsum(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one task for one update, in attempt order. index: submission number in the run.

    everyone: the trajectories, each followed by its copies.
    """

    group_id: str
    index: int
    epoch: int
    position: int
    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def everyone(self) -> tuple[Trajectory, ...]:
        return tuple(one for trajectory in self.trajectories for one in (trajectory, *trajectory.copies))


def group_id(index: int) -> str:
    """Return `g000012` for the thirteenth group of a run."""
    return f"g{index:06d}"


def trajectory_id(group: str, attempt: int) -> str:
    """Return `g000012.3` for the fourth attempt of that group. Its copies append their role: `g000012.3.opponent`."""
    return f"{group}.{attempt}"


def role_of(trajectory_id: str) -> str:
    """Return the role in the id of a copy's trajectory; "" for any other id."""
    _, attempt, role = (*trajectory_id.split(".", 2), "", "")[:3]
    return role if attempt.isdecimal() else ""


def as_messages(
    value: Sequence[Mapping[str, Any]], where: str, limits: ImageLimits | None = None
) -> tuple[Message, ...]:
    """Check and copy chat messages from outside. where: prefix of errors. limits: of images.

    Content may be a list of parts: texts `{"type": "text", "text": ...}`, and images `{"type": "image", "image": ...}`
    (a Pillow image, the bytes of a file, a `Path` or a data URL) or `{"type": "image_url", "image_url": {"url": ...}}`.
    Raises DataError, also for an image that cannot be read.
    """
    if isinstance(value, str | Mapping):
        raise DataError(f"{where} must be a list of messages, got {type(value).__name__}")
    messages = tuple(_as_message(message, f"{where}: message {number}", limits) for number, message in enumerate(value))
    for number, message in enumerate(messages):
        if problem := json_problem(message):
            raise DataError(f"{where}: message {number}: {problem}")
    return messages


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as OpenAI's chat completions take it: images as parts of the content."""
    if not message.get("images"):
        return message
    parts: list[Any] = []
    images = iter(message["images"])
    for number, text in enumerate(message["content"].split(PLACE)):
        if number:
            parts.append({"type": "image_url", "image_url": {"url": next(images)}})
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**{key: item for key, item in message.items() if key != "images"}, "content": parts}


_OPTIONAL = ("reasoning_content", "tool_call_id", "name")


def _as_message(value: Any, where: str, limits: ImageLimits | None) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or role is None or ("content" not in value and role != "assistant"):
        raise DataError(f"{where} needs 'role' and 'content', got {_shown(value)!r:.500}")
    content, images = _as_content(value.get("content"), role, where, limits)
    if not isinstance(value["role"], str) or content is None:
        raise DataError(f"{where} needs string role and content, got {_shown(value)!r:.500}")
    message = Message(role=value["role"], content=content)
    known = {"role", "content", "tool_calls", "images", *_OPTIONAL}
    if unknown := sorted(map(str, value.keys() - known)):
        raise DataError(f"{where} has unknown keys {unknown}; known: role, content, tool_calls, {', '.join(_OPTIONAL)}")
    for key in _OPTIONAL:
        if value.get(key) is not None:
            if not isinstance(value[key], str):
                raise DataError(f"{where}: {key} must be a string, got {value[key]!r:.500}")
            message[key] = value[key]  # type: ignore[literal-required]
    if value.get("tool_calls"):
        message["tool_calls"] = [_as_tool_call(call, where) for call in value["tool_calls"]]
    images += [
        _as_image(image, f"{where}: image {number}", limits) for number, image in enumerate(value.get("images") or ())
    ]
    if images:
        if role == "assistant":
            raise DataError(f"{where}: images cannot be in an assistant's message; a model here samples text")
        if content.count(PLACE) != len(images):
            raise DataError(
                f"{where} has {len(images)} images and {content.count(PLACE)} places for them (the character U+FFFC of "
                "its content); give images as parts of the content, and leave that character out of texts beside them"
            )
        message["images"] = images
    return message


def _as_content(content: Any, role: Any, where: str, limits: ImageLimits | None) -> tuple[str | None, list[str]]:
    """Return content as text, with `PLACE` for each image of its parts, and these as data URLs.

    Text is "" for an assistant without any, None for content of another kind.
    """
    if content is None:
        return ("" if role == "assistant" else None), []
    if not isinstance(content, list | tuple):
        return (content if isinstance(content, str) else None), []
    texts: list[str] = []
    images: list[str] = []
    joint = "" if role == "assistant" else "\n"
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            if texts and texts[-1] != PLACE:
                texts.append(joint)
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            inner = part.get(kind)
            source = inner.get("url") if isinstance(inner, Mapping) else inner
            images.append(_as_image(source, f"{where}: image {len(images)}", limits))
            texts.append(PLACE)
        else:
            return None, []
    return "".join(texts), images


def _as_image(source: Any, where: str, limits: ImageLimits | None) -> str:
    try:
        return data_url(source, limits)
    except DataError as error:
        raise DataError(f"{where}{str(error).removeprefix('image')}") from error


def _shown(value: Any) -> Any:
    """Return a value for an error message, without the data of images."""
    if isinstance(value, Mapping):
        return {key: _shown(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(part) for part in value[:100]]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, str) and value[:5].lower() == "data:":
        return f"{value.partition(',')[0][:40]},..."
    return value


def arguments_text(arguments: Any) -> str:
    """Return a tool call's arguments as JSON text; empty forms sent by some clients (`""`, null, []) become `{}`."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return "{}" if text.strip() in ("", "null", "[]") else text


def _as_tool_call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs function.name and function.arguments, got {value!r}")
    called = FunctionCall(name=function["name"], arguments=arguments_text(function.get("arguments")))
    return ToolCall(id=str(value.get("id", "")), type="function", function=called)


def seen_ids(steps: Iterable[Step]) -> Iterator[Ids]:
    """Yield each step's ids int32[P + C], with ids of their own for the placeholders of images (`ImageIds`): they agree
    as far as the model saw the same.
    """
    own = ImageIds()
    for step in steps:
        yield np.concatenate([own.put(step.prompt_ids, step.images), step.completion_ids])


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of leading ids, or rows if [L, width], on which a and b agree."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    places = np.flatnonzero(different if different.ndim == 1 else different.any(1))
    return int(places[0]) if len(places) else size
