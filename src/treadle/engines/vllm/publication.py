"""Changing the weights of running servers, including for completions in flight.

    stage -> score -> [gate closed: pause -> load -> resume -> prove] -> admit
                                              |               |
                                              +--- failed: load the old weights again, or give the server up

No caller gets a token of unproven weights: no call starts or returns while the gate is closed, and an answer with
tokens of weights that were not admitted is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.core.types import Floats, Ids
from treadle.engines.config import InFlight
from treadle.engines.vllm.server import Adapter, Admission, Admitted, Server, on_each, serving
from treadle.engines.vllm.transfer import Staged, Transfer

LOADING = "treadle: half loaded"
"""Label of a server during a load. A server found with it must not be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Proof of new weights: servers must reproduce the source's scores of `ids` int32[T].

    tolerance: limit of the mean absolute difference between log-probabilities of ids[1:] at temperature 1.
    """

    ids: Ids
    tolerance: float

    async def check(self, server: Server, expected: Floats, adapter: Adapter | None = None) -> None:
        """Raise EngineError unless the server scores the ids as expected, with an adapter if given."""
        gap = float(np.abs(await server.score(self.ids, adapter=adapter) - expected).mean())
        if not gap <= self.tolerance:
            raise EngineError(
                f"{server} scores the new weights differently from the learner, by {gap:.2e} on average "
                f"({self.tolerance:.0e} is allowed)"
            )


class Publication:
    """Publishes weights to vLLM's servers (a `WeightSync`), and tracks the weights of each server.

    servers: a restarted one replaces a lost one (`join`). probe: None skips the proof.
    Every swap has its own label, which servers report for each token and which salts their prefix caches. A label
    unknown to this object shows that something else changed the weights.
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
        self.admission = Admission()  # gate of this process's calls
        self._admitted = Admitted()
        self._staged: Staged | None = None  # the admitted weights, to fall back to
        self._expected: Floats | None = None  # scores of the probe under them
        self._connected: list[Server] = []  # the servers that the transfer is prepared for
        self.is_refused = False  # the servers' weights are unknown, and no server may be restarted
        self._one = asyncio.Lock()

    async def begin(self, version: int) -> None:
        """Admit the weights already on the servers as this version. Raises EngineError."""
        label = self._next_label()
        await self._each(lambda server: server.post("/update_weight_version", {"new_version": label}))
        self._admitted = self._admitted.then(label, version)
        await self._open()

    async def publish(self, version: int) -> None:
        """Swap the weights in, during completions in flight; return when they are proven and admitted.

        Raises EngineError for weights of another model (nothing has changed then), or for a failed publication; then
        the old weights keep serving or, if even those could not be restored, every further call fails.
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
        """Have a restarted server serve the admitted weights, in place of the lost one of that number.

        Raises EngineError if it cannot load or prove them; the lost one then keeps its place.
        """
        async with self._one:
            if self._staged is None:
                await server.post("/update_weight_version", {"new_version": self._admitted.label})
            else:
                self._connected = []  # the others are reconnected before the next load
                await self._transfer.connect([server])
                await server.post("/pause", mode="keep", clear_cache="true")
                await self._staged.load([server], self._admitted.label)
                await server.post("/resume")
                await self._prove(server, self._expected)
            await server.open(self._admitted)
            self._servers[number] = server

    def adapter(self, session: str | None) -> AbstractContextManager[None]:
        """Return a null context: all weights are the servers' own model's."""
        return nullcontext()

    def forget(self, session: str) -> None:
        pass

    async def close(self) -> None:
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
        self._transfer.close()

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Let no call begin or return inside the block, in any process. Raises EngineError if all servers get lost."""
        self.admission.hold()
        try:
            await self._each(Server.hold)
            yield
        finally:
            await self._open()

    async def _open(self) -> None:
        self.admission.open(self._admitted)
        await asyncio.gather(*(server.open(self._admitted) for server in serving(self._servers)))

    def _check_shapes(self, staged: Staged, version: int) -> None:
        expected, actual = self._source.model.shapes, staged.shapes
        if unfit := sorted(n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n)):
            raise EngineError(
                f"publication of version {version}: {len(unfit)} weights do not fit the engine's, for example "
                f"{unfit[0]}: {actual.get(unfit[0], 'absent')}, not {expected.get(unfit[0], 'there')}"
            )

    async def _swap(self, staged: Staged, expected: Floats | None, version: int) -> None:
        label = self._next_label()
        in_flight: Literal["keep", "abort"] = "keep"
        try:
            await self._load(staged, label, in_flight)
            # From here on, calls in flight may have tokens of the new weights.
            in_flight = "abort"
            await self._resume()
            await self._each(lambda server: self._prove(server, expected))
        except EngineError as error:
            await self._go_back(version, error, in_flight)
            raise EngineError(
                f"publication of version {version} failed: {error}; version {self._admitted.version} keeps serving"
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
        """Have the servers load; if that fails because servers were lost, retry with the others."""
        while True:
            servers = serving(self._servers)
            try:
                if self._connected != servers:
                    await self._transfer.connect(servers)
                    self._connected = servers
                await self._each(lambda server: server.post("/pause", mode=in_flight, clear_cache="false"))
                await self._each(lambda server: server.post("/update_weight_version", {"new_version": LOADING}))
                await staged.load(servers, label)
                return
            except EngineError:
                self._connected = []
                if serving(self._servers) in ([], servers):
                    raise

    async def _resume(self) -> None:
        if self._in_flight == "recompute":
            await self._each(lambda server: server.post("/reset_prefix_cache", reset_running_requests="true"))
            if self._transfer.towers:
                await self._each(lambda server: server.post("/reset_encoder_cache"))
        await self._each(lambda server: server.post("/resume"))

    async def _prove(self, server: Server, expected: Floats | None) -> None:
        if self._probe is not None and expected is not None:
            await self._probe.check(server, expected)

    async def _go_back(self, version: int, error: EngineError, in_flight: Literal["keep", "abort"]) -> None:
        if self._staged is None:
            self._give_up(f"version {version} failed: {error}; there is no earlier publication to fall back to")
            raise EngineError(f"publication of version {version} failed, and the engine is refused: {error}") from error
        label, version_before = self._next_label(), self._admitted.version
        assert version_before is not None
        self._connected = []  # servers with the new weights, perhaps under other names, must reload the old ones
        try:
            await self._load(self._staged, label, in_flight)
            await self._resume()
        except BaseException as second:
            self._give_up(
                f"version {version} failed: {error}; restoring version {version_before} failed, too: {second!r}"
            )
            raise
        self._admitted = self._admitted.then(label, version_before)

    async def _each(self, call: Callable[[Server], Awaitable[object]]) -> None:
        await on_each(self._servers, call)

    def _give_up(self, reason: str) -> None:
        self.is_refused = True
        for server in self._servers:
            server.lose(reason)

    def _next_label(self) -> str:
        self._swaps += 1
        return f"{self._owner}.{self._swaps}"
