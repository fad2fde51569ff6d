"""`make gpu-check` without a GPU: nothing is claimed, and the script itself works."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = [sys.executable, "-m", "benchmarks.gpu_check"]
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # each part imports everything


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_is_skipped() -> None:
    done = subprocess.run(CHECK, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("every part was skipped: torch") and "no CUDA device" in done.stdout


def test_parts_run_on_a_cpu_and_what_is_missing_is_named(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--output", str(tmp_path / "found.json"), "kernels", "engine", "vllm"]
    subprocess.run([*CHECK, *options], cwd=ROOT, capture_output=True, text=True, check=True)
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert [*parts["kernels"], *parts["engine"], *parts["vllm"]] == ["rows", "rows", "skipped"]
    assert {row["kernel"] for row in parts["kernels"]["rows"]} == {"tiles"}
