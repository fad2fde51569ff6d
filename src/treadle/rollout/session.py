"""`Session`: messages in, a message out, one exact `Step` recorded per call."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

import numpy as np

from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion, Engine
from treadle.core.errors import ContextExceeded, DataError, EngineError, TokensExceeded
from treadle.core.outcomes import computed_tokens, was_played
from treadle.core.rewards import Reward
from treadle.core.types import BreakCause, DropReason, Form, Ids, Message, SamplingParams, Step, StopReason, ToolCall
from treadle.rendering import identity
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.forms import Turn, turn_grammar
from treadle.rendering.identity import Prompt, Record
from treadle.rendering.replies import THOUGHT_TAGS, Parser, ReplyParser, Tool, parser_name, plain
from treadle.rollout.replay import AnsweredCall, Prefix, Replay, request_digest

P = ParamSpec("P")
T = TypeVar("T")

_SAMPLING = {f.name for f in fields(SamplingParams)}
_LARGE = 2**15  # characters; take some 30 ms to tokenize
_CUT = 32  # limit on sampled tokens hidden from the client by a stop string and an end token
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="treadle-render")


@dataclass(frozen=True, slots=True)
class Address:
    """Identifies an attempt in the run; with the step number, it keys every random draw of the attempt."""

    seed: int
    stream: Stream
    epoch: int
    position: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Parameters of a session.

    name: the trajectory's id, and the engine's name of the session. sampling: parameters of every call.
    max_input_tokens: longest prompt. max_total_tokens: limit after which no calls are made (`computed_tokens`); 0:
    none. replay: recorder of answered calls, with those already recorded, and the prefix with which it begins.
    """

    name: str
    engine: Engine
    renderer: ChatRenderer
    sampling: SamplingParams
    max_input_tokens: int
    address: Address
    max_total_tokens: int = 0
    replay: Replay | None = None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call, beside messages and tools.

    sampling_overrides: fields of SamplingParams set by the caller: `{"temperature": 0.2}`; and `logit_bias`, ids that
    it forbids. tool_calls: whether to look
    for tool calls in the reply. form: what its content must look like. tool_choice: `required` or a tool's name if it
    must call one. parallel_tool_calls: whether to return more than the first: the others are otherwise in
    no later prompt, and `Step.withheld` counts them. template_kwargs, continue_final_message: for the chat template.
    Only for agent loops: max_tokens, max_input_tokens, parse: override the spec's and the session's. summary: marks the
    step. break_cause: why the conversation does not continue the previous one, if the loop knows better than its
    messages show.
    """

    sampling_overrides: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: bool = True
    form: Form | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    max_tokens: int | None = None
    max_input_tokens: int | None = None
    parse: ReplyParser | None = None
    summary: bool = False
    break_cause: BreakCause | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call: the message for the agent, and the recorded step with its number.

    stop: the stop string that ended it, if any; the message does not contain it. first: number of the call that began
    the conversation, as far as messages show; its own for a raw prompt. values: identities of rendered messages.
    """

    message: Message
    step: Step
    number: int
    stop: str | None = None
    first: int = 0
    values: tuple[identity.Value, ...] = ()

    @property
    def text(self) -> str:
        """The content including the stop string that ended it, as environments receive it."""
        return self.message["content"] + (self.stop or "")

    @property
    def prompt_tokens(self) -> int:
        return self.step.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.step.completion_tokens

    @property
    def stop_reason(self) -> StopReason:
        return self.step.stop_reason


@dataclass(frozen=True, slots=True)
class OtherReply:
    """The answer of a model beside the policy. step: its tokens, for a model in this process; in no trajectory."""

    message: Message
    prompt_tokens: int
    completion_tokens: int
    stop_reason: StopReason
    step: Step | None = None
    stop: str | None = None


class Calls:
    """What all roles of the policy in one attempt share: the engine's session, numbers of calls, sampling versions."""

    def __init__(self, session: str) -> None:
        self.session, self.numbers, self.versions = session, itertools.count(), set[int]()


