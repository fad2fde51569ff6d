"""Real Harbor, real Terminus-2, real verifier, a scripted model: what is recorded is what was sampled."""

from pathlib import Path

import pytest

from tests.integrations.harbor.trials import (
    GREETING,
    WELL,
    Sampled,
    answer,
    harbor,
    play,
    playing,
    scripted,
    shipped,
    write_task,
)
from tests.integrations.libraries import KeptWorkers
from treadle.core.types import Status


def test_the_shipped_tasks_are_played_and_graded(kept: KeptWorkers, tmp_path: Path) -> None:
    by_task = {
        "greeting": GREETING,
        "largest-file": "find /usr/bin -maxdepth 1 -type f -printf '%s %f\\n' | sort -n | tail -1 | "
        "cut -d' ' -f2- > answer.txt\n",
        "squares": "echo 'for i in $(seq $1); do echo $((i * i)); done' > squares.sh\n",
    }
    word = {"greeting": "hello.txt", "largest-file": "largest regular file", "squares": "squares.sh that"}

    def reply(text: str) -> str:
        command = next((command for task, command in by_task.items() if word[task] in text), "")  # none: the check
        return playing(answer(command), answer(done=True), answer(done=True))(text)

    engine = Sampled(scripted(reply))
    found = kept.run(play(engine, [shipped(name) for name in by_task], harbor(tmp_path), check=True))
    for trajectory in found:
        assert (trajectory.status, trajectory.reward, trajectory.failure) == (Status.DONE, 1.0, None)
        assert engine.recorded(trajectory) and len(trajectory.steps) == 3
        assert trajectory.metrics["calls_unreported"] == trajectory.metrics["calls_misreported"] == 0
        assert trajectory.metrics["agent_seconds"] > 0
    assert not list(tmp_path.iterdir())  # trial_directories: delete


@pytest.mark.slow
def test_a_task_of_two_steps(kept: KeptWorkers, tmp_path: Path) -> None:
    task = write_task(tmp_path / "two", steps=["First.", "Second."])
    engine = Sampled(scripted(playing(*WELL)))
    [found] = kept.run(play(engine, [task], harbor(tmp_path / "trials", trial_directories="keep")))
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 6)
    assert next((tmp_path / "trials").iterdir()).joinpath("result.json").is_file()
