"""Runs say which version of Treadle's format they have; those from before are read as they were."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.orchestration.runs import put_config, resume, start, updates
from tests.worlds import tiny
from treadle.core.errors import ConfigError, RunError
from treadle.orchestration.config import RunConfig
from treadle.orchestration.schema import RENAMED_KEYS, SCHEMA_VERSION
from treadle.orchestration.store.run_directory import RunDirectory


def as_before(content: str) -> str:
    """A config.yaml as it was written before there was a schema_version."""
    data: dict[str, Any] = yaml.safe_load(content)
    del data["schema_version"]
    for old, new in RENAMED_KEYS.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        value = data[new_section].pop(new_key)
        data[section][key] = "drop" if value == "drop_group" else value
    for section, key in (
        ("engine", "options"),
        ("algorithm", "advantage_options"),
        ("algorithm", "policy_loss_options"),
    ):
        del data[section][key]
    return yaml.safe_dump(data, sort_keys=False)


@pytest.mark.parametrize("policy", ["wait", "drop_group"])
def test_a_run_from_before_is_read_reported_and_resumed(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = ("orchestration.max_staleness=1", f"orchestration.stale_policy={policy}", "failures.max_sampled=5")
    start(path, *options, "orchestration.updates=2")
    content, rows = (path / "config.yaml").read_text(), updates(path)
    assert f"schema_version: {SCHEMA_VERSION}\n" in content
    put_config(path, as_before(content))
    assert "schema_version" not in (path / "config.yaml").read_text()
    run = RunDirectory.open(path)
    assert run.config() == tiny(*options, "orchestration.updates=2", "training.threads=1")
    assert updates(path) == rows
    resume(path, config=run.config(["orchestration.updates=3"]))
    assert run.config().orchestration.updates == 3
    assert "schema_version: " in (path / "config.yaml").read_text()


def test_a_run_of_a_newer_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    start(path, "orchestration.updates=1")
    content = (path / "config.yaml").read_text()
    put_config(path, content.replace("schema_version: 1", "schema_version: 7"))
    message = r"config\.yaml: the run has schema_version 7, and this Treadle reads up to 1; use the version of Treadle"
    with pytest.raises(RunError, match=message):
        RunDirectory.open(path).config()


@pytest.mark.parametrize(("old", "instead"), sorted(RunConfig.removed_keys.items()))
def test_a_key_that_is_gone_says_what_to_do_instead(old: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"there is no key {old!r} any more; {instead}")):
        tiny(f"{old}=1")
