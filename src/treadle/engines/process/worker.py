"""`python -m treadle.engines.process.worker FD`: a `TorchEngine` that serves the process at the other end of a channel.

The messages are those of `process.protocol`. The engine computes in a thread of its own, so that calls arrive and are
cancelled meanwhile. The process ends when the channel closes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from treadle.core.child_process import end_with_parent
from treadle.core.errors import TreadleError
from treadle.engines.process.protocol import LONGEST_LINE, Message, Outbox, decode
from treadle.engines.process.server import EngineServer
from treadle.engines.stop_strings import Decode
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions


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


async def read_weights(message: Message) -> Mapping[str, Tensor]:
    """Return the weights in the file that a `publish` message names."""
    return load_file(message["path"])


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
    server = EngineServer(engine, outbox.post, read_weights)
    try:
        async for line in reader:
            for message in decode(line):
                server.take(message)
    finally:
        await server.close()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
