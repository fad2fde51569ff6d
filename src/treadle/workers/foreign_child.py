"""`python foreign_child.py HANDLER`: plays attempts for `WorkerPool`, in a Python that may lack Treadle.

Standard input is a socket that carries JSON lines both ways:

    in   {"start": SETTINGS}                    out  {"ready": {...}} or {"failed": "..."}
         {"run": 1, "payload": {...}}                {"id": 1, "result": {...}} or {"id": 1, "error": {...}}
         {"stop": 1}, {"cancel": 1}                  {"heartbeat": 3}, attempts in progress

When the socket ends, or on SIGTERM, all attempts are cancelled, and the process ends once they have cleaned up.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LONGEST = 2000  # maximum characters of an error's message; ten times as many for its traceback

Json = dict[str, Any]
Send = Callable[[Json], None]


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

    def send(message: Json) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    settings = json.loads(await reader.readline())["start"]
    try:
        _limit_memory(settings["memory_limit"])
        handler = _load(handler_file)
        versions = handler.versions() if hasattr(handler, "versions") else {}
        info = await handler.start(settings["options"]) if hasattr(handler, "start") else {}
        send({"ready": {"pid": os.getpid(), "versions": versions, "info": info}})
    except BaseException as error:  # noqa: BLE001  # a boundary: reported to the run, which ends
        traceback.print_exc()
        send({"failed": _described(error)["message"]})
        await writer.drain()
        return
    attempts = _Attempts(handler.run, send, settings["output_limit"])
    beating = asyncio.ensure_future(_beat(send, attempts, settings["heartbeat"], settings["patience"]))
    receiving = asyncio.ensure_future(_receive(reader, attempts))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, receiving.cancel)
    await asyncio.wait({receiving})
    await attempts.cancel_all()
    beating.cancel()
    if hasattr(handler, "close"):
        await handler.close()


async def _receive(reader: asyncio.StreamReader, attempts: "_Attempts") -> None:
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            return
        message = json.loads(line)
        if "run" in message:
            attempts.run(message["run"], message["payload"])
        elif message.get("stop") in attempts.stops:
            attempts.stops[message["stop"]].set()
        elif message.get("cancel") in attempts.tasks:
            attempts.tasks[message["cancel"]].cancel()


class _Attempts:
    """The attempts in progress: number -> its task, and the event that asks it to end."""

    def __init__(self, run: Callable[..., Any], send: Send, output_limit: int) -> None:
        self._run, self._send, self._output_limit = run, send, output_limit
        self.tasks: dict[int, asyncio.Task[Json]] = {}
        self.stops: dict[int, asyncio.Event] = {}

    def run(self, number: int, payload: Json) -> None:
        self.stops[number] = asyncio.Event()
        self.tasks[number] = asyncio.ensure_future(self._play(number, payload, self.stops[number]))
        self.tasks[number].add_done_callback(lambda task: self._finish(number, task))

    async def cancel_all(self) -> None:
        """Cancel all attempts and wait for them; the other side limits the time, and then kills this process."""
        for task in self.tasks.values():
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()))

    async def _play(self, number: int, payload: Json, stop: asyncio.Event) -> Json:
        try:
            result = await self._run(payload, stop)
            if not isinstance(result, dict):
                raise TypeError(f"run must return a dict, got {type(result).__name__}")
            size = len(json.dumps(result))
            if size > self._output_limit:
                raise ValueError(f"run returned {size} bytes of JSON, output_limit is {self._output_limit}")
            return {"id": number, "result": result}
        except BaseException as error:  # noqa: BLE001  # a boundary: one attempt's error is its answer
            return {"id": number, "error": _described(error)}

    def _finish(self, number: int, task: "asyncio.Task[Json]") -> None:
        """Send the answer; a task cancelled before it began has none."""
        del self.tasks[number], self.stops[number]
        cancelled = {"id": number, "error": _described(asyncio.CancelledError())}
        self._send(cancelled if task.cancelled() else task.result())


def _described(error: BaseException) -> Json:
    name = type(error).__name__
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = f"{name}: {error}" if str(error) else name
    return {"type": name, "message": text[:_LONGEST], "traceback": "".join(lines)[-10 * _LONGEST :]}


async def _beat(send: Send, attempts: _Attempts, interval: float, patience: float) -> None:
    """Send heartbeats; if one is long overdue, write the threads' tracebacks to standard error."""
    while True:
        faulthandler.dump_traceback_later(patience / 2)
        await asyncio.sleep(interval)
        send({"heartbeat": len(attempts.tasks)})


def _load(path: Path) -> Any:
    """Import the handler file; modules beside it can be imported, unless installed ones have the same name."""
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _limit_memory(limit: int) -> None:
    """Make allocations beyond the limit fail, here and in each process started from here."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


if __name__ == "__main__":
    main()
