"""LoRA adapters on vLLM's servers: each version has its own name, and calls name their version.

    write -> load -> prove -> admit for calls that begin from now on        no pause: nothing in flight changes
                |       |
                +- failed: unload the new one; the old one keeps serving

Version 0 is an adapter too, but without effect: on a CPU, vLLM computes calls of the bare base with whichever adapter
is in its last slot, if both are in one batch. Names and files stay until no call and no session needs them: servers
reread evicted adapters.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.core.types import Floats
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import flags
from treadle.engines.vllm.publication import Probe
from treadle.engines.vllm.server import Adapter, Admission, Admitted, Server, on_each
from treadle.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from treadle.models.tensor_file import write_tensors

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks with vLLM kernels; every call costs as much as the largest
_LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_CLOSING = 10.0  # seconds for servers to unload adapters


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter in a directory visible to all servers; other versions are written beside it.

    slots: number of versions that servers compute at once.
    """

    directory: Path
    base: Path
    rank: int
    targets: list[str]
    slots: int

    @classmethod
    def read(cls, directory: Path, slots: int = 2) -> Exported:
        settings: Any = json.loads((directory / ADAPTER_CONFIG).read_bytes())
        base, rank, targets = (settings[name] for name in ("base_model_name_or_path", "r", "target_modules"))
        return cls(directory.absolute(), Path(base), rank, targets, slots)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of its servers."""
        return {
            "enable-lora": True,
            "max-loras": self.slots,
            "max-lora-rank": next(rank for rank in _RANKS if rank >= self.rank),
            # otherwise it also wraps the head, and crashes when scoring amid other calls
            "lora-target-modules": self.targets,
        }

    def served_by(self, config: EngineConfig) -> EngineConfig:
        """Return the settings for starting servers. `engine.options` overrides the adapters' requirements."""
        args = {**self.arguments, **config.vllm.args}
        environment = {_LOADING: "True", **config.vllm.environment}
        return config.model_copy(update={"options": {**config.options, "args": args, "environment": environment}})

    async def check(self, server: Server) -> None:
        """Raise EngineError if a server was started without the settings that the adapter needs."""
        # Slow: it first inspects the machine.
        info = await server.get("/server_info?config_format=json", 300.0)
        lora = info["vllm_config"]["lora_config"]
        if (
            not info["vllm_env"][_LOADING]
            or lora is None
            or lora["max_loras"] < self.slots
            or lora["max_lora_rank"] < self.rank
            or "lm_head" in (modules := lora["target_modules"] or ["lm_head"])
            or not {*self.targets} <= {*modules}
        ):
            raise EngineError(
                f"{server} was not started for these adapters; start it with {_LOADING}=True in its environment and "
                f"{' '.join(flags(self.arguments))}"
            )


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Writes an adapter's weights to a new directory (a `WeightsDestination`)."""

    directory: Path

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write them, in the process that has the weights. Raises EngineError."""
        try:
            self.directory.mkdir()
            write_tensors(self.directory / ADAPTER_WEIGHTS, described, weights, {"format": "pt"})
        except OSError as error:
            raise EngineError(
                f"could not write an adapter to {self.directory}: {error.strerror or error}; make room there"
            ) from error


class AdapterPublication:
    """Publishes adapters to vLLM's servers (a `WeightSync`), and chooses the adapter of each call.

    exported: an adapter of the source, beside which versions are written. pinned: sessions keep the version of their
    first call, at most so many behind the newest; None: a call uses the newest one when it begins.
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        source: WeightSource,
        exported: Exported,
        *,
        probe: Probe | None = None,
        pinned: int | None = None,
    ) -> None:
        self._servers, self._source, self._exported = servers, source, exported
        self._probe, self._pinned = probe, pinned
        self._owner, self._written = uuid4().hex[:8], 0
        self.admission = Admission()  # always open
        self.is_refused = False
        self._alive: list[Adapter] = []  # loaded everywhere, the newest last
        self._expected: Floats | None = None  # scores of the probe under the newest version
        self._calls: Counter[Adapter] = Counter()
        self._sessions: dict[str, Adapter] = {}
        self._one = asyncio.Lock()

    async def begin(self, version: int) -> None:
        """Let calls begin; each still needs an adapter that was published."""
        self.admission.open(Admitted(self._owner, {self._owner: version}))

    @contextmanager
    def adapter(self, session: str | None) -> Iterator[Adapter]:
        """Keep a session's adapter loaded inside the block. None: the newest.

        Raises EngineError before the first publication, and for a session with a version that is too old.
        """
        if not self._alive:
            raise EngineError("no adapter was published yet")
        newest = self._alive[-1]
        chosen = newest
        if session is not None and self._pinned is not None:
            chosen = self._sessions.setdefault(session, newest)
            if chosen not in self._alive:
                raise EngineError(
                    f"session {session!r} began with version {chosen.version}, and version {newest.version} is more "
                    f"than orchestration.max_staleness ({self._pinned}) ahead of it"
                )
        self._calls[chosen] += 1
        try:
            yield chosen
        finally:
            self._calls[chosen] -= 1

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def publish(self, version: int) -> None:
        """Have the servers load and prove the trainer's adapter; later calls use it.

        Raises EngineError after a failure; the previous version then keeps serving on all servers.
        """
        async with self._one:
            self._written += 1
            name = f"treadle-{self._owner}-{self._written}-v{version}"
            new = Adapter(name, version, self._exported.directory.with_name(name), self._pinned is not None)
            try:
                await self._source.stage(AdapterFile(new.directory))
                shutil.copyfile(self._exported.directory / ADAPTER_CONFIG, new.directory / ADAPTER_CONFIG)
                expected = None if self._probe is None else await self._source.score(self._probe.ids)
                await on_each(self._servers, lambda server: self._load(server, new))
                await on_each(self._servers, lambda server: self._prove(server, new, expected))
            except BaseException as error:
                await self._unload(new)
                if not isinstance(error, EngineError):
                    raise
                now = f"version {self._alive[-1].version} keeps serving" if self._alive else "there is no earlier one"
                raise EngineError(f"publication of version {version} failed: {error}; {now}") from error
            self._alive.append(new)
            self.admission.open(Admitted(self._owner, {self._owner: version}))
            self._expected = expected
            for old in self._unused():
                self._alive.remove(old)
                await self._unload(old)

    async def join(self, server: Server, number: int) -> None:
        """Have a restarted server load the current adapters, in place of the lost one of that number."""
        async with self._one:
            for adapter in self._alive:
                await self._load(server, adapter)
            if self._alive:
                await self._prove(server, self._alive[-1], self._expected)
            self._servers[number] = server

    async def close(self) -> None:
        """Unload all adapters, for servers that keep running."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING):
                for adapter in self._alive:
                    await self._unload(adapter)

    def _unused(self) -> list[Adapter]:
        """Return old adapters without a call in flight or a session that may still call them."""
        newest = self._alive[-1]
        kept = {a for a in self._sessions.values() if a.version >= newest.version - (self._pinned or 0)}
        return [a for a in self._alive[:-1] if not self._calls[a] and a not in kept]

    async def _load(self, server: Server, adapter: Adapter) -> None:
        request = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        await server.post("/v1/load_lora_adapter", request)

    async def _prove(self, server: Server, adapter: Adapter, expected: Floats | None) -> None:
        if self._probe is not None and expected is not None:
            await self._probe.check(server, expected, adapter)

    async def _unload(self, adapter: Adapter) -> None:
        with suppress(EngineError):  # some may not have it
            await on_each(
                self._servers, lambda server: server.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
            )
        shutil.rmtree(adapter.directory, ignore_errors=True)
