"""A GPU is used without a key, and one that is not used is said; none is here, so that PyTorch's counts are faked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.runs import resume, start
from tests.worlds import Quiet, tiny
from treadle.api.train import dry_run
from treadle.core.errors import ConfigError
from treadle.plan import device
from treadle.plan.config import config_of
from treadle.plan.device import check_device, settled, unused_gpus
from treadle.plan.memory import estimate_memory
from treadle.record.run_directory import RunDirectory
from treadle.training.make import load_model

VLLM = ("engine.kind=vllm", 'engine.options.environment={CUDA_VISIBLE_DEVICES: "1"}')


@pytest.fixture(autouse=True)
def no_apple(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(device, "_NVIDIA", tmp_path / "no driver")


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H200")


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, (), ("cpu", "float32", "float32")),
        (1, (), ("cuda", "bfloat16", "bfloat16")),
        (8, (), ("cuda", "bfloat16", "bfloat16")),
        (1, ("device=cpu",), ("cpu", "float32", "float32")),
        (1, ("training.precision=float32", "engine.dtype=float32"), ("cuda", "float32", "float32")),
        (1, ("placement.learner.ranks=2",), ("cpu", "float32", "float32")),
        (2, ("placement.learner.ranks=2",), ("cuda", "bfloat16", "bfloat16")),
        (1, ("placement.kind=ray",), ("cpu", "float32", "float32")),
        (0, ("device=cuda",), ("cuda", "bfloat16", "bfloat16")),
        (0, ("device=mps",), ("mps", "float32", "float32")),
    ],
)
def test_a_gpu_is_used_without_a_key(
    gpus: int, overrides: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, gpus)
    config = settled(tiny("training.precision=null", "engine.dtype=null", *overrides))
    assert (config.device, config.training.precision, config.engine.dtype) == expected


@pytest.mark.parametrize(
    ("gpus", "overrides", "line"),
    [
        (0, (), ""),
        (1, (), ""),
        (1, ("device=cpu",), "1 of 1 GPU (H200) not used: device is cpu; device=cuda computes on one"),
        (2, ("placement.learner.ranks=3",), "2 of 2 GPUs (H200) not used: device=cuda needs one for each of placement"),
        (8, (), "7 of 8 GPUs (H200) not used: placement.learner.ranks=8 trains on all; engine.kind=vllm samples on"),
        (2, VLLM, ""),
        (3, VLLM, "1 of 3 GPUs"),
    ],
)
def test_gpus_that_are_not_used_are_said_with_the_key(
    gpus: int, overrides: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, gpus)
    config = settled(tiny(*overrides))
    said = unused_gpus(config.device, config.engine, config.placement.learner.ranks)
    assert said.startswith(line) and bool(said) is bool(line)


def test_gpus_that_torch_cannot_see_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(device, "_NVIDIA", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = tiny().engine
    assert unused_gpus("cpu", engine).startswith(f"1 NVIDIA GPU not used: torch {torch.__version__} ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpus("cpu", engine) == ""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert unused_gpus("mps", engine) == "" and "device=mps would" in unused_gpus("cpu", engine)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0)
    with pytest.raises(
        ConfigError, match=r"device is 'cuda' for 1 rank of the learner, .* sees no GPUs; set device=cpu$"
    ):
        check_device("cuda")
    with pytest.raises(ConfigError, match=r"device is 'mps', .* sees no GPU of Apple's; set device=cpu"):
        check_device("mps")
    fake_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"sees 1 GPU; set device=cpu, or placement\.learner\.ranks=1"):
        check_device("cuda", 2)


def test_a_run_uses_the_gpu_for_learner_and_engine_and_says_so_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The models stay where they are: there is no GPU."""
    fake_gpus(monkeypatch, 1)
    moved: list[Any] = []

    def to(model: PreTrainedModel, where: Any) -> PreTrainedModel:
        moved.append(where)
        return model

    monkeypatch.setattr(PreTrainedModel, "to", to)
    path, said = tmp_path / "run", Quiet()
    defaults = ("training.precision=null", "engine.dtype=null")
    start(path, "orchestration.updates=1", *defaults, progress=said)
    assert moved == ["cuda", "cuda"] and not torch.are_deterministic_algorithms_enabled()
    assert said.lines[0] == f"run directory: {path} (cuda, learner bfloat16, engine bfloat16, 1 thread)"
    stored = config_of(RunDirectory.open(path))
    assert (stored.device, stored.training.precision, stored.engine.dtype) == ("cuda", "bfloat16", "bfloat16")
    fake_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        resume(path, config=tiny(*defaults, "orchestration.updates=2"))
    said = Quiet()
    resume(path, config=tiny(*defaults, "device=cpu", "orchestration.updates=2"), progress=said)
    assert "changed: device cuda -> cpu" in said.lines
    assert config_of(RunDirectory.open(path)).training.precision == "bfloat16"


def test_a_dry_run_names_the_device_that_is_not_there_and_what_is_on_it(tmp_path: Path) -> None:
    found = dry_run(tiny("device=cuda"), tmp_path, print)
    assert {check.name for check in found.checks if check.is_missing} == {"device"}
    on_gpu = {part.name for part in found.memory if part.on_gpu}
    assert {"weights", "the engine's KV cache", "activations"} <= on_gpu and "Python and libraries" not in on_gpu
    assert any("on the GPU at the peak" in check.text for check in found.checks)


def test_memory_is_bounded_by_what_the_settings_allow() -> None:
    def parts(*overrides: str, prompt: int | None = None) -> dict[str, str]:
        config = tiny("warm_start=null", "training.max_tokens_per_microbatch=100000", "engine.batch=256", *overrides)
        return {
            part.name: part.formula
            for part in estimate_memory(config, load_model(config.model, 0), None, prompt=prompt)
        }

    config = tiny()
    size, tasks, rollout = config.training.group_size, config.training.tasks_per_update, config.rollout
    most = tasks * size * rollout.max_steps * rollout.longest_call
    assert parts()["activations"].endswith(f"T {most}")
    reply = parts("data.held_out=null", prompt=20)
    assert reply["activations"].endswith(f"T {tasks * (20 + size * rollout.max_completion_tokens)}")
    sessions = config.training.groups_per_batch * size
    assert reply["the engine's KV cache"].startswith(
        f"at most {sessions} sessions x {20 + rollout.max_completion_tokens}"
    )
