"""What a client asks and what it is answered, whatever dialect it speaks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from treadle.core.errors import TreadleError
from treadle.core.types import Message, StopReason
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import Tool
from treadle.rollout.session import CallOptions, Reply

Json = dict[str, Any]
MAX_CHOICES = 128  # of one request


class ApiError(TreadleError, ValueError):
    """A request that gets an error for an answer: HTTP status, message, and the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request.

    instructions: a system message before everything, not repeated by requests that follow this one.
    prompts: of raw completions, text or ids each; otherwise messages and tools are what counts. choices: samples of
    each prompt. previous: id of an earlier response that the messages follow. thoughts: whether they go out.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The record from which a request is answered, once or again. created: seconds since 1970."""

    ident: str
    created: int
    request: CompletionRequest
    replies: Sequence[Reply]
    renderer: ChatRenderer

    @property
    def prompt_tokens(self) -> int:
        """Of each distinct prompt once."""
        return sum(len(reply.step.prompt_ids) for reply in self.replies[:: self.request.choices])

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(reply.step.completion_ids) for reply in self.replies)

    def text_of(self, token: int) -> str:
        """One token as text."""
        return self.renderer.decode([token])


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: from its JSON to a request, from the answer to its JSON or events, and how it puts errors.

    error: (ApiError) -> body. error_event: the same within a stream that has begun.
    """

    prefix: str  # of the ids of its answers
    body: type[BaseModel]  # what a request must be
    read: Callable[[Json], CompletionRequest]
    write: Callable[[Answer], Json]
    events: Callable[[Answer], Iterator[str]]
    error: Callable[[ApiError], Json]
    error_event: Callable[[ApiError], str]

    def new_id(self) -> str:
        """For an answer; tells nothing about its session."""
        return self.prefix + secrets.token_hex(12)


def finish_reason(reply: Reply) -> str:
    """OpenAI's word for why a completion ended."""
    if reply.step.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"
