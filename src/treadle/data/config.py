"""`data` of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from treadle.core.config import Config

SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of task files."""

TaskPart = Literal["prompt", "ground_truth", "task_id", "extras", "environment", "agent", "driver"]


def _paths(columns: dict[TaskPart, str | dict[str, str]]) -> dict[TaskPart, str | dict[str, str]]:
    for part, path in columns.items():
        if isinstance(path, dict) and part != "extras":
            raise ValueError(f"the column of {part} is {path}; only extras take several, give one path")
    return columns


Columns = Annotated[dict[TaskPart, str | dict[str, str]], AfterValidator(_paths)]
"""Paths of a task's parts in a row: a column, or a path into one (`reward_model.ground_truth`, `answers.text.0`).

    {"prompt": "question", "ground_truth": "answer", "extras": {"level": "meta.level"}}

prompt (text, or a list of messages), ground_truth, task_id and extras default to the columns of these names, if any;
environment, agent and driver, the names of the row's player, are read only if set. Other columns are not read.
"""


class SourceConfig(Config):
    """Configures a source of tasks."""

    source: str = Field(
        min_length=1,
        description="a .jsonl or .parquet file, a directory of them, a Hugging Face data set (ORG/NAME, or path of a "
        "saved one), a generator's registered name or module:function",
    )
    split: str | None = Field(None, description="split to load, whole or sliced: train, test[:500], all[90%:]")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the generator (count, seed, ...), or of datasets.load_dataset (name, revision, ...)",
    )
    columns: Columns | None = Field(None, description="columns of this source (default: data.columns)")
    name: str = Field(
        "", description="of several sources: begins the tasks' ids, and is their extra 'source' (default: the source's)"
    )


class WeightedSourceConfig(SourceConfig):
    """Configures a source of training tasks."""

    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="of several sources: share of the groups, relative to the others"
    )


_OneOrSeveral = Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one")
TrainSources = Annotated[
    Annotated[WeightedSourceConfig, Tag("one")] | Annotated[tuple[WeightedSourceConfig, ...], Tag("several")],
    _OneOrSeveral,
]
"""One source, or a mixture of several: `[{source: a.jsonl, weight: 3}, {source: b.parquet}]`."""
HeldOutSources = Annotated[
    Annotated[SourceConfig, Tag("one")] | Annotated[tuple[SourceConfig, ...], Tag("several")], _OneOrSeveral
]
"""One source or several; every evaluation plays all their tasks."""


def sources_of(section: SourceConfig | tuple[SourceConfig, ...]) -> Sequence[SourceConfig]:
    """Return the sources of `data.train` or `data.held_out`."""
    return section if isinstance(section, tuple) else (section,)


def is_file(source: str) -> bool:
    """Return whether a source is a task file or a directory, as opposed to a generator or a data set of the hub."""
    return Path(source).suffix in SUFFIXES or Path(source).is_dir()


class DataConfig(Config):
    """Configures training and held-out tasks."""

    train: TrainSources = Field(description="tasks to train on: a source, or a list of several")
    held_out: HeldOutSources | None = Field(None, description="tasks to evaluate on; never trained")
    columns: Columns | None = Field(
        None,
        description="column, or path into one, of each part of a task: {prompt: question, ground_truth: "
        "reward_model.ground_truth} (default: only Treadle's own names)",
    )
    shuffle: bool = Field(True, description="shuffle the training tasks in each epoch")
    curriculum: str = Field(
        "uniform",
        min_length=1,
        description="how training tasks are drawn: uniform (epoch by epoch), informative (more often where some "
        "attempts succeed and some fail), or a function of tasks and pass rates that returns weights, module:function",
    )
    table_by: str | None = Field(None, description="extra by which evaluation tables are split")

    @model_validator(mode="after")
    def _shares_are_of_several(self) -> DataConfig:
        for split, section in (("train", self.train), ("held_out", self.held_out)):
            if section == ():
                raise ValueError(f"{split} is an empty list; give at least one source")
            if isinstance(section, SourceConfig) and (section.name or getattr(section, "weight", 1) != 1):
                raise ValueError(f"{split}: name and weight are for a list of several sources; leave them out")
        return self
