"""Tasks from the files that SkyRL's data set scripts write.

{"prompt": [{"role": "user", ...}], "env_class": "gsm8k", "reward_spec": {"ground_truth": "72"}, "extra_info": ...}
Task("train-000001", prompt=..., environment="skyrl_gym", ground_truth="72", extras={"env_class": "gsm8k", ...})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.core.errors import DataError
from treadle.core.types import Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, open_rows
from treadle.data.rows import parse_json, task_from_row

_SPECS = ("reward_spec", "reward_model")


def skyrl_gym_rows(split: str, file: str) -> Iterator[Task]:
    """Yield the tasks of SkyRL's rows: all columns but `prompt` are extras, which the environment gets.

    file: Parquet or JSON lines, or whatever else `data.train.source` takes. Raises ConfigError; DataError for a row,
    naming it.
    """
    for row in open_rows(SourceConfig(source=file), split, f"data.{split}", LoadContext()):
        value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
        if not isinstance(value, Mapping) or "prompt" not in value:
            raise DataError(f"{row.where}: a row of SkyRL has a prompt, got {value!r:.200}")
        extras = {name: part for name, part in value.items() if name != "prompt" and part is not None}
        specs = [extras[name] for name in _SPECS if isinstance(extras.get(name), Mapping)]
        fields = {
            "prompt": value["prompt"],
            "environment": "skyrl_gym",
            "ground_truth": next((spec["ground_truth"] for spec in specs if "ground_truth" in spec), None),
            "extras": extras,
        }
        yield task_from_row(fields, row.where, row.task_id)
