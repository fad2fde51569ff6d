"""Supervised learning from recorded trajectories: selection, model and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from treadle.api.evaluate import find_subject
from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError
from treadle.models.model_files import check_model_files, located, require_model_or_adapter
from treadle.plan.config import RunConfig, load_recipe, recipe_names, with_model_of_run
from treadle.plan.inputs import IN_MEMORY
from treadle.record.address import began_of, find_address
from treadle.record.record import Record
from treadle.record.recorded import LoggedConversation, RecordedTrajectory
from treadle.record.selection import Selection
from treadle.record.trajectory_files import read_files
from treadle.training.config import WarmStartConfig

_BATCH, _PASSES = 64, 3
_SECTION = "warm_start."


@dataclass(frozen=True, slots=True)
class Lesson:
    """Selected trajectories of `recorded` to learn from.

    config: includes the model to start from. subject: the run or recipe of that model; None for a bare model.
    began: date of the run it starts from, for templates.
    """

    config: RunConfig
    subject: str | None
    sources: tuple[str, ...]
    trajectories: list[RecordedTrajectory | LoggedConversation]
    recorded: int
    select: str
    began: datetime | None


def prepare(start: str | None, sources: Sequence[str], select: str = "", overrides: Sequence[str] = ()) -> Lesson:
    """Read and select the training trajectories of runs and files, and configure their learning. Needs no torch.

    start: a recipe, a run's checkpoint or a model to start from; default: the first of `sources`.
    overrides: of `warm_start`, settings for learning; default: 3 passes, 64 trajectories per step.

    Raises ConfigError, DataError or RunError.
    """
    selection = Selection.parse(select)
    if start is None and find_address(sources[0]) is None:
        list(read_source(sources[0]))  # fails if there is no such file
        raise ConfigError(f"{sources[0]} has no model to start from; name a recipe, a run or a model directory first")
    own = [override for override in overrides if not override.startswith("warm_start")]
    start = start or sources[0]
    is_recipe = start in recipe_names() or Path(start).suffix in (".yaml", ".yml")
    config = with_model_of_run(load_recipe(start, own)) if is_recipe else _config(start, own)
    check_model_files(config.model)
    recorded = [t for source in sources for t in read_source(source) if t.split == "train"]
    chosen = selection.choose(recorded)
    if not chosen:
        failed = sum(t.reward is None for t in recorded)
        raise DataError(
            f"none of {len(recorded)} training trajectories is selected, {failed} of them have no reward; "
            f"--select is {select!r}"
        )
    batch = min(_BATCH, len(chosen))
    section = build(
        WarmStartConfig,
        {"demonstrations": ", ".join(sources), "batch_size": batch, "steps": -(-_PASSES * len(chosen) // batch)},
        overrides=[override.removeprefix(_SECTION) for override in overrides if override not in own],
    )
    subject = start if is_recipe or find_address(start) is not None else None
    config = config.model_copy(update={"warm_start": section})
    return Lesson(config, subject, tuple(sources), chosen, len(recorded), select, began_of(start))


def read_source(source: str | Path) -> Iterator[RecordedTrajectory | LoggedConversation]:
    """Read the trajectories of a run, of a file or of all files in a directory. Raises RunError, DataError."""
    address = find_address(source)
    return read_files(Path(source)) if address is None else Record.open(address.run).trajectories()


def _config(start: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run, with a checkpoint's model; or the defaults, with a model."""
    if find_address(start) is not None:
        subject = find_subject(start, overrides)
        return subject.config.model_copy(update={"model": subject.model_config})
    model = located(require_model_or_adapter(start, "the model to start from"))
    data = {"recipe": Path(start).name, "data": {"train": {"source": IN_MEMORY}}, "model": model}
    return build(RunConfig, data, "treadle sft", overrides)
