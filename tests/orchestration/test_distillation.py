"""A run that is taught by another model, whose directory it names."""

from pathlib import Path

import pytest

from tests.orchestration.runs import start
from treadle.core.errors import ConfigError


def test_a_teacher_that_is_none_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.distillation\.teacher: no config\.json in"):
        start(tmp_path / "run", f"algorithm.distillation.teacher={tmp_path}")
    assert not (tmp_path / "run").exists()
