"""The loop's sections of a configuration, and its part of a run's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator

from treadle.algorithms.config import AlgorithmConfig
from treadle.core.config import Config
from treadle.core.types import SamplingParams, Task
from treadle.engines.config import Device, EngineConfig
from treadle.loop.failures import FailuresConfig
from treadle.record.checkpoint_retention import KeepBest, Retention
from treadle.report.rewards import Grading
from treadle.rollout.config import ForksConfig, GatewayConfig, StartsConfig
from treadle.training.config import LearnerPlacement

StalePolicy = Literal["mask_steps", "wait", "drop_group"]


class EvaluationConfig(Config):
    """Evaluation on held-out tasks. `failures.causes` applies to them, too."""

    every: int = Field(50, ge=0, description="updates between evaluations (0: only before and after)")
    attempts: int = Field(
        1, ge=1, description="attempts per task; with several, pass@k (one of k succeeds) is estimated"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature of evaluations")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the fewest tokens with this total probability")
    top_k: int = Field(0, ge=0, description="keep the k most probable tokens (0: all)")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="limit on tokens sampled per call; default: rollout.max_completion_tokens"
    )
    greedy_too: bool = Field(True, description="before and after training also one attempt each at temperature 0")
    success_at: float = Field(1.0, description="a reward of at least this counts as success")
    success_of: str | None = Field(
        None, description="named component to compare with it, before weights (default: the whole reward)"
    )

    def attempts_at(self, temperature: float) -> int:
        """Return the number of attempts per task: one at temperature 0, because all would be the same."""
        return self.attempts if temperature > 0 else 1

    def sampling(self, training: SamplingParams, temperature: float) -> SamplingParams:
        """Return the sampling parameters of an evaluation at this temperature. training: parameters of training."""
        longest = self.max_completion_tokens or training.max_tokens
        return replace(
            training, temperature=temperature, top_p=self.top_p, top_k=self.top_k, min_p=0.0, max_tokens=longest
        )


class OrchestrationConfig(Config):
    """The loop. Buffer sizes and pacing follow from `training` and max_staleness."""

    updates: int = Field(100, ge=1, description="optimizer updates of the run")
    max_staleness: int = Field(0, ge=0, description="policy versions a trained token may lag behind; 0 is synchronous")
    stale_policy: StalePolicy = Field(
        "mask_steps",
        description="how to treat steps that would be trained later than that: mask_steps drops them, drop_group "
        "drops their whole group, wait makes the learner wait for a group before it can happen",
    )
    max_concurrent_groups: int | None = Field(
        None,
        ge=1,
        description="limit on concurrent groups, for example if each needs a container, and on attempts of an "
        "evaluation; default: enough to keep engine.batch full (synchronous: the whole batch)",
    )
    traced_groups: float = Field(
        0.03,
        ge=0,
        le=1,
        description="share of trained groups with records in traces/ of the learner's values for every sampled token: "
        "log-probability, entropy, advantage, ratio and clipping",
    )
    checkpoint_every: int = Field(20, ge=1, description="updates between checkpoints")
    ledger_directory: str | None = Field(
        None,
        description="directory on this machine's own disk for the ledger during the run, for runs on a shared "
        "filesystem, where SQLite is not safe; the run directory then has a copy, made at checkpoints",
    )
    keep_last: int = Field(2, ge=1, description="number of newest checkpoints kept on disk")
    keep_every: int | None = Field(
        None, ge=1, description="also save a checkpoint at multiples of this number of updates, and never remove it"
    )
    keep_best: KeepBest | None = Field(
        None, description="also save a checkpoint after each new best evaluation, and keep the best"
    )


class EnginePlacement(Config):
    """The engines of a cluster."""

    count: int = Field(1, ge=1, description="number of engines, each a separate process with one core")
    gpus: int = Field(0, ge=0, description="GPUs reserved for each")


class RolloutPlacement(Config):
    """The rollout workers of a cluster."""

    workers: int = Field(
        0, ge=0, description="processes that play attempts, each with one core; 0: the run's own process"
    )


class PlacementConfig(Config):
    """Placement of the run's processes."""

    kind: str = Field(
        "embedded",
        description="embedded: on this machine; ray: on a Ray cluster; or another registered name or module:function",
    )
    learner: LearnerPlacement = Field(LearnerPlacement(), description="what trains")
    engines: EnginePlacement = Field(EnginePlacement(), description="kind ray: processes that sample")
    rollout: RolloutPlacement = Field(
        RolloutPlacement(), description="kind ray: processes that play environments and agent programs"
    )
    colocate: bool = Field(
        False, description="kind ray: engine n shares the device of rank n, and they take turns; for synchronous runs"
    )
    address: str | None = Field(
        None, description="kind ray: address of a running cluster; default: a local one for this run"
    )
    wait: float | None = Field(
        None,
        gt=0,
        description="kind ray: seconds to wait for resources; default: 30 for resources held by others, none "
        "for resources that no node has (an autoscaling cluster may add them)",
    )

    @model_validator(mode="after")
    def _embedded_is_here(self) -> PlacementConfig:
        if self.kind == "embedded":
            fields, ray_only = type(self).model_fields, ("engines", "rollout", "colocate", "address", "wait")
            if extra := [name for name in ray_only if getattr(self, name) != fields[name].default]:
                raise ValueError(
                    f"placement.{extra[0]} is set, but placement.kind 'embedded' has no cluster; leave it out, or set "
                    "placement.kind=ray"
                )
        if self.colocate and (self.engines.count != self.learner.ranks or self.engines.gpus):
            raise ValueError(
                f"placement.colocate gives each of {self.learner.ranks} ranks an engine on its device; set "
                f"placement.engines.count={self.learner.ranks}, and leave placement.engines.gpus out"
            )
        return self


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The loop's part of a run's plan.

    seed: keys every draw. updates: number in the whole run. batch: updates between two publications of weights, for
    which `groups_per_batch` groups of `group_size` attempts are sampled. min_group_size: graded attempts that a group
    needs for training. pinned: versions that an attempt, which keeps its first one, may be behind the newest; None:
    attempts change versions. engine_capacity: attempts that the engines compute concurrently. evaluated_together:
    concurrent attempts of an evaluation, enough to keep the engines full. train, held_out: the tasks. starts and
    curriculum: see `loop.starts`; forks: `loop.forks`. may_start: whether attempts at a task can be replayed, and so
    begin in the middle.
    """

    seed: int
    updates: int
    batch: int
    groups_per_batch: int
    group_size: int
    min_group_size: int
    max_staleness: int
    stale_policy: StalePolicy
    pinned: int | None
    max_concurrent_groups: int | None
    engine_capacity: int
    evaluated_together: int
    checkpoint_every: int
    retention: Retention
    shuffle: bool
    table_by: str | None
    algorithm: AlgorithmConfig
    failures: FailuresConfig
    evaluation: EvaluationConfig
    grading: Grading
    train: Sequence[Task] = ()
    held_out: Sequence[Task] = ()
    starts: StartsConfig | None = None
    forks: ForksConfig | None = None
    curriculum: str = "uniform"
    may_start: Callable[[Task], bool] = lambda task: True

    def is_last(self, update: int) -> bool:
        return update >= self.updates

    def is_due(self, update: int, every: int | None) -> bool:
        """Return whether the batch that ends with this update reached a multiple of `every`; never for 0 and None."""
        return bool(every) and update % (every or 1) < self.batch


@dataclass(frozen=True, slots=True)
class RuntimePlan:
    """The placement's part of a run's plan. adapters: whether adapters are trained, rather than all weights."""

    placement: PlacementConfig
    device: Device
    engine: EngineConfig
    gateway: GatewayConfig
    adapters: bool
