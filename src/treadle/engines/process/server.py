"""`EngineServer`: the half of `ProcessEngine` that is where the engine is."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import numpy as np
from torch import Tensor

from treadle.core.errors import TreadleError
from treadle.engines.process.protocol import Message, completion_message, sampling_of
from treadle.engines.torch.engine import TorchEngine

FetchWeights = Callable[[Message], Awaitable[Mapping[str, Tensor]]]
"""Gets the weights that a `publish` message names, while the engine goes on."""


class EngineServer:
    """Hands messages (`process.protocol`) to the engine and posts its answers."""

    def __init__(self, engine: TorchEngine, post: Callable[[Message], None], fetch: FetchWeights) -> None:
        self.engine, self._post, self._fetch = engine, post, fetch
        self._tasks: dict[int, asyncio.Task[Message]] = {}

    def take(self, message: Message) -> None:
        """Do what a message says; answers are posted later."""
        match message["do"]:
            case "open":
                self.engine.open_session(message["session"])
            case "close":
                self.engine.close_session(message["session"])
            case "ping":
                [own] = self.engine.status()
                self._post({"do": "pong", "running": own.running, "waiting": own.waiting, "cache": own.cache})
            case "cancel":
                if message["call"] in self._tasks:
                    self._tasks[message["call"]].cancel()
            case _:
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks[message["call"]] = task
                task.add_done_callback(partial(self._finished, message["call"]))

    async def close(self) -> None:
        """Cancel what runs, and close the engine."""
        for task in self._tasks.values():
            task.cancel()
        await self.engine.close()

    async def _answer(self, message: Message) -> Message:
        match message["do"]:
            case "generate":
                completion = await self.engine.generate(
                    np.array(message["prompt"], np.int32),
                    sampling_of(message["sampling"]),
                    session=message["session"],
                    cache_salt=message["salt"],
                )
                return {"completion": completion_message(completion)}
            case "score":
                ids = np.array(message["ids"], np.int32)
                return {"logprobs": (await self.engine.score(ids, temperature=message["temperature"])).tolist()}
            case "sleep":
                await self.engine.sleep()
                return {}
            case _:
                await self.engine.update_weights(await self._fetch(message), message["version"])
                return {"logprobs": (await self.engine.score(np.array(message["probe"], np.int32))).tolist()}

    def _finished(self, call: int, task: asyncio.Task[Message]) -> None:
        del self._tasks[call]
        if task.cancelled():  # its caller no longer waits
            return
        error = task.exception()
        self._post({"call": call, **(task.result() if error is None else error_message(error))})


def error_message(error: BaseException) -> Message:
    """Return what the caller is sent of a failure; one that is not Treadle's own goes to the log with its traceback."""
    if isinstance(error, TreadleError):
        return {"error": str(error)}
    traceback.print_exception(error)
    return {"error": f"the engine failed with {type(error).__name__}: {error}"}
