"""On-policy distillation: a teacher scores each token sampled by the policy; the objective is the reverse KL to it.

    d = logp - logp_teacher of a token that the policy sampled; its mean over samples is KL(policy || teacher)

Shapes: tensors [N] in, [N] out; k most probable tokens of the teacher.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treadle.packing.flat import Doubles, Indices


def distilled(advantage: Tensor, logp_old: Tensor, logp_teacher: Tensor | None, coef: float, rewards: float) -> Tensor:
    """Return rewards * advantage + coef * (logp_teacher - logp_old), the second term only with log-probabilities.

    Each token is credited only with its own -d, not with those after it, unlike a penalty in the reward.
    Source: Lu and Thinking Machines Lab 2025, "On-policy distillation"; the objective: Gu et al. 2024, "MiniLLM", and
    Agarwal et al. 2024, "GKD" (on-policy data, reverse KL).
    """
    weighted = rewards * advantage
    return weighted if logp_teacher is None else weighted + coef * (logp_teacher - logp_old)


def turn_credit(known: Doubles, trajectory: Indices, repaid: bool) -> Doubles:
    """Return what each turn adds to the log-probability of the ground truth: c_t = known_{t+1} - known_t.

    known float64[K]: a frozen model's log-probability of the ground truth in the state before each step; trajectory
    int64[K]. repaid: a trajectory's last step has c = -known, so that its credits sum to -known_0, which is the same
    for all attempts at a task: potential-based shaping (Ng, Harada and Russell 1999, "Policy invariance under reward
    transformations"). Otherwise it has 0, and the sum rewards how much the attempt got to know.
    Source: TRACE, arXiv 2607.13988.
    """
    ends = np.append(trajectory[1:] != trajectory[:-1], True)[: len(known)]
    after = np.append(known[1:], 0.0)[: len(known)]
    return np.where(ends, 0.0 if repaid else known, after) - known


def top_k_divergence(logp: Tensor, logp_teacher: Tensor, reverse: bool) -> Tensor:
    """Return KL(policy || teacher) if reverse, else KL(teacher || policy), [N], over k + 1 outcomes.

    logp, logp_teacher [N, k]: log-probabilities of the teacher's k most probable tokens; "any other token" is the last
    outcome; -inf in both is none. The result is at least 0, at most the KL of the whole distributions, and equal to it
    if k is the vocabulary.
    """
    policy, teacher = _with_rest(logp), _with_rest(logp_teacher)
    of, to = (policy, teacher) if reverse else (teacher, policy)
    return (of.exp() * (of - to)).sum(-1)


def _with_rest(logp: Tensor) -> Tensor:
    limits, rest = torch.finfo(logp.dtype), 1 - logp.exp().sum(-1, keepdim=True)
    return torch.cat([logp.clamp(min=limits.min), rest.clamp(min=limits.eps).log()], -1)
