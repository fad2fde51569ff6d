"""The examples run as they stand, with two small updates each.

Cells of notebooks run as code, in order and beside an event loop as in Jupyter; no kernel is needed.
"""

import asyncio
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treadle
from treadle.api.train import train_run
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ("small.py", "tinker_loop.py"))
SMALL = {
    "warm_start.steps": 20,
    "training.tasks_per_update": 2,
    "training.group_size": 2,
    "evaluation.greedy_too": False,
    "orchestration.traced_groups": 1,
}

PLAYS = {
    "agent_framework.py": ("agent solve", 160, 40),
    "asynchronous.py": ("environment SlowLibrary", 320, 40),
    "bare_reward.py": ("environment reward", 67, 23),
    "first_steps.ipynb": ("environment reward", 67, 23),
    "multi_turn.py": ("environment Quiz", 320, 40),
    "openai_agent.py": ("agent solve", 160, 40),
    "own_loss.py": ("environment reward", 67, 23),
    "resume_and_compare.py": ("environment reward", 90, 0),
    "tools.py": ("environment Shop", 400, 64),
}
"""Example -> who plays, in how many tasks of training and how many held-out ones."""

pytestmark = pytest.mark.xdist_group("examples")  # the model is made once


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory to run in, in which an example needs little time."""
    path = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(path / "cache"))
        patch.setenv("MPLBACKEND", "agg")
        patch.syspath_prepend(EXAMPLES)
        patch.chdir(path)
        shared = pytest.importorskip("small")
        for key, value in SMALL.items():
            section, _, name = key.partition(".")
            where, name = (shared.SETTINGS[section], name) if section in shared.SETTINGS else (shared.SETTINGS, key)
            patch.setitem(where, name, value)
        yield path


@pytest.fixture
def players(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, int]]:
    """Filled with who plays in the runs that are begun, as in `PLAYS`."""
    found, run = set[tuple[str, int, int]](), train_run

    def noted(config: RunConfig, inputs: Inputs, *given: Any, **more: Any) -> dict[str, Any]:
        [(kind, name)] = {task.player for task in [*inputs.train, *inputs.held_out]}
        found.add((f"{kind} {name}", len(inputs.train), len(inputs.held_out)))
        return run(config, inputs, *given, **more)

    monkeypatch.setattr("treadle.api.public.train_run", noted)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_shows_and_runs(
    name: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    players: set[tuple[str, int, int]],
) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if name == "tools.py":  # it has its settings from a shipped recipe
        train, small = treadle.train, {**SMALL, "warm_start.options.attempts": 40}

        def shorter(*given: Any, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
            return train(*given, settings=settings | small, **more)

        monkeypatch.setattr(treadle, "train", shorter)
    assert text.startswith('"""') and f"    python examples/{name}" in text.partition('\n"""')[0]
    assert len(text.splitlines()) <= 60
    monkeypatch.setattr("sys.argv", [name, "--updates", "2"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert " -> " in capsys.readouterr().out  # before and after
    assert players == {PLAYS[name]}


def cells(name: str) -> list[str]:
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebooks_run(place: Path, players: set[tuple[str, int, int]]) -> None:
    """The second looks into the run of the first."""

    async def run(name: str) -> None:
        space: dict[str, object] = {}
        for cell in cells(name):
            exec(compile(cell.replace("UPDATES = 20", "UPDATES = 2"), name, "exec"), space)

    for name in ("first_steps.ipynb", "look_into_a_run.ipynb"):
        asyncio.run(run(name))
    assert players == {PLAYS["first_steps.ipynb"]}
