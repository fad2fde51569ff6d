"""A trainer that is two processes, made without a change outside this file, in a run through the public door."""

import asyncio
import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.orchestration.runs import check_finished
from tests.worlds import Quiet, tiny
from treadle.core.engine import ComponentStatus
from treadle.core.errors import CheckpointError, TreadleError
from treadle.core.files import Manifest
from treadle.core.trainer import Conversation, Trainer, UpdateResult, WeightsDestination
from treadle.core.types import Floats, Group, Ids, Routing
from treadle.orchestration.runtime import Runtime
from treadle.orchestration.setup.chat_interface import use_threads
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.train import train_run
from treadle.training.config import TrainerSpec
from treadle.training.make import MakeTrainer, make_trainer

R = TypeVar("R")


def rank_main(channel: Connection, spec: TrainerSpec) -> None:
    """A rank: its own trainer, which does as it is told until the channel closes."""
    use_threads(spec.training.threads, 0)
    trainer = make_trainer(spec)
    channel.send_bytes(pickle.dumps((trainer.model, trainer.checkpoint_bytes)))
    with asyncio.Runner() as runner:
        while True:
            try:
                name, arguments = pickle.loads(channel.recv_bytes())
            except EOFError:
                return
            try:
                answer, error = runner.run(getattr(trainer, name)(*arguments)), None
            except TreadleError as caught:
                answer, error = None, caught
            channel.send_bytes(pickle.dumps((answer, error)))


class Pair:
    """Both ranks do all that changes weights; the first one writes and answers, for both have the same."""

    def __init__(self, spec: TrainerSpec) -> None:
        context = multiprocessing.get_context("forkserver")  # one process imports torch for all of them
        context.set_forkserver_preload(["treadle.training.make"])
        self._channels: list[Connection] = []
        self._ranks = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            rank = context.Process(target=rank_main, args=(theirs, spec), daemon=True)
            rank.start()
            theirs.close()
            self._ranks.append(rank)
            self._channels.append(ours)
        (self.model, self.checkpoint_bytes), _ = (pickle.loads(channel.recv_bytes()) for channel in self._channels)
        self.calls: list[str] = []

    async def _call(self, name: str, *arguments: Any, ranks: int = 2) -> Any:
        self.calls.append(name)
        message, channels = pickle.dumps((name, arguments)), self._channels[:ranks]
        for channel in channels:
            channel.send_bytes(message)
        answers = [pickle.loads(await asyncio.to_thread(channel.recv_bytes)) for channel in channels]
        for _, error in answers:
            if error is not None:
                raise error
        results = [answer for answer, _ in answers]
        if name == "digest":
            assert len(set(results)) == 1
        return results[0]

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        results: list[UpdateResult] = await self._call("train_batch", groups)
        return results

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        return float(await self._call("supervised_step", conversations, step))

    async def stage(self, destination: WeightsDestination[R]) -> R:
        written: R = await self._call("stage", destination, ranks=1)
        return written

    async def score(self, ids: Ids) -> Floats:
        logprobs: Floats = await self._call("score", ids)
        return logprobs

    async def experts(self, ids: Ids) -> Routing:
        chosen: Routing = await self._call("experts", ids)
        return chosen

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        await self._call("export", directory, more, ranks=1)

    async def digest(self) -> str:
        return str(await self._call("digest"))

    async def save(self, directory: Path) -> str:
        return str(await self._call("save", directory, ranks=1))

    async def load(self, saved: Manifest) -> None:
        await self._call("load", saved)

    def status(self) -> list[ComponentStatus]:
        return []

    def close(self) -> None:
        for channel, rank in zip(self._channels, self._ranks, strict=True):
            channel.close()
            rank.join(30)
            assert rank.exitcode == 0


SETTINGS = (
    "training.threads=1",
    "warm_start.demonstrations='tests.worlds:vowel_demonstration'",
    "warm_start.steps=2",
    "warm_start.batch_size=4",
    "algorithm.kl={coef: 0.1}",
)


def play(path: Path, make: MakeTrainer, *stops: int, own_process: bool) -> str:
    """Train so many updates, and resume for more, as often as there are `stops`; the digest of the weights."""
    digest = ""
    for number, updates in enumerate(stops):
        config = tiny(
            *SETTINGS,
            f"orchestration.updates={updates}",
            "evaluation.every=0",
            f"engine.own_process={str(own_process).lower()}",
        )
        runtime = Runtime(make_trainer=make)
        summary = train_run(config, load_inputs(config), path, Quiet(), resume=number > 0, runtime=runtime)
        digest = str(summary["weights_sha256"])
    check_finished(path)
    return digest


@pytest.mark.slow
def test_a_trainer_of_two_processes_trains_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm start, KL to the reference after it, publication to another process, evaluation, checkpoint and resume."""
    pairs: list[Pair] = []

    def make(spec: TrainerSpec) -> Trainer:
        pairs.append(Pair(pickle.loads(pickle.dumps(spec))))
        return pairs[-1]

    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "one-cache"))
    expected = play(tmp_path / "one", make_trainer, 3, own_process=False)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "two-cache"))
    assert play(tmp_path / "two", make, 1, 3, own_process=True) == expected
    first, second = (set(pair.calls) for pair in pairs)
    assert first == {"supervised_step", "export", "stage", "score", "train_batch", "save", "digest"}
    assert second == {"load", "export", "stage", "score", "train_batch", "save", "digest"}
    assert not multiprocessing.active_children()

    with pytest.raises(CheckpointError, match="exists already"):
        trainer = Pair(tiny(*SETTINGS).trainer)
        try:
            asyncio.run(trainer.export(tmp_path))
        finally:
            trainer.close()
