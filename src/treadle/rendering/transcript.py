r"""`Transcript`: the messages of a prompt, read back from its ids.

    <|im_start|>user\n  Who?  <|im_end|>\n<|im_start|>assistant\n  A.  <|im_end|>\n
    `---- head ------´        `------------ separator -----------´      `- tail, with the generation prompt

What the template writes between messages of two roles is found by rendering examples. It has structural tokens, which
no message can contain (`structure.Structure`). What was read is rendered again, and must be the same text.
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

_ROLES = ("user", "system", "assistant", "tool")  # the first, where a template writes two alike
_BEFORE = ((), ("user",), ("system", "user"), ("user", "assistant"))  # templates refuse some beginnings
_AFTER = ((), ("user",))  # and write the last reply otherwise than earlier ones
_WORD = "zqz{}z"


class Transcript:
    """Reads the messages of recorded prompts with the template that wrote them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def messages(self, step: Step, reply: bool = False) -> list[Message]:
        """Return the messages of a step's prompt. reply: and what was sampled, as the assistant's.

        Tools are text of the system message, and so are calls of the assistant's. Raises DataError for a prompt that
        the template does not write from messages that can be told apart.
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
        """What the template writes before the first message -> its role; between two of them, by the role of the first
        -> that of the second; and after the last one, the generation prompt included, by its role.
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
        """Yield what the template writes before, between and after messages of these roles, if it takes them."""
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
