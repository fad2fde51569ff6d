r"""`Transcript`: the messages of a prompt, read back from its ids.

    <|im_start|>user\n  Who?  <|im_end|>\n<|im_start|>assistant\n  A.  <|im_end|>\n
    `---- head ------´        `------------ separator -----------´      `- tail, with the generation prompt

The template's text between messages of two roles is found by rendering examples. It has structural tokens, which no
message can contain (`structure.Structure`). The result is rendered again, and must give the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product

from treadle.core.errors import DataError
from treadle.core.types import Message, Step
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.structure import any_of
from treadle.rendering.template import Plain

_ROLES = ("user", "system", "assistant", "tool")  # the first one wins if a template writes two alike
_BEFORE = ((), ("user",), ("system", "user"), ("user", "assistant"))  # templates refuse some openings
_AFTER = ((), ("user",))  # and write the last reply differently from earlier ones
_WORD = "zqz{}z"


class Transcript:
    """Reads back the messages of recorded prompts with the template that wrote them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def messages(self, step: Step, reply: bool = False) -> list[Message]:
        """Return the messages of a step's prompt. reply: append the completion as the assistant's message.

        Tools are text of the system message, and calls text of the assistant's. Raises DataError if the prompt's
        messages cannot be told apart by this template.
        """
        text = self._renderer.structure.text(step.prompt_ids)
        messages = self._read(text)
        if messages is None or self._write(messages, generation_prompt=True) != text:
            shown = self._renderer.structure.plain(text)
            raise DataError(f"the messages of this prompt cannot be read back from the chat template: {shown[:200]!r}")
        if reply:
            messages.append(Message(role="assistant", content=self._renderer.text(step.completion_ids)))
        return messages

    def _read(self, text: str) -> list[Message] | None:
        heads, separators, tails = self._written
        head = any_of(heads).match(text)
        if head is None:
            return None
        at, role = head.end(), heads[head[0]]
        messages: list[Message] = []
        while True:
            separator = any_of(separators[role]).search(text, at)
            end = next((len(text) - len(tail) for tail in tails[role] if text.endswith(tail, at)), None)
            if end is not None and (separator is None or separator.start() >= end):
                return [*messages, Message(role=role, content=text[at:end])]
            if separator is None:
                return None
            messages.append(Message(role=role, content=text[at : separator.start()]))
            at, role = separator.end(), separators[role][separator[0]]

    @cached_property
    def _written(self) -> tuple[dict[str, str], dict[str, dict[str, str]], dict[str, list[str]]]:
        """Return three tables of the template's texts: before the first message -> its role; between two messages, by
        the first role -> the second role; texts after the last message, including the generation prompt, by its role.
        """
        heads: dict[str, str] = {}
        separators: dict[str, dict[str, str]] = {role: {} for role in _ROLES}
        tails: dict[str, list[str]] = {role: [] for role in _ROLES}
        for role, after in product(_ROLES, _AFTER):
            for parts in self._example((role, *after)):
                heads.setdefault(parts[0], role)
        for role, before in product(_ROLES, _BEFORE):
            tails[role] += [parts[-1] for parts in self._example((*before, role), generation_prompt=True)]
        for first, second, before, after in product(_ROLES, _ROLES, _BEFORE, _AFTER):
            for parts in self._example((*before, first, second, *after)):
                separators[first].setdefault(parts[len(before) + 1], second)
        structural = self._renderer.structure.pattern.search
        separators = {r: {s: b for s, b in found.items() if structural(s)} for r, found in separators.items()}
        return heads, separators, {role: sorted(set(found), key=len, reverse=True) for role, found in tails.items()}

    def _example(self, roles: Sequence[str], generation_prompt: bool = False) -> Iterator[list[str]]:
        """Yield the template's text before, between and after messages of these roles, unless it refuses them."""
        words = [_WORD.format(number) for number in range(len(roles))]
        talk = [Message(role=role, content=word) for role, word in zip(roles, words, strict=True)]
        try:
            rest = self._write(talk, generation_prompt)
        except DataError:
            return
        parts = []
        for word in words:
            before, found, rest = rest.partition(word)
            if not found:
                return
            parts.append(before)
        yield [*parts, rest]

    def _write(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        renderer = self._renderer
        shown: list[Plain] = [{"role": m["role"], "content": m["content"]} for m in messages]
        options = {**renderer.options, "strftime_now": (renderer.began or datetime.now()).strftime}
        return renderer.write(shown, None, options, generation_prompt)
