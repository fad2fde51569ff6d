"""`ChatRenderer`: state shared by all conversations with one tokenizer (see `conversation.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import ProcessesImages
from treadle.core.types import Ids, Message
from treadle.rendering import replies
from treadle.rendering.grammars import Grammars
from treadle.rendering.identity import flat, parsed
from treadle.rendering.pictures import ImagePlaces
from treadle.rendering.probes import (
    PROBE,
    Shape,
    example,
    ignores_tools,
    left_out,
    probe_call,
    unwritten_parts,
    written_call,
)
from treadle.rendering.structure import Structure, TokenBytes, any_of, encode_text
from treadle.rendering.template import ChatTemplate, Plain, Variables

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer(Protocol):
    """Interface of a fast Hugging Face tokenizer (one with a `tokenizer.json`), as far as Treadle uses it.

    chat_template: a Jinja template, or several by name. special_tokens_map: special tokens by name (`bos_token`, ...),
    for
    which templates may write.
    """

    chat_template: Any

    @property
    def backend_tokenizer(self) -> Backend: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...


_NAMED = 8  # parts of a tool named in a message


class ChatRenderer:
    """A tokenizer with its chat template, shared by all conversations.

    stop_token_ids: ids that end a completion (`stop_ids`); a sampled one stands for the template's own end of turn.
    chat_template: path of another template, or name of one of the tokenizer's or of Treadle's (`qwen3_keep_thoughts`);
    default: the tokenizer's own.
    chat_template_kwargs: template options such as `enable_thinking`.
    roles: roles unknown to the template -> roles to pass instead.
    began: date for templates that write one; default: when a conversation begins.
    images: the model's image processor; None: messages with images are refused.

    Raises ConfigError if there is no such template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        began: datetime | None = None,
        images: ProcessesImages | None = None,
    ) -> None:
        self.began = began
        self.structure = Structure(tokenizer.backend_tokenizer, stop_token_ids)
        self._backend = tokenizer.backend_tokenizer
        self.options, self.roles = dict(chat_template_kwargs or {}), dict(roles or {})
        self.stop_ids = tuple(int(i) for i in stop_token_ids)
        self._variables = dict(tokenizer.special_tokens_map)
        self._sources = _sources(tokenizer.chat_template, chat_template)
        self.images = ImagePlaces(images, self.structure)
        self._label = (
            "the tokenizer's chat template" if chat_template is None else f"the chat template {chat_template!r}"
        )
        self._compiled = lru_cache(maxsize=8)(self._compile)
        self.ends = lru_cache(maxsize=8)(self._ends)
        self._unreadable = lru_cache(maxsize=64)(self._unread)
        self._unwritten = lru_cache(maxsize=1024)(self._parts)
        self.left_out = lru_cache(maxsize=4096)(self._left_out)

    def __reduce__(self) -> tuple[Callable[..., ChatRenderer], tuple[Any, ...], dict[str, str]]:
        """Pickle without the tokenizer's class, which needs transformers."""
        parts = SimpleNamespace(
            backend_tokenizer=self._backend, chat_template=self._sources, special_tokens_map=self._variables
        )
        made = partial(
            ChatRenderer,
            chat_template_kwargs=self.options,
            roles=self.roles,
            began=self.began,
            images=self.images.processor,
        )
        return made, (parts, self.stop_ids), {"_label": self._label}

    def template(self, tools: Sequence[Any]) -> ChatTemplate:
        """Return the template for calls with these tools; a tokenizer may have one for tools (`tool_use`)."""
        return self._compiled("tool_use" if tools and "tool_use" in self._sources else "default")

    def write(
        self, messages: Sequence[Plain], tools: Sequence[Any] | None, options: Variables, generation_prompt: bool
    ) -> str:
        """Render a conversation to text, as `ChatTemplate.render` does; images as their text. Raises DataError."""
        if any(message.get("images") for message in messages):
            text = self.write([self.images.in_parts(m) for m in messages], tools, options, generation_prompt)
            return self.images.expanded(text, [url for m in messages for url in m.get("images") or ()])
        render = partial(self.template(tools or ()).render, tools=tools, options=options)
        try:
            return render(messages, generation_prompt=generation_prompt)
        except DataError:
            # gpt-oss reads thoughts from here, but not beside content.
            if not any("thinking" in message for message in messages):
                raise
            shown = [{key: item for key, item in message.items() if key != "thinking"} for message in messages]
            return render(shown, generation_prompt=generation_prompt)

    def _left_out(self, setting: str, shape: Shape, asks: bool = True) -> tuple[tuple[int, str], ...]:
        """Return the parts of a conversation of that shape left out by the template; empty if it refuses the example.

        setting: tools and options as JSON. asks: add the generation prompt; without it, gpt-oss writes the last
        thought.
        """
        tools, options = json.loads(setting) if setting else ([], {})
        messages = example(shape, self.template(tools).arguments_as_text)
        try:
            return left_out(shape, self.write(messages, tools or None, options, generation_prompt=asks))
        except DataError:
            return ()

    def merged(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Merge system messages into the first one, if the template requires that."""
        system = [message for message in messages if self.roles.get(message["role"], message["role"]) == "system"]
        if not system or (len(system) == 1 and system[0] is messages[0]) or not self._wants_one_system:
            return messages
        text = "\n\n".join(filter(str.strip, (flat(message["content"]) for message in system)))
        joined = Message(role="system", content=text)
        if images := [url for message in system for url in message.get("images") or ()]:
            joined["images"] = images
        return (joined, *(message for message in messages if message not in system))

    @cached_property
    def _wants_one_system(self) -> bool:
        several = ("system", "system", "user"), ("system", "user", "system", "user")
        return self._takes("system", "user") and not all(self._takes(*roles) for roles in several)

    def _takes(self, *roles: str) -> bool:
        """Return whether the template writes all of a conversation with these roles."""
        talk: list[Plain] = [{"role": role, "content": f"zqz{number}z"} for number, role in enumerate(roles)]
        try:
            text = self.write(talk, None, self.options, generation_prompt=True)
        except DataError:
            return False
        return all(message["content"] in text for message in talk)

    def text(self, completion_ids: Ids) -> str:
        """Decode a completion without its end token."""
        ids = [int(i) for i in completion_ids]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.structure.decode(ids)

    @property
    def source(self) -> str:
        return self._sources["default"]

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: an exclusive bound of the ids."""
        return self._backend.get_vocab_size()

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self._backend)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    def encode(self, text: str) -> Ids:
        """Encode raw text, special tokens included, int32[T]."""
        return np.array(encode_text(self._backend, text), np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return self.structure.decode([int(i) for i in ids])

    def reply(self, message: Message) -> Ids:
        """Encode a reply's content and the template's end of turn. Raises ConfigError unless that is a stop token."""
        return np.concatenate([*self.structure.encode(message["content"]), self.end_of_turn])

    def tools_problem(self, tools: Sequence[replies.Tool] = (), parse: replies.ReplyParser | None = None) -> str:
        """Return why calls with tools cannot work, in a sentence; "" if they can.

        The template must describe tools to the model, and `parse` must read the template's form of a call. tools: the
        first one is tried if the template refuses an unknown tool.
        """
        if self._ignores_tools:
            return (
                f"{self._label} does not write tools, so that the model would never see them: leave them out, describe "
                "them in a message, or use another template (model.chat_template; --chat-template of treadle serve): "
                "qwen3_keep_thoughts fits models of ChatML (<|im_start|>)"
            )
        if parse is None:
            return ""
        tried = (self._unreadable(parse, json.dumps(tool)) for tool in (PROBE, *tools[:1]))
        written = next((text for text in tried if text is not None), "")
        name = replies.parser_name(parse)
        return written and (
            f"the reply parser {name} does not read a tool call of this model: {self._label} {written}; "
            "use a parser that reads it (rollout.reply_parser; --parser of treadle serve), or leave tools out"
        )

    def tools_notes(self, tools: Sequence[replies.Tool]) -> list[str]:
        """Describe which parts of tools the template does not write, in a line a tool: the model never sees them."""
        lines = []
        for tool in tools:
            if parts := self._unwritten(json.dumps(tool, default=str)):
                more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
                name, named = tool["function"].get("name"), ", ".join(parts[:_NAMED])
                lines.append(
                    f"{self._label} leaves out parts of the tool {name!r:.80}, which the model never sees: "
                    f"{named}{more}; rephrase them, or move them into its description"
                )
        return lines

    def _parts(self, tool: str) -> tuple[str, ...]:
        plain = json.loads(tool)
        return unwritten_parts(self.template([plain]), plain, self.options)

    def parser(self, name: str, setting: str = "rollout.reply_parser") -> replies.ReplyParser:
        """Return the reply parser of that name; `auto` chooses one from the template's output. Raises ConfigError."""
        return replies.reply_parser(name, setting) if name != replies.AUTO else self._chosen

    @cached_property
    def _chosen(self) -> replies.ReplyParser:
        """Parser for `auto`: takes thoughts out if the template has a place for them, and reads its tool calls."""
        if self._unreadable(replies.harmony, json.dumps(PROBE)) == "":
            return replies.harmony
        tags = next((tags for tags in replies.THOUGHT_TAGS if tags[1] in self.source), replies.THOUGHT_TAGS[0])
        thoughtful = ("user", True, False, 0, -1), ("assistant", True, True, 0, -1)
        thoughts = tags[1] in self.source or not self.left_out("", thoughtful)
        for name, calls in replies.FORMATS.items():
            parser = replies.Parser(f"auto ({name})", thoughts, calls, tags)
            if self._unreadable(parser, json.dumps(PROBE)) == "":
                return parser
        return replies.Parser("auto", thoughts, tags=tags)

    @cached_property
    def _ignores_tools(self) -> bool:
        return ignores_tools(self.template([PROBE]), self.options)

    def _unread(self, parse: replies.ReplyParser, probe: str) -> str | None:
        """Return the template's form of a call that the parser cannot read; "" if it can, None if unknown."""
        tool = json.loads(probe)
        template = self.template([tool])
        written = written_call(template, tool, self.options)
        if written is None:
            return None
        end = self.ends(template).search(written)
        call = self.structure.plain(written[: end.start()] if end else written)
        calls = parse(call, [tool]).get("tool_calls") or ()
        read = [(c["function"]["name"], parsed(c["function"]["arguments"])) for c in calls]
        if read == [probe_call(tool)]:
            return ""
        return f"writes it as {call.strip()!r:.300}" if call else "leaves it out of the conversation"

    @property
    def own_end(self) -> int | None:
        """Structural token that the template writes after each reply, unless it is a stop token.

        gpt-oss has none: its template ends the last reply with `<|return|>`, earlier ones with `<|end|>`, which never
        ends a sampled reply.
        """
        ends = self._written_ends
        if any(name in self.structure.stops for names in ends for name in names):
            return None
        return next((self.structure.ident(names[0]) for names in reversed(ends) if names), None)

    @property
    def _written_ends(self) -> list[list[str]]:
        """Structural tokens, by private names, directly after the last reply, and directly after an earlier one."""
        return [self._leading(text) for text in reversed(self.template(()).after_reply)]

    def _leading(self, text: str) -> list[str]:
        """List the structural tokens, by private names, at the beginning of a text."""
        pattern = self.structure.pattern
        match = re.match(rf"\s*(?:{pattern.pattern}\s*)*", text, re.DOTALL)
        return pattern.findall(match[0]) if match else []

    @cached_property
    def end_of_turn(self) -> Ids:
        """Text that the template writes after a reply, up to its end token, int32[T].

        Raises ConfigError unless a turn ends with a stop token.
        """
        stops = self.structure.stops
        for names in self._written_ends:
            for number, name in enumerate(names):
                if name in stops:
                    return np.array([self.structure.ident(name) for name in names[: number + 1]], np.int32)
        plain = self.structure.plain
        raise ConfigError(
            f"the chat template ends a turn with {plain(self.template(()).after_reply[0])[:20]!r}, none of the stop "
            f"tokens {list(map(plain, stops))}; name the token that ends it in model.stop_tokens"
        )

    def _ends(self, template: ChatTemplate) -> re.Pattern[str]:
        """Match tokens that may end an assistant's turn: stop tokens, and the template's own."""
        written, stops = self._leading(template.after_reply[0]), self.structure.stops
        return any_of({*stops, *(written[:1] if not any(name in stops for name in written) else [])})

    def _compile(self, name: str) -> ChatTemplate:
        return ChatTemplate(self._sources[name], self._variables, self.structure)


def _sources(templates: str | Mapping[str, str] | None, chosen: str | None) -> dict[str, str]:
    """Return templates by name, "default" among them. Raises ConfigError."""
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    if chosen is not None:
        shipped = files("treadle.recipes") / "templates" / f"{chosen}.jinja"
        if chosen in named:
            return {"default": named[chosen]}
        if Path(chosen).is_file():
            return {"default": Path(chosen).read_text(encoding="utf-8")}
        if "/" not in chosen and shipped.is_file():
            return {"default": shipped.read_text(encoding="utf-8")}
        raise ConfigError(f"chat_template {chosen!r} is neither a file nor one of the tokenizer's: {sorted(named)}")
    if not named:
        raise ConfigError(
            "the tokenizer has no chat template; add a chat_template.jinja to it, or set model.chat_template"
        )
    if "default" not in named:
        raise ConfigError(f"the tokenizer has no default chat template, only {sorted(named)}; set chat_template to one")
    return named
