"""A client's whole cycle with the two versions of Tinker's SDK that bound the range, each in its own environment."""

from pathlib import Path

import pytest

from tests.models import tiny
from tests.tinker.clients import client_python, run_client, served
from tests.tinker.kit import TOKENIZER
from tests.tinker.protocol import models_of


@pytest.mark.parametrize(
    ("variable", "folder", "version"),
    [("TREADLE_TINKER_VENV", ".venv-tinker", "0.38.0"), ("TREADLE_TINKER_OLD_VENV", ".venv-tinker-old", "0.34.0")],
)
async def test_a_cycle_with_the_sdk(variable: str, folder: str, version: str, tmp_path: Path) -> None:
    python = client_python(variable, folder)
    base = tiny()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    async with served(models_of(base), tmp_path / "run", TOKENIZER, ["base"]) as env:
        printed = await run_client(python, Path(__file__).with_name("sdk_cycle.py"), TOKENIZER, where=tmp_path, env=env)
    assert f"done with {version}" in printed
