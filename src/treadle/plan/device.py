"""The device and precision of a run, and GPUs it leaves unused.

device: auto                            -> cuda, if there is a GPU per rank; otherwise cpu
training.precision, engine.dtype: null  -> bfloat16, if such a GPU supports it; otherwise float32
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from treadle.core.errors import ConfigError
from treadle.engines.config import Device, EngineConfig
from treadle.plan.config import RunConfig

_NVIDIA = Path("/proc/driver/nvidia/gpus")  # one directory per GPU, independent of torch


def settled(config: RunConfig, before: RunConfig | None = None) -> RunConfig:
    """Return the configuration with device and precisions filled in, for storage.

    before: configuration of the run to continue; its device, precisions and threads are kept unless others are
    configured.
    """
    device: Device = before.device if before is not None and config.device == "auto" else config.device
    precision, dtype, threads = config.training.precision, config.engine.dtype, config.training.threads
    if before is not None:
        precision, dtype = precision or before.training.precision, dtype or before.engine.dtype
        threads = threads or before.training.threads
    embedded = config.placement.kind == "embedded"
    if device == "auto":
        device = chosen(device, config.placement.learner.ranks) if embedded else "cpu"
    half = "bfloat16" if config.training.lora is None else "bfloat16_pure"
    training = {"precision": precision or (half if has_bfloat16(device) else "float32"), "threads": threads}
    engine = settled_engine(config.engine.model_copy(update={"dtype": dtype}), device)
    return config.model_copy(
        update={"device": device, "training": config.training.model_copy(update=training), "engine": engine}
    )


def settled_engine(config: EngineConfig, device: Device) -> EngineConfig:
    """Return the section with `dtype` filled in. device: device of Treadle's own engine; vLLM uses a GPU if present."""
    half = torch.cuda.is_available() and has_bfloat16("cuda") if config.kind == "vllm" else has_bfloat16(device)
    return config.model_copy(update={"dtype": config.dtype or ("bfloat16" if half else "float32")})


def chosen(device: Device, ranks: int = 1) -> Device:
    """Return the device: `auto` becomes cuda if there is a GPU per rank, otherwise cpu."""
    return device if device != "auto" else "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def has_bfloat16(device: Device) -> bool:
    """Return whether the device computes in bfloat16 by default. A GPU elsewhere is assumed to support it."""
    return device == "cuda" and (
        not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    )


def check_device(device: Device, ranks: int = 1) -> None:
    """Raise ConfigError if this machine lacks the device, for each rank."""
    here = f"this torch ({torch.__version__})"
    if device == "cuda" and ranks > (count := torch.cuda.device_count()):
        fewer = f", or placement.learner.ranks={count}" if count else ""
        raise ConfigError(
            f"device is 'cuda' for {ranks} rank{'s' * (ranks > 1)} of the learner, and {here} sees "
            f"{count or 'no'} GPU{'s' * (count != 1)}; set device=cpu{fewer}"
        )
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device is 'mps', and {here} sees no GPU of Apple's; set device=cpu")
    if device == "mps" and ranks > 1:
        raise ConfigError(f"device is 'mps', and placement.learner.ranks is {ranks}; set one to cpu or to 1")


def describe_device(config: RunConfig) -> str:
    """Return a settled configuration's device: `cpu`, or `cuda (NVIDIA H200), learner bfloat16, engine bfloat16`."""
    if config.device == "cpu":
        return "cpu"
    embedded = config.device == "cuda" and config.placement.kind == "embedded" and torch.cuda.is_available()
    name = f" ({torch.cuda.get_device_name(0)})" if embedded else ""
    return f"{config.device}{name}, learner {config.training.precision}, engine {config.engine.dtype}"


def unused_gpus(device: Device, engine: EngineConfig, ranks: int = 1) -> str:
    """Return a line about GPUs that the run does not use, and the key to change that; "" without any."""
    count = torch.cuda.device_count()
    if not count:
        return _invisible_gpus(device)
    used = set(range(ranks if device == "cuda" else 0)) | _gpus_of_vllm(engine)
    unused = len(set(range(count)) - used)
    if not unused:
        return ""
    text = f"{unused} of {count} GPU{'s' * (count > 1)} ({torch.cuda.get_device_name(0)}) not used: "
    if device == "cuda":
        return f"{text}placement.learner.ranks={count} trains on all; engine.kind=vllm samples on others"
    if ranks > count:
        return f"{text}device=cuda needs one for each of placement.learner.ranks={ranks}"
    return f"{text}device is {device}; device=cuda computes on {'one' if ranks == 1 else ranks}"


def _invisible_gpus(device: Device) -> str:
    if torch.backends.mps.is_available():
        return "" if device == "mps" else "Apple's GPU is not used: device=mps would compute on it (docs/one-gpu.md)"
    count = len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0
    if not count or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    why = "was built without CUDA" if torch.version.cuda is None else "cannot use its driver"
    return f"{count} NVIDIA GPU{'s' * (count > 1)} not used: torch {torch.__version__} {why}; install one that fits"


def _gpus_of_vllm(engine: EngineConfig) -> set[int]:
    """Return the GPUs of servers started here, by number."""
    if engine.kind != "vllm" or engine.vllm.urls:
        return set()
    visible = engine.vllm.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return set(range(int(engine.vllm.args.get("tensor-parallel-size", 1))))
    return {int(number) for number in visible.split(",") if number.strip().isdecimal()}
