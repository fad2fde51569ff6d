"""A run that is taught by another model, whose directory it names."""

from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, resume, start, updates
from tests.worlds import tiny
from treadle.core.errors import ConfigError


def test_a_student_comes_near_its_teacher_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    start(tmp_path / "teacher", "seed=3", "orchestration.updates=1")
    teacher = tmp_path / "teacher" / "checkpoints" / "step-000001"
    options = (
        f"algorithm.distillation={{teacher: {teacher}, rewards: 0}}",
        "algorithm.entropy_coef=0",
        "training.optimizer={learning_rate: 1e-2}",
        "orchestration.checkpoint_every=4",
        "warm_start=null",
    )
    straight = start(tmp_path / "straight", *options, "orchestration.updates=8")
    kl = [row["teacher_kl"] for row in updates(tmp_path / "straight")]
    assert sum(kl[-2:]) < 0.7 * sum(kl[:2])
    check_finished(tmp_path / "straight")
    assert not list((tmp_path / "straight").glob("checkpoints/*/teacher*"))

    start(tmp_path / "run", *options, "orchestration.updates=4")
    resumed = resume(tmp_path / "run", config=tiny(*options, "orchestration.updates=8"))
    assert resumed["weights_sha256"] == straight["weights_sha256"]


def test_a_teacher_that_is_none_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.distillation\.teacher: no config\.json in"):
        start(tmp_path / "run", f"algorithm.distillation.teacher={tmp_path}")
    assert not (tmp_path / "run").exists()
