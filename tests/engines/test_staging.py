"""Weights as one flat mapping, and in files for other processes: complete, and gone afterwards."""

import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models import FAMILIES, tiny
from tests.sources import FixedWeights
from treadle.core.errors import EngineError
from treadle.engines.staging import StagedFile, WeightsFile, stage_file, temporary_directory
from treadle.models.weights import unique_weights, weights_sha256

LEFT_BEHIND = """
import os, signal, torch
from treadle.engines.staging import WeightsFile

weights = {"w": torch.ones(2)}
print(WeightsFile().write(weights, weights.items()).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def staged(**options: Any) -> StagedFile:
    return await stage_file(FixedWeights({"w": torch.ones(1000)}), WeightsFile(**options))


async def test_a_file_holds_the_weights_until_it_is_discarded() -> None:
    weights = {"w": torch.randn(3, 4).t(), "half": torch.randn(2).bfloat16(), "steps": torch.tensor([3])}
    destination: WeightsFile = pickle.loads(pickle.dumps(WeightsFile()))
    file = await stage_file(FixedWeights(weights), destination)
    assert file.path.is_relative_to("/dev/shm") and file.path.parent.stat().st_mode & 0o777 == 0o700
    found = load_file(file.path)
    assert found.keys() == weights.keys() == file.shapes.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in weights.items())
    assert file.shapes["w"] == (4, 3)
    file.discard()
    assert not file.path.parent.exists()


async def test_floating_point_weights_are_written_in_the_engines_type_where_others_read() -> None:
    weights = {"w": torch.arange(4.0), "steps": torch.tensor([3])}
    file = await stage_file(FixedWeights(weights), WeightsFile(torch.bfloat16, private=False))
    assert file.path.parent.stat().st_mode & 0o055 == 0o055
    found = load_file(file.path)
    assert (found["w"].dtype, found["steps"].tolist()) == (torch.bfloat16, [3])
    file.discard()


@pytest.mark.parametrize("waited_for", [True, False])
async def test_what_a_killed_process_left_is_removed_and_nothing_else(
    waited_for: bool, request: pytest.FixtureRequest
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND], stdout=subprocess.PIPE, text=True)
    request.addfinalizer(killed.communicate)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    os.waitid(os.P_PID, killed.pid, os.WEXITED | (0 if waited_for else os.WNOWAIT))
    assert left.is_file()
    elsewhere = left.parent.with_name(f"treadle_weights-elsewhere-{os.getpid()}-x")
    elsewhere.mkdir()
    try:
        first, second = await staged(), await staged()
        assert first.path.is_file() and second.path.is_file() and elsewhere.is_dir() and not left.parent.exists()
        first.discard()
        second.discard()
    finally:
        elsewhere.rmdir()


async def test_where_shared_memory_lacks_room_a_temporary_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert (await staged()).path.is_relative_to(tmp_path)


def test_directories_of_killed_processes_go_when_another_is_made(tmp_path: Path) -> None:
    mine = temporary_directory(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")).mkdir()
    other = temporary_directory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


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
        await staged()
    assert not list(Path("/dev/shm").glob(f"treadle_weights-*-{os.getpid()}-*")), caught.value


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_appears_once_and_is_not_copied(family: str) -> None:
    model = tiny(family)
    weights = unique_weights(model)
    assert {t.data_ptr() for t in weights.values()} == {p.data_ptr() for p in model.parameters()}
    assert len(weights) == len(list(model.parameters()))
    assert ("lm_head.weight" in weights) is (not model.config.tie_word_embeddings)
    assert not any(t.requires_grad for t in weights.values())


def test_the_hash_sees_every_bit_name_type_and_shape() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.zeros(2, 2)}
    seen = {weights_sha256(weights)}
    for change in (
        {"a": torch.arange(6.0).nextafter(torch.tensor(9.0))},
        {"a": torch.arange(6.0).view(2, 3)},
        {"a": torch.arange(6)},
        {"b": torch.zeros(2, 2).neg()},  # -0.0
        {"c": torch.zeros(1)},
    ):
        seen.add(weights_sha256({**weights, **change}))
    seen.add(weights_sha256({"a": weights["a"], "c": weights["b"]}))
    assert len(seen) == 7


def test_the_hash_sees_neither_order_nor_strides() -> None:
    square = torch.arange(9.0).view(3, 3)
    one = {"a": square, "b": torch.ones(1)}
    other = {"b": torch.ones(1), "a": square.t().contiguous().t()}
    assert weights_sha256(one) == weights_sha256(other)
