"""`make gpu-check` without a GPU: nothing is claimed, and the script itself works."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("every part was skipped: torch") and "no CUDA device" in printed


@pytest.mark.slow
def test_parts_run_on_a_cpu_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row["kernel"] for row in gpu_check.PARTS["kernels"]("cpu")} == {"tiles"}
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "--device", "cpu", "--output", str(tmp_path / "parts.json"), "engine", "vllm"]
    )
    assert gpu_check.main() == 0
    parts = json.loads((tmp_path / "parts.json").read_text())["parts"]
    assert [*parts["engine"], *parts["vllm"]] == ["rows", "skipped"]
