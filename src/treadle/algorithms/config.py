"""The `algorithm` section of a configuration. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from treadle.core.config import Config

Scope = Literal["trajectory", "step"]
NonNegative = Annotated[float, Field(ge=0)]
MOST_PROBABLE = 20  # of centered_scores: top_k; what vLLM's servers return by default
_ALL = 2**31 - 1


class NormConfig(Config):
    """Options of advantage grpo."""

    norm_by_std: bool = Field(True, description="divide by the group's standard deviation (false: Dr. GRPO)")


class DiscountConfig(Config):
    """Options of advantage reinforce++, which discounts returns."""

    gamma: float = Field(1.0, gt=0, le=1, description="discount per step or segment, or trained token (reinforce++)")


class StepReturnConfig(DiscountConfig):
    """Options of advantage step_return, discounted per step or segment."""

    scope: Literal["step", "segment"] = Field(
        "step", description="unit that shares a return; compactions separate segments"
    )


class GigpoConfig(NormConfig, DiscountConfig):
    """Options of advantage gigpo, discounted per step."""

    weight: float = Field(1.0, ge=0, description="weight of the step advantage")


class ForksConfig(Config):
    """Options of advantage forks."""

    baseline: Literal["fork", "tree"] = Field(
        "fork", description="compare a branch with the others at its fork, or with the group's other trees"
    )


class GaeConfig(DiscountConfig):
    """Options of advantage gae, discounted per trained token."""

    gae_lambda: float = Field(1.0, ge=0, le=1, description="decay of later errors")


class PpoClipConfig(Config):
    """Options of policy_loss ppo_clip."""

    eps_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - eps_low")
    eps_high: float = Field(0.28, gt=0, description="the ratio is clipped above 1 + eps_high")
    dual_clip: float | None = Field(None, gt=1, description="cap of the ratio for negative advantages")

    @property
    def bounds(self) -> tuple[float, float, float | None]:
        """Return (eps_low, eps_high, dual_clip), the order in which `ppo_clip` takes them."""
        return self.eps_low, self.eps_high, self.dual_clip


class GspoConfig(Config):
    """Options of policy_loss gspo."""

    eps_low: float = Field(3e-4, gt=0, lt=1, description="the unit's ratio is clipped below 1 - eps_low")
    eps_high: float = Field(4e-4, gt=0, description="the unit's ratio is clipped above 1 + eps_high")
    scope: Scope = Field("trajectory", description="unit whose tokens share one ratio")


class CispoConfig(Config):
    """Options of policy_loss cispo."""

    eps_low: float = Field(1.0, gt=0, le=1, description="the weight is at least 1 - eps_low (1: no lower bound)")
    eps_high: float = Field(4.0, gt=0, description="the weight is at most 1 + eps_high")


class SapoConfig(Config):
    """Options of policy_loss sapo."""

    tau_positive: float = Field(1.0, gt=0, description="steepness of the gate where the advantage is positive")
    tau_negative: float = Field(1.05, gt=0, description="steepness of the gate elsewhere")


class DppoConfig(Config):
    """Options of policy_loss dppo."""

    divergence: Literal["tv", "kl"] = Field("tv", description="total variation or KL, of the token against all others")
    delta: float = Field(0.15, gt=0, description="largest divergence from the sampling policy")


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not 0 <= low < 1 < high:
        raise ValueError(f"bounds of a ratio must be 0 <= low < 1 < high, for example [0.5, 2.0]; got [{low}, {high}]")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]


class CorrectionConfig(Config):
    """Corrections by rho = exp(logp_old - logp_rollout), learner's policy over the engine's; all off by default."""

    token_tis: float | None = Field(None, ge=1, description="weigh each token by min(rho, this)")
    sequence_tis: float | None = Field(None, ge=1, description="weigh each unit by min(product of its rho, this)")
    token_mask: Bounds | None = Field(None, description="[low, high]: leave out tokens with rho outside (IcePop)")
    geometric_mask: Bounds | None = Field(
        None, description="[low, high]: leave out units with a geometric mean of rho outside"
    )
    product_mask: Bounds | None = Field(None, description="[low, high]: leave out units with a product of rho outside")
    outlier_mask: Bounds | None = Field(None, description="[low, high]: leave out units with any token's rho outside")
    scope: Scope = Field("trajectory", description="unit of the sequence-level corrections")
    renormalize: bool = Field(False, description="take the reduction's denominators over the tokens kept")

    @property
    def active(self) -> bool:
        """Return whether any correction is on."""
        return self.weighs or self.masks

    @property
    def weighs(self) -> bool:
        """Return whether policy losses are weighted by a ratio."""
        return self.token_tis is not None or self.sequence_tis is not None

    @property
    def masks(self) -> bool:
        """Return whether any mask leaves out tokens."""
        masks = (self.token_mask, self.geometric_mask, self.product_mask, self.outlier_mask)
        return any(mask is not None for mask in masks)

    @property
    def by_unit(self) -> bool:
        """Return whether any correction works per unit, so that `scope` matters."""
        units = (self.sequence_tis, self.geometric_mask, self.product_mask, self.outlier_mask)
        return any(option is not None for option in units)

    @property
    def couples(self) -> bool:
        """Return whether a token's weight depends on other tokens' log-probabilities."""
        return self.by_unit or (self.renormalize and self.masks)


class KlConfig(Config):
    """Configures the KL divergence from a reference model, and its coefficient."""

    coef: float = Field(gt=0, description="coefficient; with a target, the first one")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="estimator of KL for each token")
    where: Literal["loss", "reward"] = Field(
        "loss", description="added to the loss, or subtracted from the tokens' rewards"
    )
    target: float | None = Field(None, gt=0, description="mean KL per token to steer the coefficient towards")
    horizon: float = Field(10000.0, gt=0, description="approximate number of trajectories for steering")
    model: str | None = Field(
        None, description="name of the reference model in `models`; default: the trained model before RL"
    )
    reset_every: int | None = Field(
        None, ge=1, description="updates between copies of the policy to the reference; null: never"
    )


class DistillationConfig(Config):
    """Configures on-policy distillation: a teacher scores each trained sampled token."""

    teacher: str | None = Field(
        None,
        description="name of the teacher in `models`, a directory or a vLLM server, with the model's token ids; null: "
        "the policy itself, with a context",
    )
    context: str | None = Field(
        None, description="module:function that builds the teacher's prompts; null: the policy's own prompt"
    )
    weights: Literal["current", "start", "ema"] = Field(
        "current", description="without teacher: the current policy, the policy before RL, or its moving average"
    )
    ema_decay: float = Field(0.99, ge=0, lt=1, description="decay of the moving average per update")
    coef: NonNegative | tuple[NonNegative, NonNegative] = Field(
        1.0, description="weight of the teacher's term; or [from, to], linearly over the run"
    )
    form: Literal["advantage", "loss", "reverse_top_k", "forward_top_k", "turns"] = Field(
        "advantage",
        description="learning signal: the log-ratio of teacher to policy, added to each token's advantage, or half its "
        "square, added to its loss; KL over the teacher's most probable tokens; or a reward for each turn, by how "
        "probable the teacher then finds the ground truth (docs/teachers.md)",
    )
    target: str | None = Field(
        None, description="turns: module:function from a task to the text scored; null: its ground truth, a string"
    )
    repaid: bool = Field(
        True, description="turns: an attempt's last turn pays back what the others were given; false: TRACE, biased"
    )
    top_k: int = Field(32, ge=1, description="number of these tokens for reverse_top_k and forward_top_k")
    rewards: NonNegative = Field(1.0, description="weight of the advantage from rewards; 0: teacher only")

    @property
    def coefs(self) -> tuple[float, float]:
        """Return the weight at the first update and after the last one."""
        return self.coef if isinstance(self.coef, tuple) else (self.coef, self.coef)

    @property
    def by_top_k(self) -> bool:
        """Return whether the teacher's most probable tokens are compared, instead of the sampled one only."""
        return self.form in ("reverse_top_k", "forward_top_k")


