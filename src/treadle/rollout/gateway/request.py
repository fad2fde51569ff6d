"""What a client asks and what it is answered, whatever dialect it speaks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import TreadleError
from treadle.core.types import Message, StopReason
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.tool_calls import Tool
from treadle.rollout.session import CallOptions, Reply

Json = dict[str, Any]
MAX_CHOICES = 128  # of one request


class ApiError(TreadleError, ValueError):
    """Says that a request gets an error for an answer: HTTP status, message, and the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Holds one request, whatever dialect it came in.

    instructions: a system message before everything, not repeated by requests that follow this one. prompts: of raw
    completions, text or ids each; where there are any, messages and tools do not count. choices: samples of each
    prompt. previous: id of an earlier response that the messages follow. thoughts: whether the answer shows them.
    left_out: types of tools that the model is not told of.
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    instructions: str = ""
    prompts: tuple[str | tuple[int, ...], ...] | None = None
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
    """Holds the record from which a request and its retries are answered. created: seconds since 1970."""

    ident: str
    created: int
    request: CompletionRequest
    replies: Sequence[Reply]
    renderer: ChatRenderer

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, each distinct prompt counted once."""
        return sum(len(reply.step.prompt_ids) for reply in self.replies[:: self.request.choices])

    @property
    def completion_tokens(self) -> int:
        """Return the number of sampled tokens of all choices."""
        return sum(len(reply.step.completion_ids) for reply in self.replies)

    def bytes_of(self, reply: Reply) -> list[bytes]:
        """Return the bytes of each sampled token."""
        return self.renderer.token_bytes.of(reply.step.completion_ids.tolist())


@dataclass(frozen=True, slots=True)
class Dialect:
    """Translates one API: its JSON to a request, an answer to its JSON or events, errors to their form in it.

    error: (ApiError) -> body. error_event: the same within a stream that has begun.
    """

    prefix: str  # of the ids of its answers
    read: Callable[[Json], CompletionRequest]
    write: Callable[[Answer], Json]
    events: Callable[[Answer], Iterator[str]]
    error: Callable[[ApiError], Json]
    error_event: Callable[[ApiError], str]

    def new_id(self) -> str:
        """Return a new id for an answer, which reveals nothing about its session."""
        return self.prefix + secrets.token_hex(12)


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's word for why a completion ended."""
    if reply.step.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def add_thought(message: Message, thought: str) -> None:
    """Add a thought to a message of the assistant, behind those that it has."""
    message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), thought]))
