"""`examples/tinker_loop.py` as it stands, in the environment of Tinker's SDK."""

import re
from pathlib import Path

import pytest

from tests.cli.worlds import treadle
from tests.tinker.clients import ROOT, client_python, run_client, served
from treadle.tinker.models import Models


@pytest.fixture
def python() -> str:
    return client_python("TREADLE_TINKER_OLD_VENV", ".venv-tinker-old")


@pytest.fixture
def model(python: str, tmp_path: Path) -> Path:
    assert treadle("sft", "arithmetic", "--out", tmp_path / "models/sums").status == 0
    return tmp_path / "models/sums"


@pytest.mark.slow
async def test_the_loop_learns_what_it_rewards(python: str, model: Path, tmp_path: Path) -> None:
    async with served(Models.open(model), tmp_path / "run", model, [str(model)]) as env:
        printed = await run_client(python, ROOT / "examples/tinker_loop.py", where=tmp_path, env=env, seconds=1200)
    rewards = [float(each) for each in re.findall(r"reward (\d\.\d+)", printed)]
    assert len(rewards) == 15 and rewards[0] < 0.6 and min(rewards[-3:]) > 0.9, printed
