"""Supervised learning: from recorded trajectories, and a run's warm start.

A warm start is cached: it runs once for the same demonstrations, model, seed and software.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch

from treadle.api.lesson import Lesson
from treadle.core.errors import CheckpointError, DataError, RunError
from treadle.core.files import Manifest, cache_directory
from treadle.core.trainer import Conversation, Trainer
from treadle.models.chat import load_chat
from treadle.models.loading import file_sha256
from treadle.models.model_files import base_directory, tokenizer_directory
from treadle.plan.config import RunConfig
from treadle.plan.demonstrations import open_demonstrations
from treadle.plan.device import check_device
from treadle.plan.inputs import Inputs
from treadle.plan.plan import Plan, make
from treadle.record.recorded import LoggedConversation, check_vocabulary, vocabulary_sha256
from treadle.rendering.chat import ChatRenderer
from treadle.report.progress import Progress
from treadle.training.config import WarmStartConfig
from treadle.training.demonstrations import demonstrated_calls, reshuffled
from treadle.training.sft import warm_start
from treadle.training.start import make_trainer


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """Result of a warm start. seconds: wall-clock time of learning it, or of reading it from the cache."""

    loss: float
    steps: int
    seconds: float
    cached: bool


def make_warm_model(config: RunConfig, inputs: Inputs, directory: Path, progress: Progress) -> WarmStartReport:
    """Write the configured model, warm-started, into a new directory. Raises TrainingStopped or CheckpointError."""
    plan = make(config, inputs)
    renderer = load_chat(config.model, datetime.now())[1]
    with _trainer(plan) as trainer:

        async def work() -> WarmStartReport | None:
            report = await run_warm_start(trainer, renderer, plan, progress)
            await trainer.export(directory)
            return report

        report = asyncio.run(work())
    assert report is not None, "the configuration has a warm start"
    return report


@contextmanager
def _trainer(plan: Plan) -> Iterator[Trainer]:
    ranks = plan.trainer.placement.ranks
    check_device(plan.config.device, ranks)
    with closing(make_trainer(plan.trainer)) as trainer:
        plan.with_threads(trainer.model.parameters, ranks)
        yield trainer


RECORD = "sft.json"
"""File in a model directory that names the model's training data."""


@dataclass(frozen=True, slots=True)
class RecordedReport:
    """Result of learning from recorded trajectories. tokens: number of targets in one pass.

    inexact: number of trajectories tokenized here from text, with ids that may differ from the sampled ones.
    """

    sources: tuple[str, ...]
    select: str
    trajectories: int
    calls: int
    tokens: int
    inexact: int
    steps: int
    loss: float
    seconds: float


def learn_recorded(lesson: Lesson, directory: Path, progress: Progress) -> RecordedReport:
    """Write the lesson's model, trained on its trajectories by the section `warm_start`, into a new directory.

    Raises ConfigError for ids of another vocabulary, DataError if there is nothing to learn, TrainingStopped.
    """
    config, trajectories = lesson.config, lesson.trajectories
    assert config.warm_start is not None, "the configuration has a warm start"
    section, started = config.warm_start, time.perf_counter()
    tokenizer, renderer = load_chat(config.model, lesson.began)
    check_vocabulary(trajectories, vocabulary_sha256(tokenizer.backend_tokenizer), tokenizer_directory(config.model))
    made = [(trajectory, trajectory.calls(renderer)) for trajectory in trajectories]
    rows = [calls for _, calls in made if calls]
    if not rows:
        raise DataError(
            "nothing to learn: no selected trajectory has trainable tokens, which greedy ones (temperature 0) are not; "
            "select others"
        )
    inexact = sum(isinstance(trajectory, LoggedConversation) for trajectory, calls in made if calls)
    counts = (len(rows), sum(map(len, rows)), sum(len(target) for calls in rows for _, target, *_ in calls))
    with _trainer(make(config, Inputs([], []))) as trainer:

        async def work() -> RecordedReport:
            result = await warm_start(
                trainer,
                reshuffled(rows, config.seed),
                section,
                lambda step, loss: progress.phase("sft", step, section.steps, f"loss {loss:.3f}"),
            )
            seconds = time.perf_counter() - started
            learned = (lesson.sources, lesson.select, *counts, inexact)
            report = RecordedReport(*learned, result.steps, result.loss, seconds)
            await trainer.export(directory, {RECORD: json.dumps(asdict(report), indent=2).encode()})
            return report

        return asyncio.run(work())