class Session:
    """Records one attempt at a task. Messages go out to the agent; ids stay here.

    Invariant: `steps[n].prompt_ids` is what the engine was sent, `steps[n].completion_ids` what it sampled. Steps are
    in the order in which calls arrived; several may be in flight. Long prompts are rendered in a thread, and later
    calls of the session wait for them. The engine session is opened on construction and must be closed.

    parse: parser of replies. callers_sampling: whether callers may override the spec's sampling; otherwise they only
    add stop strings, and `notes` describes ignored options, and parts of their tools that the template leaves out.
    context: limit on prompt and completion together, if it bounds a call's `max_tokens`. calls: shared by the sessions
    of one attempt; default: new ones. has_ids: whether steps have ids.
    """

    has_ids: ClassVar[bool] = True

    def __init__(
        self,
        spec: SessionSpec,
        parse: ReplyParser = plain,
        *,
        callers_sampling: bool = False,
        context: int | None = None,
        calls: Calls | None = None,
    ) -> None:
        self.name, self.renderer, self.parse = spec.name, spec.renderer, parse
        self.notes: dict[str, str] = {}
        self._spec, self._callers_sampling, self._context = spec, callers_sampling, context
        self._conversation, self._raw = Conversation(spec.renderer), RawPrompts(spec.renderer)
        self._order = asyncio.Lock()  # serializes rendering: first come, first served
        self._calls = calls or Calls(spec.name)
        self._steps: dict[int, Step] = {}  # by call number
        self._replayed: set[int] = set()  # numbers of the prefix's steps
        self._first: dict[Record, int] = {}  # number of the call that began the reply's conversation
        if calls is None:
            spec.engine.open_session(spec.name)

    def copy(self, role: str) -> Session:
        """Open the session of another role that the policy plays in the same attempt.

        It has its own steps and conversations. Calls of all roles are numbered together, which keys their draws and
        their replay, and share one session of the engine.
        """
        return Session(self._copied(role), calls=self._calls)

    def _copied(self, role: str) -> SessionSpec:
        return replace(self._spec, name=f"{self.name}.{role}")

    @property
    def steps(self) -> list[Step]:
        """Steps recorded so far, in the order in which calls arrived."""
        return [self._steps[number] for number in sorted(self._steps)]

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = CallOptions()
    ) -> Reply:
        """Sample the assistant's reply to a whole conversation and record the call.

        A cancelled call is recorded too, without tokens, as dropped.

        Raises ContextExceeded if the prompt is longer than `max_input_tokens`, TokensExceeded after `max_total_tokens`,
        DataError if the chat template refuses the conversation, or if template or parser cannot handle tools,
        EngineError from the engine or for an answer that cannot be recorded.
        """
        if tools and options.tool_calls and (problem := self.renderer.tools_problem(tools, self.parse)):
            raise DataError(problem)
        async with self._order:
            prompt = await self._render(messages, tools, options)
            self.notes |= {line: line for line in self._conversation.notes}
            if options.break_cause is not None:
                prompt = replace(prompt, break_cause=options.break_cause)
            begun = self._begun(prompt, options.parse or self.parse)
            grammar = self._grammar(tools if options.tool_calls else (), options, bool(begun))
            number = self._numbered(prompt, options.max_input_tokens)
        step, text, stop = await self._sample(number, prompt, options, grammar)
        message = self._message(begun + text, tools if options.tool_calls else (), options, number)
        calls = message.get("tool_calls", [])
        if withheld := 0 if options.parallel_tool_calls else len(calls[1:]):
            message["tool_calls"] = calls[:1]
            step = self._steps[number] = replace(step, withheld=withheld)
        continued = prompt.rendering and prompt.rendering.continues
        first = self._first[continued] if continued else number
        self._first[self._conversation.record(prompt, step.completion_ids, message, whole=not withheld)] = first
        known = prompt.rendering.values if prompt.rendering else ()
        values = (*known, *map(identity.value, prompt.messages[len(known) :]))
        return Reply(message, step, number, stop, first, values)

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = CallOptions()) -> Reply:
        """Sample the continuation of a raw prompt, text or ids, and record the call. Raises as `chat` does.

        Text that continues an earlier call's prompt and completion keeps that call's ids.
        """
        async with self._order:
            rendered = Prompt(await _off_loop(len(prompt), self._raw.ids, prompt))
            grammar = turn_grammar(Turn(options.form), plain, self.renderer.grammars, self.renderer.stop_ids)
            number = self._numbered(rendered)
        step, text, stop = await self._sample(number, rendered, options, grammar)
        self._raw.record(step)
        return Reply(Message(role="assistant", content=text), step, number, stop, number)

    async def count(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), continue_final_message: bool = False
    ) -> int:
        """Count the prompt tokens of such a call. Raises DataError as `chat` does."""
        async with self._order:
            prompt = await self._render(messages, tools, CallOptions(continue_final_message=continue_final_message))
        return len(prompt.ids)

    def set_delivered(self, number: int, delivered: bool) -> None:
        """Record whether call `number`'s answer reached the agent; if not, its step is never trained."""
        kept = DropReason.REPLAYED if number in self._replayed else None
        self._drop(number, kept if delivered else DropReason.CANCELLED)

    def reject(self, number: int) -> None:
        """Record that call `number`'s answer was discarded: its step is neither trained nor counted as played."""
        if self._steps[number].dropped in (None, DropReason.REPLAYED):
            self._drop(number, DropReason.REJECTED)

    def _drop(self, number: int, reason: DropReason | None) -> None:
        self._steps[number] = replace(self._steps[number], dropped=reason)

    def reward_last(self, given: Reward, *, add: bool = False) -> None:
        """Set the reward of the last played step other than a summary, if any. add: add to its existing reward.

        Raises DataError for a wrong number of token rewards, or too large a sum.
        """
        acts = (number for number, step in self._steps.items() if was_played(step) and not step.summary)
        last = max(acts, default=None)
        if given and last is not None:
            given = self._steps[last].given.plus(given) if add else given
            self._steps[last] = replace(self._steps[last], reward=given.total(), given=given)

    def set_state(self, number: int, state: str) -> None:
        """Record the environment's state at call `number`, as a hash of 128 bits; "" for none."""
        if state:
            key = blake2b(state.encode(errors="surrogatepass"), digest_size=16).hexdigest()
            self._steps[number] = replace(self._steps[number], state_key=key)

    def set_answer(self, number: int, answer: str) -> None:
        """Record the environment's answer to call `number`, with its snapshot (`Step.answer`)."""
        self._steps[number] = replace(self._steps[number], answer=answer)

    @property
    def prefix(self) -> Prefix | None:
        """The steps with which the attempt begins."""
        return None if self._spec.replay is None else self._spec.replay.prefix

    async def lose_start(self, why: str) -> NoReturn:
        """Have the attempt played again from the beginning. Never returns."""
        assert self._spec.replay is not None
        await self._spec.replay.lose_start(len(self._steps), why)

    def close(self) -> None:
        """Close the engine's session, which copies share. Idempotent."""
        self._spec.engine.close_session(self._calls.session)

    async def _render(self, messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> Prompt:
        return await _off_loop(
            sum(map(identity.size, messages)) + (len(json.dumps(tools, default=str)) if tools else 0),
            self._conversation.render,
            messages,
            tools,
            template_kwargs=options.template_kwargs,
            continue_final_message=options.continue_final_message,
        )

    def _numbered(self, prompt: Prompt, limit: int | None = None) -> int:
        """Return the call's number, by order of arrival. Raises ContextExceeded and TokensExceeded."""
        longest, whole = self._spec.max_input_tokens, self._spec.max_total_tokens
        limit = longest if limit is None else min(limit, longest)
        if whole and computed_tokens(self.steps) >= whole:
            raise TokensExceeded(whole)
        if len(prompt.ids) > limit:
            raise ContextExceeded(len(prompt.ids), limit, self._context)
        return next(self._calls.numbers)

    def _grammar(self, tools: Sequence[Tool], options: CallOptions, begun: bool) -> str:
        choice = options.tool_choice if options.tool_calls else "auto"
        turn = Turn(options.form, tools, choice, options.parallel_tool_calls, begun)
        parse = options.parse or self.parse
        if not turn.is_free and not turn.demands and not isinstance(parse, Parser):
            # Not refused: clients ask for it by default.
            line = f"calls that {parser_name(parse)} reads have no grammar here: tools are strict in vain"
            self.notes[line] = line
            return ""
        if options.continue_final_message and not turn.is_free:
            raise DataError("a form or strict tools cannot be combined with a reply that continues the last message")
        return turn_grammar(turn, parse, self.renderer.grammars, self.renderer.stop_ids)

    async def _sample(
        self, number: int, prompt: Prompt, options: CallOptions, grammar: str
    ) -> tuple[Step, str, str | None]:
        """Return step, text and stop string of a call."""
        context = await self._spec.replay.context(number, prompt) if self._spec.replay else None
        if context is None:
            step = await self._sampled(number, prompt, options, grammar)
        else:
            step = self._steps[number] = _as_context(context, prompt)
            self._replayed.add(number)
        text = self.renderer.text(step.completion_ids)
        end, stop = min(((text.index(s), s) for s in step.sampling.stop if s in text), default=(len(text), None))
        return step, text[:end], stop

    async def _sampled(self, number: int, prompt: Prompt, options: CallOptions, grammar: str) -> Step:
        """Sample and record a call, or take its answer from the record of the attempt itself."""
        sampling = self._sampling_of(number, options.sampling_overrides, len(prompt.ids))
        if grammar:
            sampling = replace(sampling, grammar=grammar)
        if options.max_tokens is not None:
            sampling = replace(sampling, max_tokens=options.max_tokens)
        engine, replay = self._spec.engine, self._spec.replay
        request = request_digest(prompt.ids, prompt.images, sampling) if replay else b""
        recorded = await replay.answer(number, request) if replay else None
        if recorded is not None and recorded.number != number:
            sampling = replace(sampling, seed=self._seed(recorded.number))
        started, clock, limit = time.time(), time.perf_counter(), sampling.max_tokens

        def record(completion: Completion, dropped: DropReason | None = None) -> Step:
            self._calls.versions.update(span.version for span in completion.policy_versions)
            self._steps[number] = Step(
                prompt_ids=prompt.ids,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                policy_versions=completion.versions_per_token(),
                sampling=sampling,
                stop_reason=completion.stop_reason,
                started=started,
                seconds=time.perf_counter() - clock,
                waited=completion.waited,
                break_cause=prompt.break_cause,
                dropped=dropped,
                summary=options.summary,
                routing=completion.routing,
                support=completion.support,
                probabilities=completion.probabilities,
                images=prompt.images,
            )
            return self._steps[number]

        try:
            if recorded is None:
                completion = await engine.generate(
                    prompt.ids, sampling, session=self._calls.session, images=prompt.images
                )
                await self._check_version(number, completion)
            else:
                completion = recorded.completion
        except asyncio.CancelledError as error:
            if (current := asyncio.current_task()) is not None and not current.cancelling():
                raise EngineError(f"step {number}: the engine cancelled the call by itself") from error
            nothing = Completion(np.empty(0, np.int32), np.empty(0, np.float32), StopReason.ABORT, ())
            record(nothing, DropReason.CANCELLED)
            raise
        try:
            if not 0 < len(completion.token_ids) <= limit:
                raise DataError(f"it has {len(completion.token_ids)} tokens, 1 to {limit} were requested")
            if sampling.constrains:
                self.renderer.grammars.check(sampling, completion.token_ids)
            step = record(completion)
        except DataError as error:
            raise EngineError(f"step {number}: the engine's answer cannot be recorded: {error}") from error
        if replay and recorded is None:
            replay.keep(AnsweredCall(number, request, completion))
        return step

    async def _check_version(self, number: int, completion: Completion) -> None:
        """Raise EngineError if an engine that pins sessions has lost the version of earlier calls. An
        attempt that is being replayed is played again without its recorded calls instead.
        """
        versions, earlier = {span.version for span in completion.policy_versions}, self._calls.versions
        if not completion.pinned or not earlier or versions <= earlier:
            return
        if self._spec.replay and self._spec.replay.count:
            await self._spec.replay.give_up(number, outdated=True)
        raise EngineError(
            f"step {number} was sampled by version {max(versions)} and earlier steps by version {max(earlier)}, "
            "which the engine lost when it was restarted: training.lora.pin_attempts keeps an attempt to one"
        )

    def _sampling_of(self, number: int, overrides: Mapping[str, Any], prompt_tokens: int) -> SamplingParams:
        recipe = self._spec.sampling
        seeded = replace(recipe, seed=self._seed(number))
        if self._callers_sampling:
            if isinstance(ids := overrides.get("logit_bias"), tuple):
                overrides = {**overrides, "forbidden": ids}
                del overrides["logit_bias"]
            for name in sorted(overrides.keys() - _SAMPLING):
                raise DataError(f"{name} is {overrides[name]}; no engine here samples that way, leave it out")
            sampling = replace(seeded, **overrides)
        else:
            others = {name: value for name, value in overrides.items() if name != "stop"}
            ignored = {n: v for n, v in others.items() if n == "seed" or getattr(recipe, n, None) != v}
            for name in sorted(ignored.keys() - self.notes.keys()):
                self.notes[name] = f"agents request another {name}; the recipe's is used (rollout)"
            sampling = replace(seeded, stop=tuple(dict.fromkeys((*recipe.stop, *overrides.get("stop", ())))))
        if self._context is None:
            return sampling
        return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, self._context - prompt_tokens)))

    def _seed(self, number: int) -> int:
        a = self._spec.address
        return call_seed(a.seed, a.stream, a.epoch, a.position, a.attempt, number)

    def _begun(self, prompt: Prompt, parse: ReplyParser) -> str:
        """Return the tag of a thought that the prompt leaves open, for parsers that extract thoughts."""
        if prompt.rendering is None or not getattr(parse, "thoughts", True):
            return ""
        turn = self.renderer.decode(prompt.ids[prompt.rendering.turn :])
        opening, closing = getattr(parse, "tags", THOUGHT_TAGS[0])
        return opening if turn.rfind(opening) > turn.rfind(closing) else ""

    def _message(self, text: str, tools: Sequence[Tool], options: CallOptions, number: int) -> Message:
        """Parse a reply. Tool calls without an id get one that is the same in every repetition of the run."""
        message = (options.parse or self.parse)(text, tools)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                ToolCall(id=c["id"] or f"c{number:05d}{i:03d}", type="function", function=c["function"])
                for i, c in enumerate(calls)
            ]
        return message


