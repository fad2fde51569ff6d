"""`python -m treadle.engines.process.worker FD`: a `TorchEngine` that serves the process at the other end of a channel.

The messages are those of `process.protocol`. The engine computes in a thread of its own, so that calls arrive and are
cancelled meanwhile. The process ends when the channel closes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from treadle.core.child_process import end_with_parent
from treadle.core.errors import TreadleError
from treadle.engines.process.protocol import (
    LONGEST_LINE,
    Message,
    Outbox,
    completion_message,
    decode,
    sampling_of,
)
from treadle.engines.stop_strings import Decode
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions


class _Server:
    """Hands messages to the engine and answers them."""

    def __init__(self, engine: TorchEngine, outbox: Outbox) -> None:
        self._engine, self._outbox = engine, outbox
        self._tasks: dict[int, asyncio.Task[Message]] = {}

    def take(self, message: Message) -> None:
        match message["do"]:
            case "open":
                self._engine.open_session(message["session"])
            case "close":
                self._engine.close_session(message["session"])
            case "ping":
                self._outbox.post({"do": "pong"})
            case "cancel":
                if message["call"] in self._tasks:
                    self._tasks[message["call"]].cancel()
            case _:
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks[message["call"]] = task
                task.add_done_callback(partial(self._finished, message["call"]))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._engine.close()

    async def _answer(self, message: Message) -> Message:
        match message["do"]:
            case "generate":
                completion = await self._engine.generate(
                    np.array(message["prompt"], np.int32),
                    sampling_of(message["sampling"]),
                    session=message["session"],
                    cache_salt=message["salt"],
                )
                return {"completion": completion_message(completion)}
            case "score":
                ids = np.array(message["ids"], np.int32)
                return {"logprobs": (await self._engine.score(ids, temperature=message["temperature"])).tolist()}
            case _:
                await self._engine.update_weights(load_file(message["path"]), message["version"])
                return {}

    def _finished(self, call: int, task: asyncio.Task[Message]) -> None:
        del self._tasks[call]
        if task.cancelled():  # its caller no longer waits
            return
        error = task.exception()
        self._outbox.post({"call": call, **(task.result() if error is None else _error_message(error))})


def _error_message(error: BaseException) -> Message:
    """Return what the caller is sent of a failure; one that is not Treadle's own goes to the log with its traceback."""
    if isinstance(error, TreadleError):
        return {"error": str(error)}
    traceback.print_exception(error)
    return {"error": f"the engine failed with {type(error).__name__}: {error}"}


def load(message: Message) -> TorchEngine:
    """Return the engine that a `load` message describes. Raises what loading raises."""
    hf_logging.disable_progress_bar()  # the log is no terminal
    torch.set_num_threads(message["threads"])
    torch.use_deterministic_algorithms(message["deterministic"])
    model = AutoModelForCausalLM.from_pretrained(
        message["model"], dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    return TorchEngine(model, TorchEngineOptions(**message["options"]), decode=_decode(message["model"]))


def _decode(directory: str) -> Decode:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


async def serve(channel: socket.socket) -> None:
    """Load an engine and answer until the channel closes."""
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=LONGEST_LINE)
    with suppress(ConnectionError):  # the other process was killed
        for message in decode(await reader.readline()):
            await _serve(message, reader, Outbox(writer))
        await asyncio.sleep(0)  # the outbox sends
        writer.close()
        await writer.wait_closed()


async def _serve(first: Message, reader: asyncio.StreamReader, outbox: Outbox) -> None:
    try:
        engine = load(first)
    except TreadleError as error:
        outbox.post({"call": first["call"], "error": str(error)})
        return
    outbox.post({"call": first["call"], **asdict(engine.limits)})
    server = _Server(engine, outbox)
    try:
        async for line in reader:
            for message in decode(line):
                server.take(message)
    finally:
        await server.close()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