async def run_warm_start(
    trainer: Trainer,
    renderer: ChatRenderer,
    plan: Plan,
    progress: Progress,
    phase: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> WarmStartReport | None:
    """Warm-start the trainer, from the cache if possible; None if the run has no warm start.

    phase: called with "warm start", steps done, and total steps.

    Raises TrainingStopped if it did not learn (nothing is cached then).
    """
    config = plan.config
    if config.warm_start is None:
        return None
    started, source = time.perf_counter(), await open_demonstrations(config, plan.inputs)
    if source.about:
        progress.log(source.about)
    key = _key(config, config.warm_start, source.sha256, tokenizer_directory(config.model))
    entry = cache_directory() / "warm_start" / key
    if cached := await _from_cache(entry, trainer, progress):
        return replace(cached, cached=True, seconds=time.perf_counter() - started)
    section = config.warm_start

    def conversation(index: int) -> Conversation:
        row = source.row(index)
        return demonstrated_calls(row.messages, renderer, row.tools)

    def advance(step: int, note: str = "") -> None:
        progress.phase("warm start", step, section.steps, note)
        phase("warm start", step, section.steps)

    advance(0)
    result = await warm_start(trainer, conversation, section, lambda step, loss: advance(step, f"loss {loss:.3f}"))
    report = WarmStartReport(result.loss, result.steps, time.perf_counter() - started, cached=False)
    try:
        await trainer.export(entry, {"report.json": json.dumps(asdict(report)).encode()})
    except CheckpointError as error:
        # Another run was faster, or the disk refuses: the trained weights are still valid.
        progress.log(f"the warm start was not cached: {error}")
    return report


async def _from_cache(entry: Path, trainer: Trainer, progress: Progress) -> WarmStartReport | None:
    """Load the cached weights into the trainer; return None if there are none, or remove them if they are damaged."""
    if not entry.is_dir():
        return None
    try:
        cached = Manifest.load(entry, remedy="it is learned again")
        report = WarmStartReport(**json.loads(cached.read("report.json")))
        cached.prove(cached.sha256)
    except RunError as error:
        progress.log(f"the warm start in the cache is not used: {error}")
        shutil.rmtree(entry, ignore_errors=True)
        return None
    await trainer.load(cached)
    return report


def _key(config: RunConfig, section: WarmStartConfig, demonstrations: str, tokenizer: Path) -> str:
    """Return the hash of all inputs that affect the result, including rounding. demonstrations: their hash."""
    places = [] if config.model.build is not None else [base_directory(config.model)]
    if config.model.adapter is not None:
        places.append(Path(config.model.adapter))
    model = [file for place in places for file in sorted(place.glob("*")) if file.is_file()]
    facts = {
        "lora": None if config.training.lora is None else config.training.lora.model_dump(mode="json"),
        "warm_start": section.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json"),
        "model_files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in model],
        "seed": config.seed,
        "tokenizer": [file_sha256(f) for f in sorted(tokenizer.iterdir()) if f.suffix in (".json", ".jinja")],
        "demonstrations": demonstrations,
        "threads": torch.get_num_threads(),
        "placement": [config.placement.learner.model_dump(mode="json"), config.device, config.training.precision],
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "software": [platform.python_version(), *map(version, ("torch", "transformers", "tokenizers", "numpy"))],
        "treadle": [file_sha256(f) for f in sorted(Path(str(files("treadle"))).rglob("*.py"))],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
