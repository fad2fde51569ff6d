"""The demo recipe, as a user runs it, only much shorter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = (
    "warm_start.steps=3",
    "warm_start.max_loss=null",
    "orchestration.updates=2",
    "training.tasks_per_update=2",
    "data.held_out.options.count=9",
)


@pytest.mark.slow
def test_the_demo_recipe_from_nothing_to_its_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "treadle.cli.main", "train", "demo", "--name", "run", *SHORT]
    environment = {**os.environ, "TREADLE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    wanted = {"held_out_success_before", "held_out_success_after", "wall_seconds", "cpu_seconds", "weights_sha256"}
    assert wanted <= summary.keys() and summary["updates"] == 2 and summary["held_out_tasks"] == 9
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    words = ("held-out success, 9 tasks", "hops", "before training", "after training", summary["weights_sha256"])
    assert [word for word in words if word not in done.stdout] == []
