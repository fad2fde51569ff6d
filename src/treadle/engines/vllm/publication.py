"""Changing the weights of running servers, completions in flight included.

    stage -> score -> [gate closed: pause -> load -> resume -> prove] -> admit
                                              |               |
                                              +--- failed: load the old weights again, or give the server up

No caller gets a token of weights that were not proven: no call starts or returns while the gate is closed, and an
answer that holds tokens of weights that were not admitted is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.core.types import Floats, Ids
from treadle.engines.config import InFlight
from treadle.engines.vllm.admission import Admission, Admitted
from treadle.engines.vllm.server import Server, left, on_each
from treadle.engines.vllm.transfer import Staged, Transfer

LOADING = "treadle: half loaded"
"""The label of a server from before a load to after it: a server that is found with it must not be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """How new weights are proven: servers must score `ids` int32[T] as the source does.

    tolerance: of the mean absolute difference of the log-probabilities of ids[1:] at temperature 1.
    """

    ids: Ids
    tolerance: float


class Publication:
    """The weights that vLLM's servers have, and how they get new ones (a `WeightSync`).

    servers: one that is started anew takes the place of a lost one (`join`). source: whose weights are published.
    probe: ids that new weights are proven with; None: they are not.
    Every swap gets a label of its own, which the servers report for each token and which salts their prefix caches. A
    label that this object did not hand out shows that something else changed the weights.
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        transfer: Transfer,
        source: WeightSource,
        *,
        in_flight: InFlight,
        probe: Probe | None = None,
    ) -> None:
        self._servers, self._transfer, self._source = servers, transfer, source
        self._in_flight, self._probe = in_flight, probe
        self._owner, self._swaps = uuid4().hex[:8], 0
        self.admission = Admission()  # of the calls that this process makes
        self._admitted = Admitted()
        self._staged: Staged | None = None  # the admitted weights, to go back to
        self._expected: Floats | None = None  # scores of the probe under them
        self._connected: list[Server] = []  # those that the transfer was agreed with
        self.is_refused = False  # nobody knows what the servers have, and none is to be started again
        self._one = asyncio.Lock()

    async def begin(self, version: int) -> None:
        """Admit the weights that the servers have already, as this version. Raises EngineError."""
        label = self._next_label()
        await self._each(lambda server: server.post("/update_weight_version", {"new_version": label}))
        self._admitted = self._admitted.then(label, version)
        await self._open()

    async def publish(self, version: int) -> None:
        """Swap the weights in, during the completions in flight; returns when they are proven and admitted.

        Raises EngineError: weights of another model (nothing has changed then), or a publication that failed; then the
        old weights serve on, or, if even those could not be restored, every further call fails.
        """
        async with self._one:
            staged = await self._transfer.stage(self._source)
            try:
                self._check_shapes(staged, version)
                expected = None if self._probe is None else await self._source.score(self._probe.ids)
                async with self._closed():
                    await self._swap(staged, expected, version)
            finally:
                if staged is not self._staged:
                    staged.discard()

    async def join(self, server: Server, number: int) -> None:
        """Have a server that was started anew serve the admitted weights, in place of the one of that number.

        Raises EngineError if it cannot take or prove them; then the lost one stays in its place.
        """
        async with self._one:
            if self._staged is not None:
                self._connected = []  # the others are agreed with again before the next load
                await self._transfer.connect([server])
                await server.post("/pause", mode="keep", clear_cache="true")
                await self._transfer.load(self._staged, [server], self._admitted.label)
                await server.post("/resume")
                await self._prove_one(server, self._expected)
            else:
                await server.post("/update_weight_version", {"new_version": self._admitted.label})
            await server.open(self._admitted)
            self._servers[number] = server

    def close(self) -> None:
        """Release what was staged."""
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
        self._transfer.close()

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Let no call begin or return meanwhile, wherever it is made. Raises EngineError if all servers get lost."""
        self.admission.hold()
        try:
            await self._each(Server.hold)
            yield
        finally:
            await self._open()

    async def _open(self) -> None:
        """Let calls of the admitted weights go on, wherever they are made."""
        self.admission.open(self._admitted)
        await asyncio.gather(*(server.open(self._admitted) for server in left(self._servers)))

    def _check_shapes(self, staged: Staged, version: int) -> None:
        expected, given = self._source.model.shapes, staged.shapes
        if unfit := sorted(n for n in expected.keys() | given.keys() if expected.get(n) != given.get(n)):
            raise EngineError(
                f"publication of version {version}: {len(unfit)} weights do not fit the engine's, for example "
                f"{unfit[0]}: {given.get(unfit[0], 'absent')}, not {expected.get(unfit[0], 'there')}"
            )

    async def _swap(self, staged: Staged, expected: Floats | None, version: int) -> None:
        label = self._next_label()
        in_flight: Literal["keep", "abort"] = "keep"
        try:
            await self._load(staged, label, in_flight)
            in_flight = "abort"  # from here on, what is in flight may hold tokens of the new weights
            await self._resume()
            await self._prove(expected)
        except EngineError as error:
            await self._go_back(version, error, in_flight)
            raise EngineError(
                f"publication of version {version} failed: {error}; version {self._admitted.version} serves on"
            ) from error
        except BaseException:
            self._give_up(f"publication of version {version} was interrupted")
            raise
        self._admitted = self._admitted.then(label, version)
        self._expected = expected
        old, self._staged = self._staged, staged
        if old is not None:
            old.discard()

    async def _load(self, staged: Staged, label: str, in_flight: Literal["keep", "abort"]) -> None:
        """Have the servers load; if that fails because servers were lost, try again with those that are left."""
        while True:
            servers = left(self._servers)
            try:
                if self._connected != servers:
                    await self._transfer.connect(servers)
                    self._connected = servers
                await self._each(lambda server: server.post("/pause", mode=in_flight, clear_cache="false"))
                await self._each(lambda server: server.post("/update_weight_version", {"new_version": LOADING}))
                await self._transfer.load(staged, servers, label)
                return
            except EngineError:
                self._connected = []
                if left(self._servers) in ([], servers):
                    raise

    async def _resume(self) -> None:
        if self._in_flight == "recompute":
            await self._each(lambda server: server.post("/reset_prefix_cache", reset_running_requests="true"))
        await self._each(lambda server: server.post("/resume"))

    async def _prove(self, expected: Floats | None) -> None:
        await self._each(lambda server: self._prove_one(server, expected))

    async def _prove_one(self, server: Server, expected: Floats | None) -> None:
        if self._probe is None or expected is None:
            return
        gap = float(np.abs(await server.score(self._probe.ids) - expected).mean())
        if not gap <= self._probe.tolerance:
            raise EngineError(
                f"{server} scores the new weights otherwise than the learner, by {gap:.2e} on average "
                f"({self._probe.tolerance:.0e} is allowed)"
            )

    async def _go_back(self, version: int, error: EngineError, in_flight: Literal["keep", "abort"]) -> None:
        """Load the admitted weights again."""
        if self._staged is None:
            self._give_up(f"version {version} failed: {error}; there is no earlier publication to go back to")
            raise EngineError(f"publication of version {version} failed, and the engine is refused: {error}") from error
        label, serving = self._next_label(), self._admitted.version
        assert serving is not None
        self._connected = []  # servers that took the new weights, of other names perhaps, are to take the old ones
        try:
            await self._load(self._staged, label, in_flight)
            await self._resume()
        except BaseException as second:
            self._give_up(f"version {version} failed: {error}; going back to version {serving} failed, too: {second!r}")
            raise
        self._admitted = self._admitted.then(label, serving)

    async def _each(self, call: Callable[[Server], Awaitable[object]]) -> None:
        await on_each(self._servers, call)

    def _give_up(self, reason: str) -> None:
        self.is_refused = True
        for server in self._servers:
            server.lose(reason)

    def _next_label(self) -> str:
        self._swaps += 1
        return f"{self._owner}.{self._swaps}"
