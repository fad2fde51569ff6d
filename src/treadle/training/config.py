"""The `warm_start` and `training` sections of a configuration. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from treadle.algorithms import estimators
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.validation import check
from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.models.config import LoraConfig, ModelConfig
from treadle.packing.layout import Packing, Sharing

if TYPE_CHECKING:
    from treadle.rollout.other_models import OtherModelConfig


class OptimizerConfig(Config):
    """Configures AdamW, clipping and the learning-rate schedule: linear warm-up, constant, cosine to `final_lr`."""

    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    warmup: int = Field(0, ge=0, description="updates of linear warm-up")
    decay_from: float = Field(1.0, ge=0, le=1, description="share of all updates before the cosine begins")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of the peak left at the end of the cosine")


class WarmStartConfig(Config):
    """Configures supervised learning on demonstrations before RL (also `treadle sft`)."""

    demonstrations: str = Field(
        description="a .jsonl of {messages: [...]}, a registered name, module:function; or random_calls: random calls "
        "of the environment's tools",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the demonstrations' generator")
    steps: int = Field(500, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="conversations per step")
    max_loss: float | None = Field(
        None, gt=0, description="stop with an error if the mean loss of the last 10% of steps exceeds this"
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="peak, after 20 steps or a fifth of all; decays to a tenth at the end"
    )

    @property
    def optimizer(self) -> OptimizerConfig:
        warmup = min(20, self.steps // 5)
        return OptimizerConfig(learning_rate=self.learning_rate, warmup=warmup, decay_from=0.5, final_lr=0.1)


class TrainingConfig(Config):
    """Configures the learner's updates."""

    tasks_per_update: int = Field(32, ge=1, description="exact number of groups per optimizer update")
    group_size: int = Field(8, ge=1, description="trajectories per task; most advantages compare them and need 2")
    min_group_size: int | None = Field(
        None,
        ge=1,
        description="leave out groups with fewer graded trajectories; default: 2, or 1 without a baseline",
    )
    updates_per_batch: int = Field(1, ge=1, description="optimizer updates per batch, which share its groups")
    epochs_per_batch: int = Field(1, ge=1, description="passes over a batch before weights are published")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="optimizer of RL")
    lora: LoraConfig | None = Field(None, description="train adapters, with the model itself frozen (docs/lora.md)")
    packing: Packing = Field(
        Packing.TREE, strict=False, description="how steps share tokens in the forward pass; affects only cost"
    )
    sharing: Sharing = Field(
        Sharing.GROUP, strict=False, description="scope of shared prefixes in 'tree' packing; affects only cost"
    )
    max_tokens_per_microbatch: int = Field(
        8192, ge=1, description="maximum tokens per forward pass, with those of a trained tower; affects only cost"
    )
    precision: Literal["float32", "bfloat16", "bfloat16_pure"] | None = Field(
        None,
        description="precision of forward passes; weights, optimizer stay float32. bfloat16: autocast. bfloat16_pure: "
        "also norms and residuals, which halves the data that several ranks gather; with lora also the model's own "
        "weights. Default: float32; on a GPU bfloat16, with lora bfloat16_pure",
    )
    vision: Literal["frozen", "train"] = Field(
        "frozen",
        description="the part of a model that sees images: frozen, or trained, and then published and saved, too",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    routing_replay: bool = Field(
        False,
        description="mixture of experts: train each sampled token through the engine's choice of experts",
    )
    threads: int | None = Field(
        None, ge=1, description="torch threads; default: OMP_NUM_THREADS, else the cores, but 1 for a small model"
    )

    @model_validator(mode="after")
    def _adapters_leave_the_tower(self) -> TrainingConfig:
        if self.lora is not None and self.trains_tower:
            raise ValueError("training.lora adapts the language model alone; leave training.vision out")
        return self

    @property
    def trains_tower(self) -> bool:
        """Return whether the part that sees images is trained."""
        return self.vision == "train"

    @property
    def updates_between_publications(self) -> int:
        """Return the number of optimizer updates per batch, after which weights are published."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def groups_per_batch(self) -> int:
        """Groups trained between two weight publications."""
        return self.tasks_per_update * self.updates_per_batch

    def least_graded(self, by_group: bool) -> int:
        """Return the number of graded attempts a group needs: by default 2 with a group baseline, otherwise 1.

        by_group: whether the advantage compares them.
        """
        return self.min_group_size or (min(2, self.group_size) if by_group else 1)


class LearnerPlacement(Config):
    """Configures processes that together train one model."""

    ranks: int = Field(1, ge=1, description="processes, each with a part of the weights")
    replicas: int = Field(1, ge=1, description="copies of the model, each spread over ranks / replicas processes")
    loading: Literal["broadcast", "sharded"] = Field(
        "broadcast",
        description="broadcast by the first rank, or sharded: each rank reads its own parts",
    )

    @model_validator(mode="after")
    def _replicas_divide_ranks(self) -> LearnerPlacement:
        if self.ranks % self.replicas or (self.replicas > 1 and self.ranks == self.replicas):
            raise ValueError(
                f"{self.ranks} ranks cannot hold {self.replicas} copies of the model over several ranks each; "
                "make ranks a multiple of replicas, at least twice as many"
            )
        if self.ranks == 1 and self.loading == "sharded":
            raise ValueError("loading 'sharded' is for several ranks; make ranks 2 or more, or leave it out")
        return self


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Picklable recipe of a trainer, so that each of several processes can create its own.

    updates: optimizer updates of the whole run, for schedules. max_staleness: 0 if nothing is sampled during training.
    traced_groups: share of groups with traces in results. longest_call: maximum length of prompt and completion, in
    tokens.
    device: device of each rank, by torch's name. began: date of the run, for templates that write dates.
    reference: directory of `algorithm.kl.model`. teacher: model that `algorithm.distillation.teacher` names.
    """

    model: ModelConfig
    training: TrainingConfig
    algorithm: AlgorithmConfig
    warm_start: WarmStartConfig | None
    updates: int
    max_staleness: int
    seed: int
    placement: LearnerPlacement
    traced_groups: float
    longest_call: int
    device: str = "cpu"
    began: datetime | None = None
    reference: str | None = None
    teacher: OtherModelConfig | None = None


def check_algorithm(algorithm: AlgorithmConfig, training: TrainingConfig, filtered_sampling: bool = False) -> None:
    """Raise ConfigError for an invalid algorithm, or one that has no effect in this training."""
    check(algorithm, filtered_sampling)
    name = algorithm.advantage
    if training.group_size == 1 and estimators.needs_group(algorithm):
        raise ConfigError(
            f"training.group_size is 1, but algorithm.advantage {name!r} compares the trajectories of a group; "
            "raise it to 2 or more, or choose reinforce++"
        )
