"""`python foreign_child.py HANDLER`: plays attempts for `WorkerPool`, in a Python that may lack Treadle.

Standard input is a socket that carries JSON lines both ways:

    in   [0, "start", [SETTINGS]]               out  [0, {"pid": ...}, null]
         [1, "play", [ATTEMPT, {...}]]               [1, {...}, null] or [1, null, {"type": ..., "message": ...}]
         [null, "stop", [ATTEMPT]], [1, "", []]      [null, 3, null], attempts in progress

These are the requests and answers of `calls`. When the socket ends, or on SIGTERM, all attempts are cancelled, and the
process ends once they have cleaned up.

Standard library only, and no syntax newer than Python 3.9's. `treadle.workers.foreign` defines handlers.
"""

import asyncio
import faulthandler
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_LONGEST = 2000  # maximum characters of an error's message; ten times as many for its traceback

Json = dict[str, Any]


def main() -> None:
    """Load the handler, and play attempts until the other end of the socket is closed."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[0] = os.getcwd()  # as for `python -m`
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY:  # each attempt holds a few
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(_serve(connection, Path(sys.argv[1])))
    while True:
        try:
            loop.run_until_complete(serving)
            break
        except (SystemExit, KeyboardInterrupt):
            # From one of the library's tasks; its awaiter gets it, too.
            if serving.done():
                break
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads that are stuck.
    os._exit(0)


async def _serve(connection: socket.socket, handler_file: Path) -> None:
    # Maximum size of a payload; asyncio's default is 64 KiB.
    limit = 2**30
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)

    def send(message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    player = _Player(handler_file, send)
    calls = _load(Path(__file__).with_name("calls.py"), "treadle_calls")
    service = calls.Service(player, send, _described)
    receiving = asyncio.ensure_future(_receive(reader, service))
    player.end = receiving.cancel
    await asyncio.wait({receiving})
    await _cancel(service.running)
    await player.close()


async def _receive(reader: asyncio.StreamReader, service: Any) -> None:
    while (line := await reader.readline()).endswith(b"\n"):
        service.take(*json.loads(line))


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait for them; the other side limits the time, and then kills this process."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class _Player:
    """Plays attempts with the handler. end: ends this process in order."""

    end: Callable[[], object]

    def __init__(self, file: Path, send: Callable[[Any], None]) -> None:
        self._file, self._send = file, send
        self._stops: dict[int, asyncio.Event] = {}  # of the attempts in progress
        self._beating: asyncio.Task[None] | None = None

    async def start(self, settings: Json) -> Json:
        """Import the handler, with modules beside it unless installed ones have the same name."""
        _limit_memory(settings["memory_limit"])
        sys.path.append(str(self._file.parent))
        self._handler = handler = _load(self._file, self._file.stem)
        self._output_limit = settings["output_limit"]
        versions = handler.versions() if hasattr(handler, "versions") else {}
        info = await handler.start(settings["options"]) if hasattr(handler, "start") else {}
        self._beating = asyncio.ensure_future(self._beat(settings["heartbeat"], settings["patience"]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.end)
        return {"pid": os.getpid(), "versions": versions, "info": info}

    async def play(self, attempt: int, payload: Json) -> Json:
        stop = self._stops[attempt] = asyncio.Event()
        try:
            result: Json = await self._handler.run(payload, stop)
        finally:
            del self._stops[attempt]
        if not isinstance(result, dict):
            raise TypeError(f"run must return a dict, got {type(result).__name__}")
        size = len(json.dumps(result))
        if size > self._output_limit:
            raise ValueError(f"run returned {size} bytes of JSON, output_limit is {self._output_limit}")
        return result

    async def stop(self, attempt: int) -> None:
        """Ask an attempt to end, unless it has."""
        if attempt in self._stops:
            self._stops[attempt].set()

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            if hasattr(self._handler, "close"):
                await self._handler.close()

    async def _beat(self, interval: float, patience: float) -> None:
        """Send heartbeats; if one is long overdue, write the threads' tracebacks to standard error."""
        while True:
            faulthandler.dump_traceback_later(patience / 2)
            await asyncio.sleep(interval)
            self._send((None, len(self._stops), None))


def _described(error: BaseException) -> Json:
    name = type(error).__name__
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = f"{name}: {error}" if str(error) else name
    return {"type": name, "message": text[:_LONGEST], "traceback": "".join(lines)[-10 * _LONGEST :]}


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _limit_memory(limit: int) -> None:
    """Make allocations beyond the limit fail, here and in each process started from here."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


if __name__ == "__main__":
    main()
