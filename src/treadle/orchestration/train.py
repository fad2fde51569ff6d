"""Starting, resuming and finishing a run: everything around the loop.

load_inputs -> model, tokenizer -> warm start -> Learner, TorchEngine -> Loop.run -> summary.json, curve.png
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.errors import EngineError, RunError
from treadle.core.files import write_atomically
from treadle.core.types import SamplingParams
from treadle.engines.torch_engine import TorchEngine
from treadle.engines.weights import weights_sha256
from treadle.orchestration.config import RunConfig
from treadle.orchestration.curve import draw_curve
from treadle.orchestration.inputs import Inputs, check_first_prompts
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.loop import Clock, Loop, StopRequest
from treadle.orchestration.progress import Progress
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.warm_start import WarmStartReport, check_demonstrations, run_warm_start
from treadle.packing.flat import Span
from treadle.packing.layout import Packing, micro_batches, pack
from treadle.rollout.attempt import Rollouts
from treadle.rollout.chat import ChatRenderer
from treadle.training.checkpoint import checkpoint_bytes, load_checkpoint, remove_others
from treadle.training.config import ModelConfig
from treadle.training.forward import token_logprobs
from treadle.training.learner import Learner
from treadle.training.model import load_tokenizer, make_model, tokenizer_directory


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with what is needed to talk to it."""

    model: PreTrainedModel
    renderer: ChatRenderer
    tokenizer_path: Path
    stop_token_ids: tuple[int, ...]
    context: int
    decode: Any

    def engine(self, max_batch: int) -> TorchEngine:
        """An embedded engine with its own weights, on the caller's thread: learner and engine take turns."""
        return TorchEngine(
            self.model, stop_token_ids=self.stop_token_ids, decode=self.decode, max_batch=max_batch, own_thread=False
        )


def load_policy(config: ModelConfig, seed: int) -> Policy:
    """Model and tokenizer as configured. Raises ConfigError."""
    directory = tokenizer_directory(config)
    tokenizer = load_tokenizer(directory)
    model = make_model(config, len(tokenizer), seed)
    stop = (int(tokenizer.eos_token_id),)

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    context = int(model.config.get_text_config().max_position_embeddings)
    return Policy(model, ChatRenderer(tokenizer, stop), directory, stop, context, decode)


def available_cores() -> int:
    """Cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(threads: int | None) -> None:
    """Fix torch's thread count and ask for deterministic kernels: same seed, machine and threads, same bits."""
    torch.set_num_threads(threads or available_cores())
    torch.use_deterministic_algorithms(True)


def start_run(config: RunConfig, inputs: Inputs, path: Path, progress: Progress) -> dict[str, Any]:
    """Train from the beginning in a new run directory; returns the summary. Raises TreadleError."""
    clock = Clock()
    use_threads(config.training.threads)
    policy = load_policy(config.model, config.seed)
    check_first_prompts(inputs, policy.renderer, config, policy.context)
    check_demonstrations(config, policy.renderer)
    run = RunDirectory.create(path, config)
    try:
        progress.say(f"run directory: {path}")
        size = 3 * sum(p.numel() * p.element_size() for p in policy.model.parameters())
        run.require_space(size, config.orchestration.keep_last)
        report = run_warm_start(policy.model, policy.renderer, policy.tokenizer_path, config, progress)
        if report is not None:
            progress.say(_warm_start_line(report))
            write_atomically(path / "warm_start.json", json.dumps(asdict(report)).encode())
        return _train(config, inputs, run, policy, LoopState(), clock, progress)
    finally:
        run.unlock()


def resume_run(config: RunConfig, inputs: Inputs, path: Path, progress: Progress) -> dict[str, Any]:
    """Go on from the latest checkpoint; returns the summary.

    Weights become bit-identical to those of a run that was never interrupted. Raises RunError if the run is finished,
    in use, or never reached its first checkpoint.
    """
    clock = Clock()
    use_threads(config.training.threads)
    run = RunDirectory.open(path)
    run.lock()
    try:
        if run.summary_file.is_file():
            raise RunError(f"run {str(path)!r} is finished ({config.orchestration.updates} updates); nothing to resume")
        ledger = Ledger(run.ledger_file)
        latest = ledger.latest_checkpoint()
        ledger.close()
        if latest is None:
            raise RunError(f"run {str(path)!r} has no checkpoint yet; remove it and start again")
        policy = load_policy(config.model, config.seed)
        progress.say(f"resuming {path} after {latest[1].update} of {config.orchestration.updates} updates")
        clock = replace(clock, wall_before=latest[1].wall_seconds, cpu_before=latest[1].cpu_seconds)
        return _train(config, inputs, run, policy, latest[1], clock, progress, resume_from=latest[0])
    finally:
        run.unlock()


