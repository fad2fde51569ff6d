"""`Conversation`: the prompts of one session, rendered from messages such that recorded ids are kept.

messages -> which of them are recorded replies?                 rendering/identity.py, _match
         -> text by the chat template, with marks               rendering/template.py, splices.py
         -> positions of the replies; are they kept?            rendering/splices.py
         -> recorded ids for kept replies, the rest encoded     rendering/structure.py, _assemble
         -> if earlier ids are not kept: why?                   rendering/identity.py, _cause
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import BreakCause, Ids, Message
from treadle.rendering import identity
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.identity import Prompt, Record, Rendering, Span
from treadle.rendering.probes import shape
from treadle.rendering.replies import THOUGHT
from treadle.rendering.splices import Marked, Marks, locate
from treadle.rendering.structure import any_of
from treadle.rendering.template import ChatTemplate, Opening, Plain

_TAGS = re.compile(r"</?think>")  # templates read them in content
_Rendered = tuple[Ids, BreakCause | None, Rendering]


@dataclass(frozen=True, eq=False)
class _Draft:
    """A conversation as text. shown: messages as passed to the template. write: renders such messages."""

    values: tuple[identity.Value, ...]
    replies: tuple[Record | None, ...]
    shown: list[Plain]
    text: str
    write: Callable[[list[Plain]], str]
    setting: _Setting

    @cached_property
    def marked(self) -> Marked | None:
        """Positions of message parts in the text; None if marks change the template's output."""
        setter = Marks()
        try:
            unmarked, places = setter.read(self.write(setter.mark(self.shown)))
        except DataError:
            return None
        return places if unmarked == self.text else None