def _as_context(step: Step, prompt: Prompt) -> Step:
    """Return a recorded step as context of another attempt, whose environment rewards it anew."""
    return replace(
        step,
        dropped=DropReason.REPLAYED,
        break_cause=prompt.break_cause,
        reward=0.0,
        shaping=0.0,
        given=Reward(),
        state_key="",
        started=time.time(),
        seconds=0.0,
        waited=None,
        withheld=0,
        chat=None,
    )


async def _off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, in a thread if the `size` of its input is large, to keep the event loop responsive."""
    if size < _LARGE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: work(*args, **kwargs))


class RawPrompts:
    """Turns raw prompts into ids, reusing the recorded ids of an earlier call that the text continues.

    Text is matched against the decoded ids of earlier calls, prompt and completion; the longest wins.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._records: list[tuple[str, Step]] = []  # the prompt's text and the call

    def ids(self, prompt: str | Sequence[int]) -> Ids:
        """Return the prompt's ids, int32[P]. Raises DataError for an empty prompt or ids outside the vocabulary."""
        if isinstance(prompt, str):
            kept, rest = self._longest(prompt)
            ids = np.concatenate([kept, self._renderer.encode(rest)])
        else:
            ids, size = np.asarray(prompt), self._renderer.vocabulary
            if ids.dtype.kind not in "iu" or ids.ndim != 1 or not ((ids >= 0) & (ids < size)).all():
                raise DataError(f"a prompt of token ids must be a list of integers in [0, {size})")
        if not len(ids):
            raise DataError("the prompt is empty: a completion needs at least one token before it")
        return ids.astype(np.int32)

    def record(self, step: Step) -> None:
        self._records.append((self._renderer.decode(step.prompt_ids), step))

    def _longest(self, text: str) -> tuple[Ids, str]:
        """Return the reusable ids, and the text after them."""
        best, length = np.empty(0, np.int32), 0
        for prompt, step in reversed(self._records):
            if len(prompt) > length and text.startswith(prompt):
                ids, same = self._kept(text, prompt, step)
                if len(same) > length:
                    best, length = ids, len(same)
        return best, text[length:]

    def _kept(self, text: str, prompt: str, step: Step) -> tuple[Ids, str]:
        """Return as many of the call's ids as the text repeats, without splitting any, and their text."""
        ids, start = step.full_ids, len(step.prompt_ids)
        for end in range(len(ids), max(start, len(ids) - _CUT), -1):
            decoded = self._renderer.decode(ids[:end])
            if text.startswith(decoded):
                return ids[:end], decoded
        return step.prompt_ids, prompt
