"""On-policy distillation: a teacher scores each token that the policy sampled; the reverse KL to it is the lesson.

    d = logp - logp_teacher of a token that the policy sampled; its mean over samples is KL(policy || teacher)

Shapes: tensors [N] in, [N] out.
"""

from __future__ import annotations

from torch import Tensor


def distilled(advantage: Tensor, logp_old: Tensor, logp_teacher: Tensor | None, coef: float, rewards: float) -> Tensor:
    """Return rewards * advantage + coef * (logp_teacher - logp_old), the second term only with log-probabilities.

    Each token is credited with its own -d alone, not with that of later tokens, as a penalty in the reward would be.
    Source: Lu and Thinking Machines Lab 2025, "On-policy distillation"; the objective: Gu et al. 2024, "MiniLLM", and
    Agarwal et al. 2024, "GKD" (on-policy data, reverse KL).
    """
    weighted = rewards * advantage
    return weighted if logp_teacher is None else weighted + coef * (logp_teacher - logp_old)