def _train(
    config: RunConfig,
    inputs: Inputs,
    run: RunDirectory,
    policy: Policy,
    state: LoopState,
    clock: Clock,
    progress: Progress,
    resume_from: str | None = None,
) -> dict[str, Any]:
    learner = Learner(policy.model, config.training, config.algorithm, config.orchestration.updates)
    run.require_space(checkpoint_bytes(learner), config.orchestration.keep_last)
    ledger = Ledger(run.ledger_file)
    try:
        if resume_from is not None:
            load_checkpoint(run.checkpoints / resume_from, learner, policy.tokenizer_path)
            remove_others(run.checkpoints, [resume_from])
            dropped = ledger.roll_back(state)
            run.roll_back_metrics(state.update)
            progress.say(f"{dropped} steps recorded after that checkpoint are dropped as resampled")
        state, stopped = asyncio.run(_run_loop(config, inputs, run, policy, learner, ledger, state, clock, progress))
    finally:
        ledger.close()
    summary = _summary(config, run, learner, state, stopped)
    if not stopped:
        draw_curve(run.metrics(), run.curve_file, f"{config.recipe}, seed {config.seed}")
        write_atomically(run.summary_file, json.dumps(summary, indent=2).encode())
    return summary


async def _run_loop(
    config: RunConfig,
    inputs: Inputs,
    run: RunDirectory,
    policy: Policy,
    learner: Learner,
    ledger: Ledger,
    state: LoopState,
    clock: Clock,
    progress: Progress,
) -> tuple[LoopState, bool]:
    """Returns the final state and whether the run was asked to stop before its end."""
    engine = policy.engine(config.orchestration.engine_batch)
    stop = StopRequest()
    loop = Loop(
        config=config,
        run=run,
        ledger=ledger,
        learner=learner,
        engine=engine,
        rollouts=Rollouts(engine, policy.renderer, inputs.environments, config.rollout),
        train=inputs.train,
        held_out=inputs.held_out,
        tokenizer=policy.tokenizer_path,
        state=state,
        clock=clock,
        progress=progress,
        stop=stop,
    )
    try:
        await check_engine(engine, learner, policy)
        with _stop_on_signals(stop):
            final = await loop.run()
    finally:
        await engine.close()
    return final, final.update < config.orchestration.updates


async def check_engine(engine: TorchEngine, learner: Learner, policy: Policy) -> None:
    """Sample a few tokens and score them with engine and learner: they must be the same policy.

    Raises EngineError, before the first rollout, where their log-probabilities differ by more than rounding.
    """
    await engine.publish(learner.weights(), 0)
    prompt = policy.renderer.first([{"role": "user", "content": "ok"}])
    engine.open_session("probe")
    answer = await engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=8, seed=1), session="probe")
    engine.close_session("probe")
    [part] = micro_batches(pack([Span(prompt, answer.token_ids, 0, 0)], Packing.STEP), max_tokens=1)
    with torch.no_grad():
        logp, _ = token_logprobs(learner.model, part, torch.ones(len(answer.token_ids)))
    scored = (await engine.score(np.concatenate([prompt, answer.token_ids])))[len(prompt) - 1 :]
    for name, other in (("its own scoring pass", scored), ("the learner", logp.cpu().numpy())):
        gap = float(np.abs(answer.logprobs - other).max())
        if not gap < 1e-3:
            raise EngineError(f"the engine's log-probabilities differ from those of {name} by up to {gap:.2e}")


@contextmanager
def _stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the loop to finish its update and save; the second one interrupts at once.

    Plain handlers rather than the event loop's, which would wait for an update to end. They are put back afterwards.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not ours
        yield
        return
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in handled}

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.asked = True
        for number in handled:
            signal.signal(number, signal.default_int_handler)
        # a signal may come in the middle of a print, which must not be entered again
        os.write(2, b"\nstopping: finishing this update, then saving a checkpoint (once more: stop at once)\n")

    try:
        for number in handled:
            signal.signal(number, ask)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warm_start_line(report: WarmStartReport) -> str:
    how = "read from the cache" if report.cached else f"{report.seconds:.0f} s"
    return f"warm start: loss {report.loss:.3f} after {report.steps} steps ({how})"


def _summary(config: RunConfig, run: RunDirectory, learner: Learner, state: LoopState, stopped: bool) -> dict[str, Any]:
    """What summary.json holds. Held-out figures are at `evaluation.temperature`, the greedy ones beside them."""
    sampled = [e for e in state.evaluations if e["temperature"] == config.evaluation.temperature]
    greedy = [e for e in state.evaluations if e["temperature"] == 0]
    warm_start = run.path / "warm_start.json"

    def success(results: list[dict[str, Any]], which: int) -> float | None:
        return results[which]["success"] if len(results) > 1 else None

    return {
        "run": str(run.path),
        "recipe": config.recipe,
        "seed": config.seed,
        "updates": state.update,
        "stopped_early": stopped,
        "held_out_success_before": sampled[0]["success"] if sampled else None,
        "held_out_success_after": None if stopped else success(sampled, -1),
        "held_out_greedy_before": greedy[0]["success"] if greedy else None,
        "held_out_greedy_after": None if stopped else success(greedy, -1),
        "held_out_tasks": sampled[0]["tasks"] if sampled else 0,
        "evaluations": list(state.evaluations),
        "warm_start": json.loads(warm_start.read_bytes()) if warm_start.is_file() else None,
        "threads": torch.get_num_threads(),
        "wall_seconds": round(state.wall_seconds, 1),
        "cpu_seconds": round(state.cpu_seconds, 1),
        "weights_sha256": weights_sha256(learner.weights()),
    }
