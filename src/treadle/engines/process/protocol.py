"""The messages between an engine in a process of its own and its client: lines of JSON over one ordered channel.

A line is a list of messages, sent in one turn of the sender's event loop and handled in one of the receiver's. One with
`call` is answered by one with the same number. Floats survive exactly: JSON holds the shortest decimal of each.

    -> {do: load, call, model, dtype, options, threads, deterministic}     <- {call, vocabulary, context}
    -> {do: open | close, session}
    -> {do: generate, call, session, prompt, sampling, salt}               <- {call, completion}
    -> {do: score, call, ids, temperature}                                 <- {call, logprobs}
    -> {do: publish, call, path, version, probe}                           <- {call, logprobs}  of the probe's ids
    -> {do: sleep, call}                                                   <- {call}  `publish` ends it
    -> {do: cancel, call}                                                  any call that failed: <- {call, error}
    -> {do: ping}                                         <- {do: pong, running, waiting, cache}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from treadle.core.engine import Completion, VersionSpan
from treadle.core.types import SamplingParams, StopReason

Message = dict[str, Any]

LONGEST_LINE = 2**30  # bytes; both ends trust each other


def encode(messages: Sequence[Message]) -> bytes:
    """Return the messages as one line."""
    return json.dumps(messages, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> list[Message]:
    """Return the messages of a line; none of an unfinished one, whose sender was killed."""
    messages: list[Message] = json.loads(line) if line.endswith(b"\n") else []
    return messages


class Outbox:
    """Gathers the messages of one turn of the event loop into one line."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._messages: list[Message] = []

    def post(self, message: Message) -> None:
        """Send the message, after everything posted before."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not self._writer.is_closing():
            self._writer.write(encode(messages))


def completion_message(completion: Completion) -> Message:
    """Return a completion as plain data."""
    return {
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "stop_reason": completion.stop_reason,
        "policy_versions": [[span.version, span.start, span.end] for span in completion.policy_versions],
        "routing": None
        if completion.routing is None
        else [completion.routing.shape, completion.routing.ravel().tolist()],
        "waited": completion.waited,
    }


def completion_of(message: Message) -> Completion:
    """Return the completion that `completion_message` was given, bit for bit."""
    routing = message["routing"]
    return Completion(
        token_ids=np.array(message["token_ids"], np.int32),
        logprobs=np.array(message["logprobs"], np.float32),
        stop_reason=StopReason(message["stop_reason"]),
        policy_versions=tuple(VersionSpan(*span) for span in message["policy_versions"]),
        routing=None if routing is None else np.array(routing[1], np.int16).reshape(routing[0]),
        waited=message["waited"],
    )


def sampling_message(sampling: SamplingParams) -> Message:
    """Return sampling parameters as plain data."""
    return asdict(sampling)


def sampling_of(message: Message) -> SamplingParams:
    """Return the sampling parameters that `sampling_message` was given."""
    return SamplingParams(**{**message, "stop": tuple(message["stop"])})
