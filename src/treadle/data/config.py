"""`data` of a run's configuration."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from treadle.core.config import Config

_COLUMN = "column, or path into one: answer, reward_model.ground_truth, answers.text.0"


class ColumnsConfig(Config):
    """Where in a row the parts of a task are: a column, or a path into one (`reward_model.ground_truth`).

    prompt, ground_truth, task_id and extras that are not set are the columns of these names, if there are any. Other
    columns are not read.
    """

    prompt: str | None = Field(None, description=f"text, or a list of messages; {_COLUMN}")
    ground_truth: str | None = Field(None, description="what the reply is graded against")
    task_id: str | None = Field(None, description="names the task, text or whole number; default: file and row")
    extras: str | dict[str, str] | None = Field(
        None, description="a column that holds an object, or each extra's name and column: {level: extra_info.level}"
    )
    environment: str | None = Field(None, description="names the environment of a row; none is read if not set")
    agent: str | None = Field(None, description="names the agent program of a row; none is read if not set")
    driver: str | None = Field(None, description="names the attempt driver of a row; none is read if not set")


class SourceConfig(Config):
    """Configures where tasks come from."""

    source: str = Field(
        "",
        description="a .jsonl or .parquet file, a directory of them, a Hugging Face data set (ORG/NAME, or a directory "
        "that one was saved to), a generator's registered name or module:function",
    )
    split: str | None = Field(
        None, description="of a data set with several, and which part of it: train, test[:500], all[90%:]"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the generator (count, seed, ...), or of datasets.load_dataset (name, revision, ...)",
    )
    columns: ColumnsConfig | None = Field(None, description="of this source (default: data.columns)")


class MixtureConfig(SourceConfig):
    """Configures one source of a mixture."""

    name: str = Field("", description="begins the tasks' ids, and is their extra 'source' (default: the source's)")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="share of the groups, relative to the others")

    @model_validator(mode="after")
    def _has_source(self) -> MixtureConfig:
        if not self.source:
            raise ValueError("a source of a mixture needs 'source'; add it")
        return self


class TaskSetConfig(SourceConfig):
    """Configures training or held-out tasks: one source, or a mixture of several."""

    mixture: tuple[MixtureConfig, ...] = Field(
        (), description="several sources instead of one: [{source: a.jsonl, weight: 3}, {source: b.parquet}]"
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> TaskSetConfig:
        if not self.source and not self.mixture:
            raise ValueError("missing key 'source': where tasks come from; or give several, in 'mixture'")
        if self.mixture and (self.source or self.split or self.options or self.columns):
            raise ValueError("'mixture' stands in the place of source, split, options and columns; leave those out")
        return self


class DataConfig(Config):
    """Configures training and held-out tasks."""

    train: TaskSetConfig = Field(description="tasks to train on")
    held_out: TaskSetConfig | None = Field(None, description="tasks to evaluate on; never trained")
    columns: ColumnsConfig | None = Field(
        None, description="where rows have the parts of a task (default: under Treadle's own names, and nothing else)"
    )
    shuffle: bool = Field(True, description="visit the training tasks in another order each epoch")
    table_by: str | None = Field(None, description="key of a task's extras by which evaluation tables are split")

    @model_validator(mode="after")
    def _held_out_has_no_weights(self) -> DataConfig:
        parts = self.held_out.mixture if self.held_out else ()
        if wrong := [part for part in parts if not math.isclose(part.weight, 1.0)]:
            raise ValueError(
                f"held_out.mixture: {wrong[0].source!r} has weight {wrong[0].weight:g}, but every "
                "evaluation plays all held-out tasks; leave weights out, and take less of one with split: all[:500]"
            )
        return self
