"""Weights handed to another process: complete, gone afterwards, and none left behind by a killed process."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from treadle.core.errors import EngineError
from treadle.engines.staging import new_name, staged

LEFT_BEHIND = """
import asyncio, os, signal, torch
from treadle.engines.staging import staged

async def main():
    async with staged({"w": torch.ones(2)}) as path:
        print(path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_file_holds_the_weights_as_long_as_it_is_needed() -> None:
    weights = {"w": torch.randn(3, 4).t(), "half": torch.randn(2).bfloat16(), "steps": torch.tensor([3])}
    async with staged(weights) as path:
        assert path.is_relative_to("/dev/shm")
        found = load_file(path)
        assert found.keys() == weights.keys()
        assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in weights.items())
    assert not path.parent.exists()


async def test_what_a_killed_process_left_is_removed_and_nothing_else() -> None:
    killed = subprocess.run([sys.executable, "-c", LEFT_BEHIND], check=False, capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_file()
    elsewhere = left.parent.with_name(f"treadle_weights-elsewhere-{os.getpid()}-x")
    elsewhere.mkdir()
    try:
        async with staged({"w": torch.ones(2)}) as first, staged({"w": torch.ones(2)}) as second:
            assert first.is_file() and second.is_file() and elsewhere.is_dir() and not left.parent.exists()
    finally:
        elsewhere.rmdir()


async def test_where_shared_memory_lacks_room_a_temporary_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with staged({"w": torch.ones(2)}) as path:
        assert path.is_relative_to(tmp_path)


def test_directories_of_killed_processes_go_when_another_is_named(tmp_path: Path) -> None:
    mine = new_name(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    left = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    for path in (mine, left):
        path.mkdir()
    assert new_name(tmp_path) != mine
    assert list(tmp_path.iterdir()) == [mine]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 1000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
async def test_a_file_that_cannot_be_written_is_told_and_gone() -> None:
    with pytest.raises(EngineError, match=r"could not write weights to .*make room there, or set TMPDIR") as caught:
        async with staged({"w": torch.ones(1000)}):
            pass
    assert not list(Path("/dev/shm").glob(f"treadle_weights-*-{os.getpid()}-*")), caught.value
