"""`ChatRenderer`: what all conversations with one tokenizer share. The conversations themselves: `conversation.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from treadle.core.errors import ConfigError
from treadle.core.types import Ids, Message
from treadle.rollout.rendering.structure import Backend, Structure
from treadle.rollout.rendering.template import ChatTemplate


class Tokenizer(Protocol):
    """What Treadle needs of a Hugging Face tokenizer (a fast one: one with a `tokenizer.json`)."""

    chat_template: Any
    """A Jinja template, or several by name."""

    @property
    def backend_tokenizer(self) -> Backend:
        """The `tokenizers.Tokenizer` in it."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Names of special tokens (`bos_token`, ...), which templates may write."""
        ...


class ChatRenderer:
    """One tokenizer with its chat template, shared by all conversations.

    stop_token_ids: the ids that end a completion; a sampled one stands for the template's own end of turn.
    chat_template: the file of another template, or the name of one of the tokenizer's; default: the tokenizer's own.
    chat_template_kwargs: options that the template reads (`enable_thinking`, say).

    Raises ConfigError if there is no such template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.structure = Structure(tokenizer.backend_tokenizer, stop_token_ids)
        self._backend = tokenizer.backend_tokenizer
        self.options = dict(chat_template_kwargs or {})
        self._stop_ids = {int(i) for i in stop_token_ids}
        self._variables = dict(tokenizer.special_tokens_map)
        self._sources = _sources(tokenizer.chat_template, chat_template)
        self._compiled = lru_cache(maxsize=8)(self._compile)
        self.ends = lru_cache(maxsize=8)(self._ends)

    def template(self, tools: Sequence[Any]) -> ChatTemplate:
        """The template for calls with these tools: a tokenizer may bring one of its own for them (`tool_use`)."""
        return self._compiled("tool_use" if tools and "tool_use" in self._sources else "default")

    def text(self, completion_ids: Ids) -> str:
        """The completion as text, without its end token."""
        ids = [int(i) for i in completion_ids]
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        return self.structure.decode(ids)

    @property
    def source(self) -> str:
        """The template's own text."""
        return self._sources["default"]

    @property
    def vocabulary(self) -> int:
        """Ids lie below this."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> Ids:
        """Token ids of raw text, special tokens included, int32[T]."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of the ids, special tokens included."""
        return self.structure.decode([int(i) for i in ids])

    def reply(self, message: Message) -> Ids:
        """A reply as a model would ideally sample it: its tokens and the template's end token (for demonstrations).

        Raises ConfigError for a template whose turns no stop token ends.
        """
        return np.concatenate([*self.structure.encode(message["content"]), self._end_of_turn])

    @cached_property
    def _end_of_turn(self) -> Ids:
        """The template's own end token, int32[1]."""
        after = self.template(()).after_reply
        for name, ident in self.structure.stops.items():
            if after.lstrip().startswith(name):
                return np.array([ident], np.int32)
        plain, stops = self.structure.plain, self.structure.stops
        raise ConfigError(
            f"the chat template ends a turn with {plain(after)[:20]!r}, none of the stop tokens "
            f"{list(map(plain, stops))}; make it the tokenizer's eos_token"
        )

    def _ends(self, template: ChatTemplate) -> re.Pattern[str]:
        """The tokens that may end an assistant's turn: those that stop a completion, and the template's own."""
        own = self.structure.pattern.search(template.after_reply)
        names = {*self.structure.stops, *([own[0]] if own else [])}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def _compile(self, name: str) -> ChatTemplate:
        return ChatTemplate(self._sources[name], self._variables, self.structure)


def _sources(own: str | Mapping[str, str] | None, chosen: str | None) -> dict[str, str]:
    """Templates by name, "default" among them. Raises ConfigError."""
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if chosen is not None:
        if chosen not in named and not Path(chosen).is_file():
            raise ConfigError(f"chat_template {chosen!r} is neither a file nor one of the tokenizer's: {sorted(named)}")
        return {"default": named[chosen] if chosen in named else Path(chosen).read_text(encoding="utf-8")}
    if "default" not in named:
        raise ConfigError(f"the tokenizer has no default chat template, only {sorted(named)}; set chat_template to one")
    return named
