"""What runs on a GPU, checked and measured, offline, in parts of at most eight minutes: `make gpu-check`.

    python -m benchmarks.gpu_check                        every part
    python -m benchmarks.gpu_check kernels engine         some
    python -m benchmarks.gpu_check --device cpu kernels   tries this script itself out, with a small model

Each part is a process of its own. A part that lacks something is skipped, and the reason printed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from benchmarks.measure import MIB, clock, median_seconds
from benchmarks.packing import CPU_MODEL, CUDA_BUDGETS, CUDA_KERNELS, CUDA_MODEL, CUDA_SIZE, cuda_rows
from benchmarks.workloads import VOCABULARY, WORKLOADS, Size
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.errors import ConfigError
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group, SamplingParams
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.vllm.launch import find_python
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import unique_weights, whole
from treadle.packing.flat import calls, flatten
from treadle.packing.layout import Packing, Sharing
from treadle.training.attention import select
from treadle.training.attention.interface import Kernel, Shape
from treadle.training.config import TrainingConfig
from treadle.training.forward import Forward
from treadle.training.learner import Learner
from treadle.training.objective import LossGradients, TokenScores
from treadle.training.ranks import Ranks
from treadle.training.sharding import ShardedRanks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "gpu.json"
LIMIT = 480  # seconds of a part
SMALL = Size(tasks=2, attempts=3, turns=3)
Row = Mapping[str, Any]


class Skipped(Exception):
    """Raised by a part that lacks something it needs."""


def small_model(device: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = make_model(ModelConfig(build={**CPU_MODEL, "vocab_size": VOCABULARY}, tokenizer="demo"), VOCABULARY, 0)
    return model.to(device=device, dtype=dtype)  # type: ignore[call-arg,no-any-return]  # a wrapper hides the signature


def gradient_of(learner: Learner, groups: list[Group]) -> dict[str, Tensor]:
    batch = flatten(groups)
    advantage = np.where(np.arange(len(batch)) % 2, 1.0, -0.5)
    learner.accumulate(batch, advantage)
    gradients = {}
    for name, parameter in learner.model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = whole(parameter.grad).double().cpu()
    return gradients


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance over that of b from zero."""
    squares = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    return float((sum(s for s, _ in squares) / sum(s for _, s in squares)) ** 0.5)


def ranks(device: str) -> Iterator[Row]:
    """One rank, sharded by FSDP2 (nccl on a GPU): the gradient is that of a learner alone, on a CPU."""

    def learner(place: str, ranks: Ranks | None = None) -> Learner:
        training = TrainingConfig(max_tokens_per_microbatch=1024)
        return Learner(small_model(place), training, AlgorithmConfig(), 10, ranks=ranks)

    groups = WORKLOADS["append-only"](SMALL)
    wanted = gradient_of(learner("cpu"), groups)
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            gradients = gradient_of(learner(device, ShardedRanks(init_device_mesh(device, (1,)))), groups)
        finally:
            dist.destroy_process_group()  # with nccl's still there the process would not end
    gap = distance(gradients, wanted)
    assert gap < 1e-4, f"the gradient is {gap:.1e} from a CPU's"
    yield {"gradient, relative distance": gap}


def kernels(device: str) -> Iterator[Row]:
    """Tree attention by each kernel, in its precision, against `dense` in float64 on a CPU."""
    names = CUDA_KERNELS if device == "cuda" else ("tiles",)
    for workload in ("append-only", "sliding context", "sub-agent forks"):
        groups = WORKLOADS[workload](SMALL)
        wanted, gradient = _passes(small_model("cpu", torch.float64), groups, select.KERNELS["dense"])
        for name in names:
            precisions = (torch.bfloat16,) if name == "varlen" else (torch.float32, torch.bfloat16)
            for dtype in precisions if device == "cuda" else (torch.float32,):
                logp, actual = _passes(small_model(device, dtype), groups, select.KERNELS[name])
                gap, apart = float((logp - wanted).abs().max()), distance(actual, gradient)
                bound = 1e-4 if dtype is torch.float32 else 0.1
                assert gap < bound and apart < bound, f"{workload}, {name}: {gap:.1e}, {apart:.1e}"
                yield {
                    "workload": workload,
                    "kernel": name,
                    "precision": str(dtype).removeprefix("torch."),
                    "log-probability, largest gap": gap,
                    "gradient, relative distance": apart,
                }


