"""A run that is taught by another model, that it names."""

import json
from pathlib import Path

import pytest

from tests.runs import Interrupting, resume, start, updates
from treadle.core.errors import ConfigError


def test_a_teacher_that_is_none_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.big\.path: no config\.json in"):
        start(tmp_path / "run", f"models.big.path={tmp_path}", "algorithm.distillation.teacher=big")
    assert not (tmp_path / "run").exists()


def test_a_run_that_teaches_itself_goes_on_bit_by_bit(tmp_path: Path) -> None:
    section = {"context": "treadle.envs.arithmetic:with_answer", "weights": "ema", "ema_decay": 0.5}
    settings = [f"algorithm.distillation={json.dumps(section)}", "orchestration.checkpoint_every=1"]
    whole = start(tmp_path / "whole", *settings)
    assert [row["taught_fraction"] for row in updates(tmp_path / "whole")] == [1] * 4
    stopped = start(tmp_path / "part", *settings, progress=Interrupting(which=3))
    assert stopped["updates"] == 3
    assert resume(tmp_path / "part")["weights_sha256"] == whole["weights_sha256"]
    assert start(tmp_path / "plain")["weights_sha256"] != whole["weights_sha256"]
