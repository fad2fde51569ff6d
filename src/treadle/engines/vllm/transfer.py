"""Transfer of weights from the trainer to servers: a file in shared memory, or a broadcast to every worker."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import accumulate, islice
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.engines.staging import WeightsFile, stage_file, to_host
from treadle.engines.vllm.server import Server, on_each
from treadle.engines.vllm.worker.treadle_group import Group, listen, pack

_BUCKET = 256 << 20  # bytes per broadcast; a larger tensor is sent alone
_TIMEOUT = 60.0  # seconds for each step of a group: forming it, one broadcast

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of weights that may be loaded any number of times until it is discarded.

    shapes: shape of each weight, by name. load: has the connected servers load them and report a label; a lost server
    is skipped if the others can continue. After its EngineError, servers may be half loaded, and must be reconnected.
    discard: releases the copy. Idempotent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[Sequence[Server], str], Awaitable[None]]
    discard: Callable[[], None]


class Transfer(Protocol):
    """Transfers weights from a source to servers. towers: whether they include those of towers."""

    towers: bool

    async def connect(self, servers: Sequence[Server]) -> None:
        """Prepare these servers for new weights, whatever they were prepared for before. Raises EngineError."""

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights without involving a server. Raises EngineError."""

    def close(self) -> None:
        """Drop connections. Idempotent."""


class SharedMemory:
    """A `Transfer` by a safetensors file, readable by servers of other users.

    dtype: dtype of the servers' weights. towers: whether towers are among them.
    """

    def __init__(self, dtype: torch.dtype, towers: bool = False) -> None:
        self._dtype, self.towers = dtype, towers

    async def connect(self, servers: Sequence[Server]) -> None:
        info = {"towers": True} if self.towers else {}
        await on_each(servers, lambda server: server.post("/init_weight_transfer_engine", {"init_info": info}))

    async def stage(self, source: WeightSource) -> Staged:
        remedy = "set engine.options.transfer=collective"
        file = await stage_file(source, WeightsFile(self._dtype, private=False, remedy=remedy))

        async def load(servers: Sequence[Server], label: str) -> None:
            await on_each(servers, lambda server: server.load({"path": str(file.path)}, label))

        return Staged(file.shapes, load, file.discard)

    def close(self) -> None:
        pass


class Collective:
    """A `Transfer` by broadcasts. dtype: dtype of the servers' weights. towers: whether towers are among them.

    The group contains the workers of all servers. After any failure a new one is formed, on another port.
    """

    def __init__(self, dtype: torch.dtype, towers: bool = False) -> None:
        self._dtype, self.towers = dtype, towers
        self._device = torch.device("cpu")  # device of the weights staged last
        self._group: Group | None = None

    async def connect(self, servers: Sequence[Server]) -> None:
        """Form a group with all workers of these servers. Raises EngineError."""
        self.close()
        *firsts, size = accumulate((server.workers for server in servers), initial=1)  # rank 0 is this process
        address = address_towards([server.url for server in servers])
        store = listen(address, _TIMEOUT)
        group = {"host": address, "port": store.port, "size": size, "timeout": _TIMEOUT}
        info = {"towers": True} if self.towers else {}
        self._group = await _together(
            lambda: Group(store, 0, size, device=self._device, address=address, timeout=_TIMEOUT),
            {
                server: server.post(
                    "/init_weight_transfer_engine",
                    {"init_info": {**info, "group": {**group, "first": first}}},
                )
                for server, first in zip(servers, firsts, strict=True)
            },
            steps=2,
        )

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights into this machine's memory. Raises EngineError."""
        self._device, buckets = await source.stage(Packed(self._dtype))
        shapes = {name: shape for bucket in buckets for name, shape in bucket.shapes.items()}

        async def load(servers: Sequence[Server], label: str) -> None:
            await self._broadcast(buckets, servers, label)

        return Staged(shapes, load, buckets.clear)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _broadcast(self, buckets: Sequence[Bucket], servers: Sequence[Server], label: str) -> None:
        """Broadcast to the servers of the last `connect` while they load. Raises EngineError and closes the group."""
        group = self._group
        assert group is not None

        def send() -> None:
            for bucket in buckets:
                group.broadcast(bucket.packed.to(group.device))

        update = {"buckets": [bucket.message() for bucket in buckets]}
        try:
            await _together(send, {server: server.load(update, label) for server in servers}, steps=1 + len(buckets))
        except BaseException:
            self.close()
            raise


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Weights of one dtype, concatenated in `packed` (uint8, on the CPU). shapes: shapes by name, in that order."""

    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    packed: Tensor

    def message(self) -> dict[str, Any]:
        """Return a server's instructions for receiving the bucket, as JSON data."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "shapes": self.shapes}


