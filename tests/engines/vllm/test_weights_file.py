"""Weights in shared memory: complete or absent, and none left behind by a killed process."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from treadle.engines.vllm.weights_file import WeightsFile

LEFT_BEHIND = """
import asyncio, os, signal, sys, torch
from treadle.engines.vllm.weights_file import WeightsFile
asyncio.run(WeightsFile.write({"w": torch.ones(2)}, torch.float32, sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_file_holds_the_weights_until_it_is_discarded(tmp_path: Path) -> None:
    weights = {"w": torch.arange(4.0), "steps": torch.tensor([3])}
    file = await WeightsFile.write(weights, torch.bfloat16, str(tmp_path))
    found = load_file(file.path)
    assert (found["w"].dtype, found["steps"].tolist()) == (torch.bfloat16, [3])
    file.discard()
    assert not list(tmp_path.iterdir())


async def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)], check=False)
    assert killed.returncode < 0 and len(list(tmp_path.iterdir())) == 1
    other = tmp_path / f"treadle-elsewhere-{os.getpid()}-0.safetensors"
    other.touch()
    first = await WeightsFile.write({"w": torch.ones(2)}, torch.float32, str(tmp_path))
    second = await WeightsFile.write({"w": torch.ones(2)}, torch.float32, str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([other, first.path, second.path])
