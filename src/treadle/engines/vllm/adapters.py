"""LoRA adapters on vLLM's servers: each version has a name of its own, and calls say which they are for.

    write -> load -> prove -> admit for calls that begin from now on        no pause: nothing in flight changes
                |       |
                +- failed: unload the new one; the old one serves on

Version 0 is an adapter too, which changes nothing: on a CPU, vLLM computes calls of the bare base with whatever adapter
is in its last slot, if both are in one batch. Names and files stay until no call and no session needs them: servers
read adapters again that they have evicted.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.core.types import Floats
from treadle.engines.config import EngineConfig
from treadle.engines.staging import WeightsFile, stage_file
from treadle.engines.vllm.publication import Probe
from treadle.engines.vllm.server import Adapter, Admission, Admitted, Server, on_each
from treadle.models.model_files import ADAPTER_CONFIG

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for; every call costs as much as the largest


@dataclass(frozen=True, slots=True)
class Exported:
    """What an adapter's directory says of it. settings: the content of adapter_config.json."""

    base: Path
    rank: int
    targets: list[str]
    settings: bytes

    @classmethod
    def read(cls, directory: Path) -> Exported:
        content = (directory / ADAPTER_CONFIG).read_bytes()
        settings: Any = json.loads(content)
        return cls(Path(settings["base_model_name_or_path"]), settings["r"], settings["target_modules"], content)

    def served_by(self, config: EngineConfig, slots: int) -> EngineConfig:
        """Return the settings of servers that compute `slots` versions at once. `engine.options` overrides them."""
        args = {
            "enable-lora": True,
            "max-loras": slots,
            "max-lora-rank": next(rank for rank in _RANKS if rank >= self.rank),
            "lora-target-modules": self.targets,  # else it wraps the head too, and dies of scoring amid other calls
            **config.vllm.args,
        }
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **config.vllm.environment}
        return config.model_copy(update={"options": {**config.options, "args": args, "environment": environment}})


class AdapterPublication:
    """Publishes adapters to vLLM's servers (a `WeightSync`), and knows which of them each call is for.

    settings: the adapters' adapter_config.json. pinned: sessions keep the version of their first call, at most so many
    behind the newest; None: a call is for the newest one as it begins.
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        source: WeightSource,
        settings: bytes,
        *,
        probe: Probe | None = None,
        pinned: int | None = None,
    ) -> None:
        self._servers, self._source, self._settings, self._probe, self._pinned = (
            servers,
            source,
            settings,
            probe,
            pinned,
        )
        self._owner, self._written = uuid4().hex[:8], 0
        self.admission = Admission()  # always open
        self.is_refused = False
        self._alive: list[Adapter] = []  # loaded everywhere, the newest last
        self._expected: Floats | None = None  # scores of the probe under the newest
        self._calls: Counter[Adapter] = Counter()
        self._sessions: dict[str, Adapter] = {}
        self._one = asyncio.Lock()

    async def begin(self, version: int) -> None:
        """Let calls begin; each still needs an adapter that was published."""
        self.admission.open(Admitted(self._owner, {self._owner: version}))

    @contextmanager
    def adapter(self, session: str | None) -> Iterator[Adapter]:
        """Within, the adapter that a call of this session is for stays loaded. None: the newest.

        Raises EngineError before the first publication, and for a session whose version is too old.
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
        """Have the servers load and prove the trainer's adapter; calls that begin afterwards are for it.

        Raises EngineError where that failed; then the version before serves on, everywhere.
        """
        async with self._one:
            self._written += 1
            name = f"treadle-{self._owner}-{self._written}-v{version}"
            file = await stage_file(self._source, WeightsFile(private=False, name="adapter_model.safetensors"))
            new = Adapter(name, version, file.path.parent)
            try:
                (new.directory / ADAPTER_CONFIG).write_bytes(self._settings)
                expected = None if self._probe is None else await self._source.score(self._probe.ids)
                await on_each(self._servers, lambda server: self._load(server, new))
                await on_each(self._servers, lambda server: self._prove(server, new, expected))
            except BaseException as error:
                await self._unload(new)
                if not isinstance(error, EngineError):
                    raise
                now = f"version {self._alive[-1].version} serves on" if self._alive else "there is none before it"
                raise EngineError(f"publication of version {version} failed: {error}; {now}") from error
            self._alive.append(new)
            self.admission.open(Admitted(self._owner, {self._owner: version}))
            self._expected = expected
            for old in self._unused():
                self._alive.remove(old)
                await self._unload(old)

    async def join(self, server: Server, number: int) -> None:
        """Have a restarted server load what the others have, in place of the lost one of that number."""
        async with self._one:
            for adapter in self._alive:
                await self._load(server, adapter)
            if self._alive:
                await self._prove(server, self._alive[-1], self._expected)
            self._servers[number] = server

    def close(self) -> None:
        for adapter in self._alive:
            shutil.rmtree(adapter.directory, ignore_errors=True)

    def _unused(self) -> list[Adapter]:
        """The old adapters that no call is in flight for, and no session may still make one."""
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