@dataclass(frozen=True, slots=True)
class Packed:
    """Copies weights into buckets (a `WeightsDestination`). dtype: dtype of the servers' weights."""

    dtype: torch.dtype

    def write(
        self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]
    ) -> tuple[torch.device, list[Bucket]]:
        """Return the device of the weights, and the buckets in the order of names."""
        sizes = {}
        for name, tensor in described.items():
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            sizes[name] = dtype, tensor.numel() * dtype.itemsize
        buckets, weights = [], iter(weights)
        for names in cut(sizes, _BUCKET):
            tensors = {name: to_host(tensor, self.dtype) for name, tensor in islice(weights, len(names))}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            buckets.append(Bucket(tensors[names[0]].dtype, shapes, pack(list(tensors.values()))))
        return next((tensor.device for tensor in described.values()), torch.device("cpu")), buckets


def address_towards(urls: Sequence[str]) -> str:
    """Return this machine's address on the route to remote servers, or 127.0.0.1 if all are local.

    Raises EngineError.
    """
    for url in urls:
        parts = urlsplit(url)
        try:
            family, kind, *_, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                address = str(probe.getsockname()[0])
        except OSError as error:
            raise EngineError(f"there is no route to the vLLM server {url}: {error}") from error
        if not ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def cut(sizes: Mapping[str, tuple[torch.dtype, int]], limit: int) -> list[list[str]]:
    """Split names into runs of one dtype and at most `limit` bytes; a larger tensor is a separate run."""
    runs: list[list[str]] = []
    kind, room = None, 0
    for name, (dtype, size) in sizes.items():
        if dtype != kind or size > room:
            runs.append([])
            kind, room = dtype, limit
        runs[-1].append(name)
        room -= size
    return runs


async def _together(work: Callable[[], T], calls: Mapping[Server, Coroutine[Any, Any, Any]], *, steps: int) -> T:
    """Run `work` in a thread while the servers answer their calls; return its result.

    A failure anywhere fails the rest, at the latest when their steps time out. A server that still does not answer is
    given up, and the thread abandoned. Raises EngineError for the first failure other than a lost server.
    """
    local = _in_thread(work)
    remote = {server: asyncio.ensure_future(call) for server, call in calls.items()}
    try:
        first, late = await asyncio.wait(
            [local, *remote.values()], timeout=steps * _TIMEOUT, return_when=asyncio.FIRST_EXCEPTION
        )
        if late:
            _, late = await asyncio.wait(late, timeout=1.5 * _TIMEOUT)
    finally:
        for call in remote.values():
            call.cancel()
    for server, call in remote.items():
        if call in late:
            server.lose("it did not return from a failed broadcast")
    failed = [call for server, call in remote.items() if call not in late and call.exception() and not server.is_lost]
    if failed:
        min(failed, key=lambda call: call not in first).result()
    if local in late:
        raise EngineError("weights could not be broadcast in time")
    if error := local.exception():
        raise EngineError(f"weights could not be broadcast: {error}") from error
    return local.result()


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but in a daemon thread, which never keeps the process from exiting."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(result)