def _passes(
    model: PreTrainedModel, groups: list[Group], kernel: Callable[[Shape], Kernel]
) -> tuple[Tensor, dict[str, Tensor]]:
    forward, batch = Forward(model, 1024, make_kernel=kernel), flatten(groups)
    dtype = torch.float64 if model.dtype is torch.float64 else torch.float32
    temperature, logp = torch.ones(len(batch), device=model.device, dtype=dtype), torch.zeros(len(batch)).double()

    def gradient(scores: TokenScores) -> LossGradients:
        logp[torch.from_numpy(scores.flat)] = scores.logp.double().cpu()
        return LossGradients(torch.full_like(scores.logp, 1e-2))

    for tree in forward.trees(calls(batch), Packing.TREE, Sharing.GROUP):
        forward.backward(tree, temperature, gradient)
    return logp, {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def engine(device: str) -> Iterator[Row]:
    """TorchEngine: log-probabilities of what it samples, against the learner's; tokens a second of 64 sessions."""

    async def sample() -> Row:
        made = TorchEngine(small_model(device), TorchEngineOptions([2], max_batch=64), own_thread=False)
        await made.update_weights(unique_weights(small_model(device)), 0)
        prompts = [np.random.default_rng(n).integers(3, VOCABULARY, 100).astype(np.int32) for n in range(64)]
        for n in range(64):
            made.open_session(str(n))
        sampling = SamplingParams(max_tokens=64)
        started = time.perf_counter()
        completions = await asyncio.gather(*(made.generate(p, sampling, session=str(n)) for n, p in enumerate(prompts)))
        seconds = time.perf_counter() - started
        await made.close()
        learner = Forward(small_model(device), 4096)
        gap = max(
            float(np.abs(learner.exact_logprobs(np.concatenate([p, c.token_ids]))[len(p) - 1 :] - c.logprobs).max())
            for p, c in zip(prompts, completions, strict=True)
        )
        assert gap < 1e-3, f"log-probabilities are {gap:.1e} from the learner's"
        return {
            "log-probability, largest gap": gap,
            "tokens a second": sum(len(c.token_ids) for c in completions) / seconds,
        }

    yield asyncio.run(sample())


def packing(device: str) -> Iterator[Row]:
    """`benchmarks.packing --device cuda`, half as many attempts: every workload and packing, a Qwen3-0.6B's shape."""
    if device != "cuda":
        raise Skipped("--device cpu: `benchmarks.packing` measures a CPU")
    yield from cuda_rows(CUDA_BUDGETS[-1], 1, replace(CUDA_SIZE, attempts=4))


def update(device: str) -> Iterator[Row]:
    """Whole updates, optimizer and all, of a model of the shape of Qwen3-0.6B: tokens a second and peak memory.

    Packings take turns on one learner: what slows the machine slows all of them.
    """
    build, size = (CUDA_MODEL, CUDA_SIZE) if device == "cuda" else ({**CPU_MODEL, "vocab_size": VOCABULARY}, SMALL)
    config, groups = ModelConfig(build=dict(build), tokenizer="demo"), WORKLOADS["append-only"](size)
    tokens = sum(len(s.full_ids) for g in groups for t in g.trajectories for s in t.steps)
    for budget, rank in itertools.product(CUDA_BUDGETS, (0, 16)):
        lora = LoraConfig(rank=rank) if rank else None
        model = make_model(config, VOCABULARY, 0, lora=lora, half=bool(rank))
        model.to(device)  # type: ignore[arg-type]  # a wrapper hides the signature
        settings = {"precision": "bfloat16_pure" if rank else "bfloat16", "lora": lora}
        training = TrainingConfig.model_validate(
            {**settings, "gradient_checkpointing": True, "max_tokens_per_microbatch": budget}
        )
        learner = Learner(model, training, AlgorithmConfig(), 10)
        gc.collect()  # the learner before, whose weights would count

        def train(way: Packing, learner: Learner = learner) -> UpdateResult:
            learner.training = learner.training.model_copy(update={"packing": way})
            [result] = learner.train_batch(groups)
            return result

        rows: dict[str, dict[str, Any]] = {}
        for way in Packing:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            computed = train(way).metrics["packed_tokens"]
            peak = {"peak MiB": torch.cuda.max_memory_allocated() / MIB} if device == "cuda" else {}
            rows[way] = {"packing": str(way), "adapters of rank": rank, "tokens a pass": budget, **peak}
            rows[way] |= {"tokens of all calls": tokens, "tokens computed": computed}
        seconds = median_seconds({way: partial(train, way) for way in Packing}, 3, clock(torch.device(device)))
        for name, row in rows.items():
            took = seconds[name]
            yield {**row, "s": took, "times chain": seconds["chain"] / took, "tokens of calls a second": tokens / took}


def run(device: str) -> Iterator[Row]:
    """`treadle train demo`, `export`, and adapters on that: the device is chosen without being named.

    A row has the success of sampled attempts at held-out tasks, before and after, and the largest gap between
    log-probabilities of engine and learner.
    """
    small = ("data.held_out.options.count=64",) if device == "cpu" else ()
    short = ("warm_start.steps=20", "warm_start.max_loss=9") if device == "cpu" else ()
    with tempfile.TemporaryDirectory() as folder:

        def treadle(*arguments: str) -> str:
            command = [sys.executable, "-m", "treadle.cli.main", *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{arguments}: {done.stdout[-1500:]}\n{done.stderr[-2500:]}"
            return done.stdout + done.stderr

        def row(name: str, updates: int, *overrides: str) -> Row:
            asked = (*overrides, f"orchestration.updates={updates}", f"evaluation.every={updates}", *small)
            started = time.perf_counter()
            printed = treadle("train", "demo", "--name", name, *asked, f"orchestration.checkpoint_every={updates}")
            seconds = time.perf_counter() - started
            header = next(line for line in printed.splitlines() if line.startswith("run directory"))
            assert (device == "cuda") == ("cuda" in header), header
            lines = [json.loads(line) for line in Path(folder, "runs", name, "metrics.jsonl").read_text().splitlines()]
            success = [line["success"] for line in lines if line["kind"] == "evaluation" and line["temperature"]]
            gaps = [line["logprob_gap_max"] for line in lines if line["kind"] == "update"]
            return {
                "run": header.partition("(")[2].rstrip(")"),
                "updates": updates,
                "s, warm start and evaluations too": seconds,
                "success before": success[0],
                "success after": success[-1],
                "log-probability, largest gap": max(gaps),
            }

        yield row("all", 15 if device == "cuda" else 2, *short)
        treadle("export", "runs/all", "model")
        adapters = ("model={path: model}", "warm_start=null", "training.lora.rank=8")
        yield {"adapters": True, **row("adapters", 5 if device == "cuda" else 1, *adapters)}


def vllm(device: str) -> Iterator[Row]:
    """Publication from this GPU to a vLLM server: `tests/engines/vllm/test_vllm_gpu.py`."""
    if device != "cuda":
        raise Skipped("--device cpu")
    try:
        find_python(None)
    except ConfigError as error:
        raise Skipped(str(error)) from error
    tests = [sys.executable, "-m", "pytest", "-q", "tests/engines/vllm/test_vllm_gpu.py"]
    done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    yield {"tests": done.stdout.strip().splitlines()[-1]}


PARTS: Mapping[str, Callable[[str], Iterator[Row]]] = {
    each.__name__: each for each in (ranks, kernels, engine, packing, update, run, vllm)
}


def run_part(name: str, device: str) -> dict[str, Any]:
    """Return what came of a part, which is a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", name, "--device", device, "--here"]
    outcome: dict[str, Any] = {}
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
        printed = done.stdout
        if done.returncode:
            outcome["failed"] = done.stderr[-4000:].strip()
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()
        outcome["failed"] = f"not done after {LIMIT} s"
    lines = [json.loads(line) for line in printed.splitlines()]
    if lines and "skipped" in lines[0]:
        return dict(lines[0])
    return {"rows": lines, **outcome}


def main() -> int:
    """Run the parts; returns 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--output", type=Path, default=None, help=f"default: {RESULTS.relative_to(ROOT)}; of a GPU only"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        try:
            for row in PARTS[options.parts[0]](options.device):
                print(json.dumps(row), flush=True)
        except Skipped as reason:
            print(json.dumps({"skipped": str(reason)}))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"every part was skipped: torch {torch.__version__} sees no CUDA device")
        return 0
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "parts": {}}
    print(f"{name}, torch {torch.__version__}")
    for part in options.parts or PARTS:
        started = time.perf_counter()
        outcome = result["parts"][part] = run_part(part, options.device)
        state = next((each for each in ("failed", "skipped") if each in outcome), "ok")
        print(f"{part}: {state} ({time.perf_counter() - started:.0f} s)")
        print(
            "\n".join(f"  {each}" for each in [*outcome.get("rows", ()), *filter(None, [outcome.get(state)])]),
            flush=True,
        )
        if options.device == "cuda" or options.output:
            (options.output or RESULTS).write_text(json.dumps(result, indent=2) + "\n")
    return int(any("failed" in outcome for outcome in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
