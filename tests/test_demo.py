"""The demo recipe, as a user runs it, only shorter: its agent has learned to search, and not yet to find."""

import json
import random
import time
from pathlib import Path

import pytest

from tests.loop.test_kill_and_resume import expect, read_until, strike, training, wait_for_update
from tests.runs import check_finished, query

SHORT = (
    "warm_start.steps=120",
    "warm_start.max_loss=null",
    "orchestration.updates=4",
    "orchestration.checkpoint_every=1",
    "training.tasks_per_update=3",
    "data.held_out.options.count=9",
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]  # the run is made once, and its warm start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run "straight", what it printed, and its warm start in the cache."""
    made = tmp_path_factory.mktemp("demo")
    with training(made, *SHORT, recipe="demo", name="straight") as process:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    (made / "output").write_text(output)
    return made


def summary_of(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "summary.json").read_text())
    return found


def test_the_demo_recipe_from_nothing_to_its_summary(folder: Path) -> None:
    run, output = folder / "runs" / "straight", (folder / "output").read_text()
    summary = summary_of(run)
    wanted = {"held_out_success_before", "held_out_success_after", "wall_seconds", "cpu_seconds", "weights_sha256"}
    assert wanted <= summary.keys() and summary["updates"] == 4 and summary["held_out_tasks"] == 9
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    words = ("held-out success, 9 tasks", "hops", "before training", "after training", str(summary["weights_sha256"]))
    assert [word for word in words if word not in output] == []
    check_finished(run)
    assert len(query(run, "SELECT DISTINCT steps FROM trajectories WHERE steps > 1")) > 1


def test_the_demo_is_the_same_in_two_processes_and_killed(folder: Path) -> None:
    """At random moments of its updates, each time resumed."""
    draws = random.Random(1)
    for number, moment in enumerate(sorted(draws.uniform(1, 3.5) for _ in range(2))):
        again = ("--resume",) if number else (*SHORT, "engine.own_process=true")
        with training(folder, *again, recipe="demo", name="killed") as process:
            read_until(process, "resuming" if number else "update")
            wait_for_update(folder, int(moment), process, "killed", 300)
            time.sleep(moment % 1)
            strike(process)
    with training(folder, "--resume", recipe="demo", name="killed") as process:
        expect(process, 0)
    runs = folder / "runs"
    check_finished(runs / "killed")
    assert summary_of(runs / "killed")["weights_sha256"] == summary_of(runs / "straight")["weights_sha256"]
