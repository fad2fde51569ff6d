"""The learner's metrics of an update, over the trained tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from treadle.core.metrics import Metric, Tally

if TYPE_CHECKING:
    from torch import Tensor

_trained = partial(Metric, view="trained")

# over trainable tokens

LOSS = _trained("loss", "token", "sum", "", "the update's loss: each token's, times its weight")
ENTROPY = _trained("entropy", "token", "mean", "nats", "of the distribution that the token is drawn from")
KL = _trained("kl", "token", "mean", "nats", "from the reference model, by `algorithm.kl.estimator`")
TEACHER_KL = _trained(
    "teacher_kl",
    "token",
    "mean",
    "nats",
    "reverse KL to `algorithm.distillation.teacher`: log-probability less the teacher's, below 0 by chance only",
)
TAUGHT = _trained(
    "taught_fraction", "token", "mean", "share", "scored by the teacher, if `algorithm.distillation.context` is set"
)
TRUTH_LOGPROB = _trained(
    "truth_logprob",
    "step",
    "mean",
    "nats",
    "log-probability that the teacher gives the ground truth before a step, with `algorithm.distillation.form: turns`",
)
RATIO_MEAN = _trained(
    "ratio_mean", "token", "mean", "", "probability before the update / at the start of its batch, if known"
)
RATIO_MAX = _trained("ratio_max", "token", "max", "", "largest such ratio")
RATIO_MIN = _trained("ratio_min", "token", "min", "", "smallest such ratio")
CLIP_FRACTION = _trained("clip_fraction", "token", "mean", "share", "ratio bounded by the policy loss, if it clips")
CORRECTION_MASKED = _trained(
    "correction_masked_fraction", "token", "mean", "share", "left out by `algorithm.correction`, if it is set"
)
CORRECTION_WEIGHT = _trained(
    "correction_weight_mean", "token", "mean", "", "truncated importance ratio of `algorithm.correction`"
)
GAP_MEAN = _trained(
    "logprob_gap_mean",
    "token",
    "mean",
    "nats",
    "log-probability, engine's and learner's at the batch's start: absolute difference, if known",
)
GAP_MAX = _trained("logprob_gap_max", "token", "max", "nats", "largest such difference; near 1e-6 in float32")
GAP_KL = _trained("logprob_gap_kl", "token", "mean", "nats", "KL from the engine's policy to the learner's, by `k3`")
GAP_BY_LAG = _trained(
    "logprob_gap_lag_*", "token", "mean", "nats", "the same difference by versions between sampling and training"
)
TRAINABLE_TOKENS = _trained("trainable_tokens", "token", "sum", "tokens", "sampled tokens that are trained")
TRAINABLE_FRACTION = _trained("trainable_fraction", "token", "mean", "share", "trained, of all sampled tokens")
FORCED_SHARE = _trained(
    "forced_share", "token", "mean", "share", "nothing else could be sampled, by filters or a grammar: without gradient"
)

VALUE_LOSS = _trained("value_loss", "token", "mean", "", "of the value head, if there is one")
VALUE_CLIPPED = _trained(
    "value_clip_fraction", "token", "mean", "share", "held by `algorithm.value.clip`, if it is set"
)

# over trained steps, tasks with a trained token, and the update

SEQUENCES = _trained("sequences", "step", "sum", "sequences", "steps, each of which is a sequence before packing")
LONGEST_ROW = _trained("longest_row", "step", "max", "tokens", "longest sequence, prompt and completion")
ZERO_ADVANTAGE = _trained("zero_advantage_groups", "task", "mean", "share", "no token with an advantage other than 0")
PACKED_SEQUENCES = _trained("packed_sequences", "run", "sum", "sequences", "sequences after packing")
PACKED_TOKENS = _trained("packed_tokens", "run", "sum", "tokens", "tokens computed after packing")
SLOT_BALANCE = _trained(
    "slot_balance", "run", "mean", "share", "computing rather than waiting for the slowest, if there are several ranks"
)
PADDED_PASSES = _trained("padded_passes", "run", "sum", "passes", "that train nothing, if there are several ranks")
LEARNING_RATE = _trained("learning_rate", "run", "mean", "", "of the update")
GRADIENT_NORM = _trained("gradient_norm", "run", "mean", "", "before clipping")
VALUE_EXPLAINED = _trained(
    "value_explained_variance", "run", "mean", "share", "of the returns' variance, by the value head"
)
KL_COEF = _trained("kl_coef", "run", "mean", "", "coefficient of KL, if `algorithm.kl` is set")


def tally(metric: Metric, values: Tensor) -> Tally:
    """Return the metric's tally over values [n], one per token; extremes and sums keep their precision."""
    if not len(values):
        return Tally(metric, 0, 0)
    match metric.aggregation:
        case "max":
            return Tally(metric, float(values.max()), len(values))
        case "min":
            return Tally(metric, float(values.min()), len(values))
        case _:
            return Tally(metric, values.sum().item(), len(values))
