"""Runs say which version of Treadle's format they have; those of other versions are refused."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.runs import put_config, start
from treadle.core.config import Config
from treadle.core.errors import RunError
from treadle.core.registry import names, resolve
from treadle.engines.config import VLLMConfig
from treadle.plan.config import RunConfig, config_of
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import SCHEMA_VERSION, LedgerReader
from treadle.record.run_directory import RunDirectory


@pytest.mark.parametrize("version", ["schema_version: 7\n", "schema_version: 1\n", ""])
def test_a_run_of_another_version_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    start(path, "orchestration.updates=1")
    content = (path / "config.yaml").read_text()
    put_config(path, content.replace(f"schema_version: {SCHEMA_VERSION}\n", version))
    number = version.strip()[16:] or "None"
    message = rf"config\.yaml: the run has schema_version {number}, and this Treadle reads {SCHEMA_VERSION} only; use"
    with pytest.raises(RunError, match=message):
        config_of(RunDirectory.open(path))


def test_a_ledger_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("PRAGMA user_version = 7")
    message = rf"ledger\.sqlite has schema_version 7, and this Treadle reads {SCHEMA_VERSION} only; use the version of"
    with pytest.raises(RunError, match=message):
        LedgerReader(tmp_path / "ledger.sqlite").checkpoint_names()
    with pytest.raises(RunError, match=message):
        Ledger(tmp_path / "ledger.sqlite")


def keys(section: Any) -> Iterator[str]:
    """The leaves of a section, and those of the options that Treadle's own losses, engines and drivers take."""
    for name, field in section.model_fields.items():
        inner = list(_configs(field.annotation))
        yield from (f"{name}.{key}" for config in inner for key in keys(config)) if inner else [name]


def _configs(annotation: Any) -> Iterator[type[Config]]:
    if parts := get_args(annotation):
        yield from (config for part in parts for config in _configs(part))
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation


def test_there_are_no_more_keys_than_a_reader_can_take_in() -> None:
    options: list[tuple[str, Any]] = [("engine.options", VLLMConfig)]
    for key, group in (
        ("algorithm.advantage_options", "advantages"),
        ("algorithm.policy_loss_options", "policy_losses"),
        ("driver_options", "drivers"),
    ):
        options += [(key, resolve(group, name).options_type) for name in names(group)]
    opened = {f"{key}.{name}" for key, options_type in options for name in keys(options_type)}
    count = len(opened | set(keys(RunConfig)) - {key for key, _ in options})
    # 180, adapters, long episodes, teachers, group rewards, other models, self-play, judges, centered scores, starts,
    # forks, credit for turns, images
    assert count <= 229