@dataclass(frozen=True, slots=True)
class _Setting:
    """Tools and options of a call (key: both as one string), and the template's opening of a turn with them."""

    template: ChatTemplate
    tools: list[Any] | None
    options: Mapping[str, Any]
    key: str
    opening: Opening


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Recorded ids that replace text[start:end] of a prompt.

    after: the last id, if it is an end token. spans: positions of the replies in it, if there are several.
    """

    start: int
    end: int
    ids: Ids
    after: int | None
    spans: tuple[Span, ...] = ()


_KeptAndLost = tuple[list[_Kept], Mapping[int, BreakCause]]
"""Kept parts, in order, and the causes of replies not kept."""


class Conversation:
    """Renders one session's calls and remembers what was sampled.

    Invariant: a recorded reply that a prompt contains with all its parts keeps its sampled ids, after the ids of its
    own prompt; if the agent got only a part of it, the ids of that part's text. Calls may be rendered while others are
    still being sampled, and recorded from another thread. The date in templates is that of the run's beginning, or the
    conversation's.

    notes: parts of tools that the template leaves out, one line per tool.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer, self._structure = renderer, renderer.structure
        self._records: list[Record] = []
        self._by_value: dict[identity.Value, list[Record]] = {}
        self._settings: dict[str, _Setting] = {}
        self.notes: list[str] = []
        self._began = renderer.began or datetime.now()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Prompt:
        """Render the prompt of a call with these messages and tools (JSON schemas, as in OpenAI's API).

        template_kwargs: template options, which override the renderer's own. continue_final_message: whether the
        completion continues the last message, which must be the assistant's.

        Raises DataError if the template refuses the conversation, or does not write the tools.
        """
        messages = self._renderer.merged(tuple(messages))
        setting = self._setting(tools, template_kwargs or {})
        render = self._continued if continue_final_message else self._answered
        ids, cause, rendering = render(messages, setting)
        # May be a memoized piece, shared with other prompts.
        ids.flags.writeable = False
        return Prompt(ids, messages, cause, rendering, self._renderer.images.placed(ids, messages))

    def record(self, prompt: Prompt, completion_ids: Ids, reply: Message, whole: bool = True) -> Record:
        """Remember the completion for a prompt of `render`, and the message that the agent got for it.

        whole: whether the message contains everything sampled. Otherwise later prompts render it by the template.
        """
        if prompt.rendering is None:
            raise DataError("only a prompt rendered from messages can be continued by messages")
        if prompt.rendering.opened:
            reply = {**reply, "content": prompt.rendering.opened + identity.flat(reply["content"])}
        last = int(completion_ids[-1]) if len(completion_ids) else -1
        stop = next((name for name, ident in self._structure.stops.items() if ident == last), "")
        record = Record(np.concatenate([prompt.ids, completion_ids]), prompt.rendering, reply, stop, whole)
        self._records.append(record)
        self._by_value.setdefault(record.value, []).append(record)
        return record

    def demonstrated(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """Return the ids of the last message, a reply, as a model would sample it after the prompt of the others.

        These are the template's text for it, including thoughts and tool calls, up to its end token. Raises DataError
        if the template leaves out part of the reply, or does not begin it with its generation prompt.
        """
        messages = self._renderer.merged(tuple(messages))
        setting, message = self._setting(tools, {}), messages[-1]
        as_text = setting.template.arguments_as_text
        shown = [_shown(m, False, as_text, self._renderer.roles) for m in messages]
        # gpt-oss writes earlier thoughts in a prompt, and not before a reply.
        for m in shown[:-1]:
            for key in ("reasoning_content", "thinking"):
                m.pop(key, None)
        write = partial(self._renderer.write, tools=setting.tools, options=setting.options)
        prompt, text = write(shown[:-1], generation_prompt=True), write(shown, generation_prompt=False)
        self._check_complete(shown, [*messages[:-1], None], setting, asks=False)
        same = next((n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
        if prompt[same:].strip():
            written, asked = (self._structure.plain(t)[-80:] for t in (text, prompt))
            raise DataError(f"the chat template writes this reply as {written!r}, and prompts for it with {asked!r}")
        follows: Plain = {"role": "tool" if message.get("tool_calls") else "user", "content": "-"}
        # Some templates end a turn only where the next one begins.
        with suppress(DataError):
            longer = write([*shown, follows], generation_prompt=False)
            text = longer if longer.startswith(text) else text
        reply = text[same:]
        end = any_of(self._structure.stops).search(reply)
        reply = reply[: end.end()] if end else reply
        if lost := next((t for t in _TAGS.split(identity.flat(message["content"])) if t.strip() not in reply), ""):
            raise DataError(f"the chat template leaves out {lost.strip()[:80]!r} of this reply")
        ids = self._structure.encode(reply)
        return np.concatenate(ids if end else [*ids, self._renderer.end_of_turn])

    # Two kinds of prompts

    def _answered(self, messages: tuple[Message, ...], setting: _Setting) -> _Rendered:
        """Render messages and the generation prompt."""
        draft = self._draft(messages, setting)
        opening = setting.opening
        if opening.prompt and draft.text.endswith(opening.prompt) and self._structure.pattern.match(opening.prompt):
            begin = len(draft.text) - len(opening.prompt)
            return self._assemble(draft, begin, opening.kept or opening.prompt)
        begin = self._last_token(draft.text)
        return self._assemble(draft, begin, draft.text[begin:])

    def _continued(self, messages: tuple[Message, ...], setting: _Setting) -> _Rendered:
        """Render with the last message left open; after a recorded part of it, only new text is encoded."""
        if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise DataError("continue_final_message needs an assistant message without tool calls at the end")
        body, opened = messages[:-1], identity.flat(messages[-1]["content"])
        values = tuple(map(identity.value, body))
        begun = [record for record in self._records if record.answers(values, len(values)) and record.opens(opened)]
        if not begun and opened.strip():
            return self._prefill(messages, opened, setting)
        ids, cause, rendering = self._answered(body, setting)
        if begun:
            record = max(reversed(begun), key=lambda r: len(r.message["content"]))
            rest = opened[len(record.message["content"]) :]
            # any will do: it only prevents encoding as a sequence's beginning
            before = next(iter(self._structure.stops.values()), None)
            new = self._structure.encode(rest, before)
            ids = np.concatenate([ids[: rendering.turn], record.turn, *new])
            cause = None if record.begins(ids) else _template_change(record, rendering)
        return ids, cause, replace(rendering, opened=opened)

    def _prefill(self, messages: tuple[Message, ...], opened: str, setting: _Setting) -> _Rendered:
        """Render the last message by the template, up to the end of its content."""
        draft = self._draft(messages, setting, open_end=True)
        content = draft.shown[-1]["content"]
        inner, blank = content.strip(), content[len(content.rstrip()) :]
        if draft.marked is None:
            start = draft.text.rfind(inner)
            end = start + len(inner)
        else:
            start, end = draft.marked.parts.get(len(messages) - 1, {}).get("content", (-1, -1))
        if start < 0:
            raise DataError(f"the chat template does not write out the message to continue: {opened[:80]!r}")
        end += len(blank) if draft.text.startswith(blank, end) else 0
        before, kept = draft.text[:start], setting.opening.kept
        begin = before.rfind(kept) if kept and kept in before else self._last_token(before)
        ids, cause, rendering = self._assemble(draft, begin, kept or before[begin:], end)
        return ids, cause, replace(rendering, opened=opened)

    # The steps of rendering

    def _setting(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> _Setting:
        options = {**self._renderer.options, **options}
        key = json.dumps([list(tools), options], default=str) if tools or options else ""
        if key not in self._settings:
            if tools and (problem := self._renderer.tools_problem()):
                raise DataError(problem)
            template = self._renderer.template(tools)
            shown = [_data(tool) for tool in tools] or None
            self.notes += self._renderer.tools_notes(tools)
            self._settings[key] = _Setting(template, shown, options, key, template.opening(options))
        return self._settings[key]

    def _draft(self, messages: tuple[Message, ...], setting: _Setting, open_end: bool = False) -> _Draft:
        """Render the text of the conversation. open_end: the last message, not a recorded one, is continued."""
        closed = messages[:-1] if open_end else messages
        values = tuple(map(identity.value, closed))
        replies = self._match(closed, values)
        as_text = setting.template.arguments_as_text
        shown = [
            _shown(record.message if record else message, record is not None, as_text, self._renderer.roles)
            for message, record in zip_longest(messages, replies)
        ]
        options = {**setting.options, "strftime_now": self._began.strftime}

        def write(messages: list[Plain]) -> str:
            return self._renderer.write(messages, setting.tools, options, generation_prompt=not open_end)

        text = write(shown)
        self._check_complete(shown[: len(closed)], replies, setting)
        for number, message in enumerate(closed):
            if (said := _before_thought(message)) not in text and replies[number] is None:
                raise DataError(f"the chat template leaves out {said[:80]!r} of message {number + 1}")
        return _Draft(values, replies, shown, text, write, setting)

    def _check_complete(
        self, shown: Sequence[Plain], replies: Sequence[object], setting: _Setting, asks: bool = True
    ) -> None:
        """Raise DataError if the template leaves out parts of messages; for recorded replies that is a break."""
        for number, part in self._renderer.left_out(setting.key, shape(shown), asks):
            if replies[number] is None:
                message = shown[number]
                role, text = message["role"], message["content"] if part == "content" else part
                raise DataError(
                    f"the chat template leaves out the {part} of message {number + 1} ({role}: {text[:60]!r}), so that "
                    "the model would never see it; map its role to another (model.roles: {developer: system}, or "
                    "{tool: user}), or use a template that writes it (model.chat_template)"
                )

    def _match(self, messages: Sequence[Message], values: tuple[identity.Value, ...]) -> tuple[Record | None, ...]:
        """Find each message's recorded reply, last one first: its record identifies all before it."""
        records: list[Record | None] = [None] * len(messages)
        for number in range(len(messages) - 1, -1, -1):
            candidates = self._by_value.get(values[number], []) if messages[number]["role"] == "assistant" else []
            if candidates and (thought := identity.reasoning(messages[number])):
                candidates = [record for record in candidates if record.thought == thought]
            if not candidates:
                continue
            calls = identity.call_ids(messages[number])
            ranked = [((bool(calls & r.call_ids), r.answers(values, number)), r) for r in reversed(candidates)]
            (_, answers), best = max(ranked, key=itemgetter(0))
            records[number] = best
            if answers:
                return (*best.rendering.replies, *records[number:])
        return tuple(records)

    def _last_token(self, text: str) -> int:
        """Return the start of the last structural token."""
        return max((match.start() for match in self._structure.pattern.finditer(text)), default=0)

    def _assemble(self, draft: _Draft, begin: int, head: str, end: int | None = None) -> _Rendered:
        """Join recorded ids of kept replies and encoded text. text[begin:end] opens the turn, with `head`."""
        text = draft.text[:end]
        kept, lost = self._carried_on(draft, text) or self._spliced(draft, text)
        pieces: list[Ids] = []
        spans: list[Span] = []
        # End of the encoded text, end token before the rest, number of ids.
        at, after, tokens = 0, None, 0
        for reply in kept:
            between = self._structure.encode(text[at : reply.start], after)
            tokens += sum(map(len, between))
            spans += reply.spans or [(reply.start, reply.end, tokens, tokens + len(reply.ids))]
            pieces += [*between, reply.ids]
            at, after, tokens = reply.end, reply.after, tokens + len(reply.ids)
        begin = max(at, begin)
        before = self._structure.encode(text[at:begin], after)
        rendering = Rendering(
            text=text,
            spans=tuple(spans),
            turn=tokens + sum(map(len, before)),
            head=head,
            values=draft.values,
            replies=draft.replies,
            lost=lost,
            setting=draft.setting.key,
        )
        pieces += [*before, *self._structure.encode(text[begin:], None if before else after)]
        ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        return ids, self._cause(ids, rendering), rendering

    def _carried_on(self, draft: _Draft, text: str) -> _KeptAndLost | None:
        """Fast path without marks: the text extends an earlier call's text and its reply's bare content.

        None if this fast path does not apply.
        """
        number = max((n for n, record in enumerate(draft.replies) if record), default=-1)
        record = draft.replies[number] if number >= 0 else None
        if record is None or not record.bare or record.rendering.setting != draft.setting.key:
            return None
        earlier, content = record.rendering, draft.shown[number]["content"].strip()
        if not record.answers(draft.values, number) or not text.startswith(earlier.text):
            return None
        reply = text[len(earlier.text) :].lstrip()
        rest = reply[len(content) :].lstrip()
        end = self._renderer.ends(draft.setting.template).match(rest)
        if not reply.startswith(content) or end is None or record.stop not in ("", end[0]):
            return None
        at = len(text) - len(rest) + len(record.stop)
        span = text.rfind(earlier.head, 0, len(earlier.text)), at, earlier.turn, len(record.ids)
        after = int(record.ids[-1]) if record.stop else None
        return [_Kept(0, at, record.ids, after, (*earlier.spans, span))], earlier.lost

    def _spliced(self, draft: _Draft, text: str) -> _KeptAndLost:
        """Find each reply by the marks around its parts."""
        recorded = [(number, record) for number, record in enumerate(draft.replies) if record]
        replies = {number: record for number, record in recorded if record.whole}
        cut = dict.fromkeys((number for number, record in recorded if not record.whole), BreakCause.CALLS_WITHHELD)
        if not replies:
            return [], cut
        ends = self._renderer.ends(draft.setting.template)
        splices, lost = locate(text, draft.shown, replies, draft.marked, ends)
        kept = []
        for splice in splices:
            record = replies[splice.message]
            turn = record.turn if splice.stopped or not record.stop else record.turn[:-1]
            kept.append(_Kept(splice.start, splice.end, turn, int(turn[-1]) if splice.stopped else None))
        return kept, {**lost, **cut}

    def _cause(self, ids: Ids, rendering: Rendering) -> BreakCause | None:
        """Return why the ids do not begin with those of the call continued by the messages."""
        values = rendering.values
        last = max((n for n, (role, *_) in enumerate(values) if role == "assistant"), default=None)
        if last is None or not self._records:
            return None
        parent = rendering.replies[last]
        if parent is not None and parent.answers(values, last):
            return None if parent.begins(ids) else _template_change(parent, rendering)
        others = (record for record in reversed(self._records) if record.rendering.values != values)  # no resamples
        nearest = sorted(others, key=lambda record: -identity.common(record.history, values))
        causes = (identity.agents_change(record.history, values) for record in nearest)
        return next((cause for cause in causes if cause), None)


def _template_change(parent: Record, rendering: Rendering) -> BreakCause:
    """Return the cause if messages were only appended: the one of the first reply that is lost now, but was kept."""
    if parent.rendering.setting != rendering.setting:
        return BreakCause.TOOLS_CHANGED
    lost = (cause for number, cause in sorted(rendering.lost.items()) if number not in parent.rendering.lost)
    return next(lost, BreakCause.REWRITTEN)


def _shown(message: Mapping[str, Any], recorded: bool, as_text: bool, roles: Mapping[str, str]) -> Plain:
    """Convert a message to the plain data passed to the template."""
    shown: Plain = {key: _data(item) for key, item in message.items() if item is not None}
    shown["role"] = roles.get(shown["role"], shown["role"])
    shown["content"] = identity.flat(message.get("content"))
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [_call(call, as_text) for call in calls]
    else:
        shown.pop("tool_calls", None)
    if recorded or _before_thought(message):
        # An empty string keeps templates from looking for a thought in the content.
        shown.setdefault("reasoning_content", "")
    if thought := shown.get("reasoning_content"):
        shown["thinking"] = thought
    return shown


def _before_thought(message: Mapping[str, Any]) -> str:
    """Return the text before a thought in an assistant's content; templates that strip thoughts may drop it, too."""
    before, thought, _ = identity.flat(message.get("content")).partition(THOUGHT)
    return before.strip() if thought and message["role"] == "assistant" else ""


def _call(call: Mapping[str, Any], as_text: bool) -> Plain:
    arguments = call["function"]["arguments"]
    if not as_text and isinstance(value := identity.parsed(arguments), dict):
        arguments = value
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return _data({**call, "function": {**call["function"], "arguments": arguments}})  # type: ignore[no-any-return]


def _data(value: Any) -> Any:
    """Convert to the types that `json` produces."""
    if isinstance(value, Mapping):
        return {key: _data(item) for key, item in value.items()}
    return [_data(item) for item in value] if isinstance(value, list | tuple) else value


def check_turns(renderer: ChatRenderer, messages: Sequence[Message], several: bool) -> None:
    """Raise ConfigError if no stop token ends the template's turns, or they cannot be extended token by token.

    several: whether the conversation may continue after a reply.
    """
    conversation = Conversation(renderer)
    reply = Message(role="assistant", content="-")
    prompt = conversation.render(messages)
    conversation.record(prompt, renderer.reply(reply), reply)
    more = [*messages, reply, Message(role="user", content="-")]
    # A template that ends a reply with another token than the model breaks each turn; the breaks are recorded.
    if several and conversation.render(more).break_cause not in (None, BreakCause.END_TOKEN_REWRITTEN):
        raise ConfigError(
            "the chat template does not write each assistant message exactly once, in order and as sampled, so that it "
            "cannot be extended token by token"
        )
