"""`PinnedEngine`: every session is sampled by the weights of its first call, whatever is published later.

version   engine                        sessions
7         adapters of 7, cache          a (which began when 7 was the newest)
8         adapters of 8, cache          b, c          all three share the base's tensors
9         adapters of 9, cache          d, and sessions that begin now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from treadle.core.engine import Completion, ComponentStatus
from treadle.core.errors import EngineError
from treadle.core.images import PromptImage
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.torch.batch import Decode
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import MakeTower
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.model_files import is_adapter
from treadle.models.pretrained import load_pretrained
from treadle.models.towers import frozen_tower
from treadle.rendering.grammars import Grammars


def make_engine(
    model: PreTrainedModel,
    options: TorchEngineOptions,
    decode: Decode | None,
    grammars: Grammars | None = None,
    own_thread: bool = True,
    vision: MakeTower | None = None,
) -> LocalEngine:
    """Return an engine for the model, with one version per session if `options.pinned` is set.

    vision: see `TorchEngine`. Engines of several versions share the memory for caches.
    """
    if options.pinned is None:
        return TorchEngine(model, options, decode=decode, grammars=grammars, own_thread=own_thread, vision=vision)
    each = replace(options, cache_gib=options.cache_gib / (options.pinned + 1))
    make = partial(TorchEngine, model, each, decode=decode, grammars=grammars, own_thread=own_thread, vision=vision)
    return PinnedEngine(make, options.pinned)


def load_engine(model: Path, options: TorchEngineOptions, threads: int, deterministic: bool) -> LocalEngine:
    """Return an engine for the model, or adapter on its base, in a directory with the tokenizer.

    threads: thread count of this process from now on. deterministic: whether to use only deterministic kernels.
    Raises EngineError, and ConfigError for a model that cannot be loaded.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if is_adapter(model):
        from treadle.models.lora import load_adapted  # peft, which only adapters need

        module = load_adapted(model)
    else:
        module = load_pretrained(model, "model.path")
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    grammars = Grammars(tokenizer.backend_tokenizer)
    return make_engine(
        module,
        options,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        grammars,
        vision=lambda _: frozen_tower(Path(str(module.name_or_path)), model, device=options.device or "cpu"),
    )


class PinnedEngine:
    """Samples each session on the `TorchEngine` of its version. make: returns another engine for the same model.

    behind: how many versions a session may be behind the newest. Beyond that its calls fail, because their samples
    could not be trained.
    """

    def __init__(self, make: Callable[[], TorchEngine], behind: int) -> None:
        self._make, self._behind = make, behind
        self._fresh: TorchEngine | None = make()  # unused engine for the first publication
        self.limits = self._fresh.limits
        self._engines: dict[int, TorchEngine] = {}  # by version, oldest first
        self._sessions: dict[str, int | None] = {}  # None until its first call

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None

    def close_session(self, session: str) -> None:
        version = self._sessions.pop(session, None)
        if version in self._engines:
            self._engines[version].close_session(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion, as `TorchEngine` does. Raises EngineError also for a discarded version."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        version = self._sessions[session]
        if version is None:
            version = self._sessions[session] = self._newest()
            self._engines[version].open_session(session)
        engine = self._engines.get(version)
        if engine is None:
            raise EngineError(
                f"session {session!r} began with version {version}, and version {self._newest()} is more than "
                f"orchestration.max_staleness ({self._behind}) ahead of it"
            )
        completion = await engine.generate(prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images)
        return replace(completion, pinned=True)

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probability of ids[1:] under the newest weights, as `TorchEngine` does."""
        return await self._engines[self._newest()].score(ids, temperature=temperature, images=images)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample sessions from now on with these weights. Raises EngineError, and changes nothing, if any are
        missing or of another shape.
        """
        # Repeated, as for a process that was started with these weights: calls continue.
        if version in self._engines:
            return await self._engines[version].update_weights(weights, version)
        engine, self._fresh = self._fresh or self._make(), None
        try:
            await engine.update_weights(weights, version)
        except BaseException:
            await engine.close()
            raise
        self._engines[version] = engine
        used = set(self._sessions.values())
        gone = [v for v in self._engines if v < version and (v not in used or v < version - self._behind)]
        for each in [self._engines.pop(v) for v in gone]:
            await each.close()

    async def sleep(self) -> None:
        raise EngineError("an engine with training.lora.pin_attempts does not take turns; leave out placement.colocate")

    def status(self) -> list[ComponentStatus]:
        """Return the load of each version's engine."""
        fresh = [] if self._fresh is None else self._fresh.status()
        return fresh + [
            replace(status, name=f"{status.name}, version {version}")
            for version, engine in self._engines.items()
            for status in engine.status()
        ]

    async def close(self) -> None:
        for engine in self._all():
            await engine.close()

    def _all(self) -> list[TorchEngine]:
        return [*self._engines.values(), *([self._fresh] if self._fresh else [])]

    def _newest(self) -> int:
        if not self._engines:
            raise EngineError("no weights were published yet")
        return max(self._engines)


LocalEngine = TorchEngine | PinnedEngine
"""An engine that runs Treadle's own code in this process."""
