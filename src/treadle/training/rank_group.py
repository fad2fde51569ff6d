"""`RankGroup`: a trainer of several processes on this machine that share the model (`training.sharding`).

Every call goes to all ranks, each with its own `EmbeddedTrainer`, and the first one's answer is returned. A rank that
fails alone ends the group: continue the run with --resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from treadle.core.engine import ComponentStatus, ProcessId
from treadle.core.files import Manifest
from treadle.core.images import PromptImage
from treadle.core.trainer import Conversation, ModelInfo, UpdateResult, WeightsDestination
from treadle.core.types import Floats, Group, Ids, Routing
from treadle.engines.compute import Compute
from treadle.models.model_files import tokenizer_directory
from treadle.training.config import TrainerSpec
from treadle.training.make import load_learner
from treadle.training.rank_processes import RankProcesses
from treadle.training.ranks import Ranks
from treadle.training.trainer import EmbeddedTrainer

R = TypeVar("R")


class RankTrainer(EmbeddedTrainer):
    """One rank's part of the group's trainer."""

    def facts(self) -> tuple[ModelInfo, int, ProcessId]:
        """Return the trainer's description, and this rank's process."""
        return self.model, self.checkpoint_bytes, ProcessId.own()


def make_rank_trainer(spec: TrainerSpec, ranks: Ranks) -> RankTrainer:
    """Return this rank's part of the trainer. Raises as `make_trainer`."""
    learner = load_learner(spec, ranks)
    return RankTrainer(learner, tokenizer_directory(spec.model), Compute(None), spec.warm_start)


def start_ranks(spec: TrainerSpec) -> RankGroup:
    """Start a trainer of several processes on this machine.

    Thread count and determinism are copied from this process.
    Raises the errors of making a trainer, and RankError for a process that fails otherwise.
    """
    section = spec.placement
    return RankGroup(
        RankProcesses(partial(make_rank_trainer, spec), section.ranks, replicas=section.replicas, device=spec.device)
    )


class Calls(Protocol):
    """Passes calls on to the ranks' trainers, wherever they are: a `RankGang`, or a fake."""

    @property
    def busy(self) -> bool: ...

    def call(self, name: str, *arguments: Any) -> Sequence[Any]: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class RankGroup:
    """Trains with several ranks: a `Trainer`. processes: each has a `RankTrainer`, and all are called together."""

    def __init__(self, processes: Calls) -> None:
        self._processes = processes
        self._compute = Compute("treadle-ranks")  # calls block until the ranks have answered
        self.model: ModelInfo
        self.checkpoint_bytes: int
        facts = self._processes.call("facts")
        self.model, self.checkpoint_bytes, _ = facts[0]
        self._places: list[ProcessId] = [place for _, _, place in facts]

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        results: list[UpdateResult] = await self._call("train_batch", groups)
        return results

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        return float(await self._call("supervised_step", conversations, step))

    async def stage(self, destination: WeightsDestination[R]) -> R:
        written: R = await self._call("stage", destination)
        return written

    async def score(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        logprobs: Floats = await self._call("score", ids, images)
        return logprobs

    async def experts(self, ids: Ids) -> Routing:
        chosen: Routing = await self._call("experts", ids)
        return chosen

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        await self._call("export", directory.absolute(), more)

    async def digest(self) -> str:
        return str(await self._call("digest"))

    async def save(self, directory: Path) -> str:
        return str(await self._call("save", directory.absolute()))

    async def load(self, saved: Manifest) -> None:
        await self._call("load", saved)

    async def offload(self) -> None:
        await self._call("offload")

    async def reload(self) -> None:
        await self._call("reload")

    def status(self) -> list[ComponentStatus]:
        busy = int(self._processes.busy)
        return [
            ComponentStatus("learner", str(rank), process=place, running=busy)
            for rank, place in enumerate(self._places)
        ]

    def close(self) -> None:
        if self._processes.busy:
            self._processes.kill()
        self._compute.close()
        self._processes.close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return (await self._compute.run(self._processes.call, name, *arguments))[0]
