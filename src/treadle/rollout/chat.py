"""From chat messages to prompt ids, without ever tokenizing again what was sampled.

    first prompt = encode(template(messages))
    next prompt  = the ids of the call before, prompt and completion
                 + encode(what the template writes between that reply and the next one)

Append-only conversations are thereby exact by construction: `prompt[n + 1]` begins with `prompt[n] + completion[n]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Ids, Message

_MARK = "\ue000reply\ue001"  # stands for the assistant's reply while the template renders; private-use characters


class Tokenizer(Protocol):
    """What Treadle needs of a Hugging Face tokenizer."""

    def __len__(self) -> int:
        """How many ids there are."""
        ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Text of the conversation."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Token ids of the text."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Text of the ids."""
        ...


class ChatRenderer:
    """Builds prompts for one tokenizer and its chat template.

    stop_token_ids: the ids that end a completion; a sampled one stands for the template's own end of turn.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_text = {int(i): str(tokenizer.decode([int(i)], skip_special_tokens=False)) for i in stop_token_ids}
        self._encode = lru_cache(maxsize=65536)(self._encode_text)

    def first(self, messages: Sequence[Message]) -> Ids:
        """The first prompt, int32[P]: the rendered messages and the generation prompt."""
        return self._encode(self._render(messages))

    def next(self, previous: Ids, history: Sequence[Message], new: Sequence[Message]) -> Ids:
        """The prompt after a reply.

        previous: the ids of the call before, prompt and completion. history: the messages it was rendered from.
        new: the messages that follow the reply. Returns int32[P], which begins with `previous`. If the reply did not
        end with a stop token (cut by length, or by a stop string), the template's end of turn is appended for it.

        Raises ConfigError for a chat template that does not write an assistant message out exactly once, DataError
        for one that refuses the conversation.
        """
        _before, between = self._around_reply(history, new)
        ended_by = self._stop_text.get(int(previous[-1]))
        if ended_by is not None:
            between = between.removeprefix(ended_by)
        return np.concatenate([previous, self._encode(between)])

    def reply(self, text: str) -> Ids:
        """A reply as a model would ideally sample it: its tokens and the template's end token (for demonstrations)."""
        return np.concatenate([self._encode(text), self._end_of_turn])

    @cached_property
    def _end_of_turn(self) -> Ids:
        """The template's own end token, int32[1]."""
        _before, after = self._around_reply([Message(role="user", content="-")], [])
        for ident, end in self._stop_text.items():
            if after.startswith(end):
                return np.array([ident], np.int32)
        raise ConfigError(
            f"the chat template ends a turn with {after[:20]!r}, none of the stop tokens {self._stop_text}; "
            "make it the tokenizer's eos_token"
        )

    def check_turns(self, messages: Sequence[Message], several: bool) -> None:
        """Raise ConfigError for a template whose turns no stop token ends, or that cannot be extended turn by turn.

        several: whether the conversation that starts with `messages` may go on after a reply.
        """
        reply = np.concatenate([self.first(messages), self.reply("-")])
        if several:
            self.next(reply, messages, [Message(role="user", content="-")])

    def text(self, completion_ids: Ids, stop: Sequence[str] = ()) -> str:
        """The completion as the environment reads it: without its end token, cut before the first stop string."""
        ids = [int(i) for i in completion_ids]
        if ids and ids[-1] in self._stop_text:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return text[: min((text.index(s) for s in stop if s in text), default=len(text))]

    @property
    def vocabulary(self) -> int:
        """Ids lie below this."""
        return len(self._tokenizer)

    def encode(self, text: str) -> Ids:
        """Token ids of raw text, special tokens included, int32[T]."""
        return self._encode(text)

    def decode(self, ids: Ids) -> str:
        """Text of the ids, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def _around_reply(self, history: Sequence[Message], new: Sequence[Message]) -> tuple[str, str]:
        mark = _MARK
        while any(mark in message["content"] for message in (*history, *new)):
            mark += _MARK[-1]
        conversation = [*history, Message(role="assistant", content=mark), *new]
        parts = self._render(conversation, generation_prompt=bool(new)).split(mark)
        if len(parts) != 2:
            raise ConfigError(
                f"the chat template writes an assistant message {len(parts) - 1} times instead of once; "
                "such a template cannot be extended token by token"
            )
        return parts[0], parts[1]

    def _render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, ValueError, TypeError) as error:  # many refuse roles that do not take turns
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error
        return str(text)

    def _encode_text(self, text: str) -> Ids:
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        ids.flags.writeable = False
        return ids
