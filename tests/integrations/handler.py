"""A handler that does what its payload says, for the tests of worker processes."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

time.sleep(0.05)  # an import that takes its time
IMPORTED = time.monotonic()
Json = dict[str, Any]
OPTIONS: Json = {}
HERE: list[None] = []
MOST, MET = [0], asyncio.Event()


def versions() -> Json:
    return {"handler": "1.0"}


async def start(options: Json) -> Json:
    OPTIONS.update(options)
    if "raise" in options:
        raise RuntimeError(options["raise"])
    return {"given": options}


async def close() -> None:
    if "closed" in OPTIONS:
        Path(OPTIONS["closed"]).write_text("")


async def run(payload: Json, stop: asyncio.Event) -> Json:
    result: Json = await globals()["do_" + payload["do"]](payload, stop)
    return result


async def do_echo(payload: Json, stop: asyncio.Event) -> Json:
    await asyncio.sleep(payload.get("seconds", 0))
    return {"value": payload.get("value"), "pid": os.getpid(), "imported": IMPORTED}


async def do_wait_for_stop(payload: Json, stop: asyncio.Event) -> Json:
    await stop.wait()
    return {"value": "stopped", "pid": os.getpid()}


async def do_meet(payload: Json, stop: asyncio.Event) -> Json:
    """Wait until so many attempts are here; say how many there were at most, also a little later."""
    HERE.append(None)
    MOST[0] = max(MOST[0], len(HERE))
    if len(HERE) >= payload["together"]:
        MET.set()
    await MET.wait()
    await asyncio.sleep(0.02)
    HERE.pop()
    return {"together": MOST[0]}


async def do_raise(payload: Json, stop: asyncio.Event) -> Json:
    raise LookupError("no such thing")


async def do_exit(payload: Json, stop: asyncio.Event) -> Json:
    sys.exit(3)


async def do_exit_in_a_task(payload: Json, stop: asyncio.Event) -> Json:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.ensure_future(leave())
    return {}


async def do_die(payload: Json, stop: asyncio.Event) -> NoReturn:
    print("the library gives up", file=sys.stderr, flush=True)
    os._exit(7)


async def do_block(payload: Json, stop: asyncio.Event) -> Json:
    time.sleep(1000)
    return {}


async def do_print(payload: Json, stop: asyncio.Event) -> Json:
    for _ in range(payload["lines"]):
        print("x" * 1000)
        os.write(1, b"y" * 1000 + b"\n")
    subprocess.run([sys.executable, "-c", 'print(\'{"id": 1, "result": {}}\')'], check=True)
    return {"value": sys.stdin.read()}


async def do_return(payload: Json, stop: asyncio.Event) -> Json:
    result: Json = eval(payload["what"])
    return result


async def do_allocate(payload: Json, stop: asyncio.Event) -> Json:
    return {"length": len(bytearray(payload["bytes"]))}


async def do_start_process(payload: Json, stop: asyncio.Event) -> Json:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(payload["folder"], str(process.pid)).write_text("")
    Path(payload["folder"], str(os.getpid())).write_text("")
    await asyncio.sleep(1000)
    return {}


async def do_clean_up(payload: Json, stop: asyncio.Event) -> Json:
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0.05)
        Path(payload["file"]).write_text("clean")
    return {}


async def do_ignore_cancelling(payload: Json, stop: asyncio.Event) -> Json:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


async def do_environment(payload: Json, stop: asyncio.Event) -> Json:
    return {"names": sorted(os.environ), "path": sys.path}