class ValueConfig(Config):
    """Configures the value head of an advantage that needs one; it is trained together with the policy."""

    coef: float = Field(0.5, gt=0, description="coefficient of the value loss, half the squared error")
    clip: float | None = Field(None, gt=0, description="clip range of values around the values at the batch's start")


class AlgorithmConfig(Config):
    """Configures how rewards become a loss: advantage, policy loss, corrections, KL, teacher and reduction."""

    advantage: str = Field("grpo", description="advantage estimator: a registered name or module:attribute")
    advantage_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the advantage: {norm_by_std: false} (docs/algorithms.md)"
    )
    value: ValueConfig = Field(ValueConfig(), description="the value head (gae)")
    policy_loss: str = Field("ppo_clip", description="loss of each token: a registered name or module:attribute")
    policy_loss_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the loss: {eps_high: 0.28} (docs/algorithms.md)"
    )
    correction: CorrectionConfig = Field(CorrectionConfig(), description="off-policy corrections")
    kl: KlConfig | None = Field(None, description="KL from a reference model; null: none")
    distillation: DistillationConfig | None = Field(None, description="learning from a teacher; null: none")
    centered_scores: Literal["off", "support", "top_k", "vocabulary"] = Field(
        "off",
        description="subtract the score expected of the sampler, which drifts when stale or quantized: over what a "
        "filter left, its 20 most probable tokens with the rest as one, or all tokens (docs/algorithms.md)",
    )
    reduction: Literal["token_mean", "trajectory_mean", "step_mean", "task_mean", "seq_mean_token_sum_norm"] = Field(
        "token_mean", description="how token losses are averaged"
    )
    scope: Scope = Field("trajectory", description="unit of seq_mean_token_sum_norm")
    length_norm: float | None = Field(None, gt=0, description="constant of seq_mean_token_sum_norm, in tokens")
    entropy_coef: NonNegative | tuple[NonNegative, NonNegative] = Field(
        0.0, description="entropy bonus, linearly from this to 0 by the end of the run; or [from, to]"
    )

    dynamic_sampling: Literal["off", "filter", "replace"] = Field(
        "off",
        description="groups with all advantages 0: off keeps them, filter samples replacements, replace gives their "
        "weight to the other groups of the update",
    )

    @property
    def recorded_probabilities(self) -> int | None:
        """Return how many most probable tokens need the sampler's probabilities recorded; None: none."""
        return {"off": None, "top_k": MOST_PROBABLE}.get(self.centered_scores, _ALL)

    @property
    def entropy_bonus(self) -> tuple[float, float]:
        """Return the entropy bonus at the first update and after the last one."""
        return self.entropy_coef if isinstance(self.entropy_coef, tuple) else (self.entropy_coef, 0.0)

    @model_validator(mode="after")
    def _length_norm_where_needed(self) -> AlgorithmConfig:
        if (self.reduction == "seq_mean_token_sum_norm") != (self.length_norm is not None):
            raise ValueError(
                f"length_norm is {self.length_norm} with reduction {self.reduction}: "
                "seq_mean_token_sum_norm needs it (for example the longest expected response), the others have none"
            )
        return self
