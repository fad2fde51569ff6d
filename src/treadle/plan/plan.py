"""A run's plan: everything decided before anything is sampled.

RunConfig -> load_inputs -> Inputs -> make -> Plan -> Runtime, Trainer, Engine, Loop
(settings)   (checks, without torch)  (device, precision, lock-step)
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treadle.core.errors import RunError
from treadle.core.text import shown_bytes
from treadle.engines.config import EngineConfig
from treadle.loop.config import LoopPlan, RuntimePlan
from treadle.loop.thread_count import available_cores, default_threads
from treadle.plan.config import RunConfig
from treadle.plan.device import settled
from treadle.plan.inputs import Inputs
from treadle.training.config import TrainerSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run works with.

    config: settled configuration, as stored. engine, evaluation_engine: section `engine` for training and for an
    evaluation without it, both with `lock_step` resolved. repeats: whether a resumed run samples an interrupted batch
    again, in full, to get the same bits: they depend on the shapes of all of the batch's lock-step waves and on the
    resulting KV cache, which recorded answers cannot restore.
    """

    config: RunConfig
    inputs: Inputs
    trainer: TrainerSpec
    runtime: RuntimePlan
    loop: LoopPlan
    engine: EngineConfig
    evaluation_engine: EngineConfig
    repeats: bool

    def with_threads(self, parameters: int, ranks: int = 1) -> Plan:
        """Set torch's threads and deterministic kernels, so that seed, machine and threads determine every bit; return
        the plan with the number of threads, which resumed runs keep.

        parameters: number of the model's, for `default_threads`. ranks: processes that compute side by side, each with
        as many threads. On a GPU kernels are not deterministic, because PyTorch lacks such a `cumsum`, which the engine
        uses for sampling.
        """
        training = self.config.training
        number = training.threads or default_threads(parameters, max(1, available_cores() // ranks))
        torch.set_num_threads(number)
        torch.use_deterministic_algorithms(self.config.device == "cpu")
        training = training.model_copy(update={"threads": number})
        return replace(self, config=self.config.model_copy(update={"training": training}))

    def require_space(self, folder: Path, checkpoint_bytes: int) -> str:
        """Return a line about the disk. Raises RunError if it lacks room for the kept checkpoints and one more."""
        section = self.config.orchestration
        number, free = section.keep_last + (section.keep_best is not None) + 1, shutil.disk_usage(folder).free
        text = f"{number} checkpoints of {shown_bytes(checkpoint_bytes)} each, {shown_bytes(free)} free at {folder}"
        if free < number * checkpoint_bytes:
            raise RunError(f"{text}; free some space, lower orchestration.keep_last or choose another --runs directory")
        return text


def make(config: RunConfig, inputs: Inputs, before: RunConfig | None = None) -> Plan:
    """Decide what is left open: device, precisions, lock-step. before: configuration of the run to continue."""
    config = settled(config, before)
    synchronous, may_wait = config.orchestration.max_staleness == 0, inputs.players.may_wait
    engine, alone = (_in_lock_step(config.engine, on and not may_wait) for on in (synchronous, True))
    return Plan(
        config,
        inputs,
        config.trainer,
        config.runtime,
        replace(config.loop, train=inputs.train, held_out=inputs.held_out, may_start=inputs.players.may_start),
        engine,
        alone,
        repeats=synchronous and engine.kind != "vllm" and engine.lock_step is not False,
    )


def _in_lock_step(engine: EngineConfig, default: bool) -> EngineConfig:
    return engine.model_copy(update={"lock_step": default if engine.lock_step is None else engine.lock_step})
