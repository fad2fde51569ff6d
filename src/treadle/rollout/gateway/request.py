"""What a client asks and what it is answered, whatever dialect it speaks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import TreadleError
from treadle.core.types import Message, StopReason
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import Tool
from treadle.rollout.session import CallOptions, Reply

Json = dict[str, Any]
MAX_CHOICES = 128
"""Largest `n` of a request."""


class ApiError(TreadleError, ValueError):
    """Raised for a request that is answered by an error. param: the field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, whatever dialect it came in.

    instructions: a system message before all others, not repeated by requests that continue this one. prompts: of raw
    completions, each text or ids; messages and tools then do not count. choices: samples of each prompt. previous: id
    of an earlier response that the messages follow. thoughts: whether the answer shows them. left_out: types of tools
    that the model is not told of.
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    instructions: str = ""
    prompts: tuple[str | Sequence[int], ...] | None = None
    options: CallOptions = field(default_factory=CallOptions)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    previous: str | None = None
    thoughts: bool = True
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The record from which a request and its retries are answered. created: seconds since 1970."""

    ident: str
    created: int
    request: CompletionRequest
    replies: Sequence[Reply]
    renderer: ChatRenderer

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, each distinct prompt counted once."""
        return sum(len(reply.step.prompt_ids) for reply in self.replies[:: self.request.choices])

    @property
    def completion_tokens(self) -> int:
        return sum(len(reply.step.completion_ids) for reply in self.replies)

    def bytes_of(self, reply: Reply) -> list[bytes]:
        """Return the bytes of each sampled token."""
        return self.renderer.token_bytes.of(reply.step.completion_ids.tolist())


@dataclass(frozen=True, slots=True)
class Dialect:
    """Translates one API. prefix: of the ids of its answers. error_event: an error within a stream that has begun."""

    prefix: str
    read: Callable[[Json], CompletionRequest]
    write: Callable[[Answer], Json]
    events: Callable[[Answer], Iterator[str]]
    error: Callable[[ApiError], Json]
    error_event: Callable[[ApiError], str]

    def new_id(self) -> str:
        """Make an id for an answer, which reveals nothing about its session."""
        return self.prefix + secrets.token_hex(12)


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's word for why a completion ended."""
    if reply.step.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def add_thought(message: Message, thought: str) -> None:
    """Append a thought to those of an assistant message."""
    message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), thought]))
