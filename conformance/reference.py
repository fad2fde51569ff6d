"""What must come out of a case, in plain numpy.

A case is a dictionary as `schema.json` describes it: groups of attempts at one task each, attempts of recorded calls of
the model (steps) in call order. Everything below is defined on (attempt, step, token). No definition mentions a row, a
merged sequence, padding or a micro-batch: how a trainer lays tokens out must not change any number.

    trained tokens   the tokens that the model sampled and the mask admits, of attempts that have a reward
    old              the log-probability that the engine reported for exactly that token when it sampled it
    advantages       grpo, grpo_no_std, rloo: one number per attempt; step_return: one number per step
    weights          of each trained token under a reduction; loss = sum of weight * token loss
    loss, gradient   of a tiny linear model, see `features`

Attempts are numbered through all groups, steps within their attempt, tokens within their completion.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Case = dict[str, Any]
Doubles = NDArray[np.float64]

ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "step_return")
REDUCTIONS = ("token_mean", "trajectory_mean", "task_mean", "sum_norm")
EPSILON = 1e-6  # beside the standard deviation


class Attempt(NamedTuple):
    """One attempt. number: among all attempts of the case. group: its group. reward: float, or None if it failed."""

    number: int
    group: int
    reward: Any
    steps: list[dict[str, Any]]


class Token(NamedTuple):
    """A trained token: its place, its id, and its log-probability as reported when it was sampled."""

    attempt: int
    step: int
    token: int
    id: int
    old: float


def attempts(case: Case) -> list[Attempt]:
    """Return all attempts in order, graded or not."""
    made: list[Attempt] = []
    for g, group in enumerate(case["groups"]):
        for attempt in group:
            made.append(Attempt(len(made), g, attempt["reward"], attempt["steps"]))
    return made


def graded(case: Case) -> list[Attempt]:
    """Return the attempts that have a reward. One that failed enters no baseline, no count and no loss."""
    return [attempt for attempt in attempts(case) if attempt.reward is not None]


# Trained tokens


def trained_tokens(case: Case) -> list[Token]:
    """Return the trained tokens in canonical order.

    A token is trained if the model sampled it, its mask is true, and the episode used the step. Never trained are: the
    prompt, whatever stands in it (earlier replies in any form, observations, end tokens that the template wrote);
    replies that were discarded; and attempts without a reward.
    """
    found = []
    for attempt in graded(case):
        for s, step in enumerate(attempt.steps):
            if step["discarded"]:
                continue
            ids, old, mask = step["completion"], step["logprobs"], step["mask"]
            for t in range(len(ids)):
                if mask[t]:
                    found.append(Token(attempt.number, s, t, ids[t], old[t]))
    return found


def context(case: Case, token: Token) -> list[int]:
    """Return the ids that the model had read when it sampled this token: the step's prompt, then its own reply."""
    step = attempts(case)[token.attempt].steps[token.step]
    return [*step["prompt"], *step["completion"][: token.token]]


# Advantages


def by_group(case: Case) -> list[list[Attempt]]:
    """Return the graded attempts of each group."""
    return [[a for a in graded(case) if a.group == g] for g in range(len(case["groups"]))]


def grpo(case: Case, norm_by_std: bool = True) -> dict[int, float]:
    """Return attempt -> (R - mean) / (std + 1e-6) over its group's graded attempts, std unbiased.

    Exactly 0 if all rewards of a group are equal, or there is only one. Without `norm_by_std`: R - mean.
    """
    advantage: dict[int, float] = {}
    for members in by_group(case):
        rewards = np.array([a.reward for a in members])
        equal = len(members) < 2 or rewards.min() == rewards.max()
        for a in members:
            centered = 0.0 if equal else a.reward - rewards.mean()
            advantage[a.number] = centered / (rewards.std(ddof=1) + EPSILON) if norm_by_std and not equal else centered
    return advantage


def rloo(case: Case) -> dict[int, float]:
    """Return attempt -> R less the mean reward of the other graded attempts of its group; 0 for a group of one."""
    advantage: dict[int, float] = {}
    for members in by_group(case):
        for a in members:
            others = [b.reward for b in members if b.number != a.number]
            advantage[a.number] = a.reward - float(np.mean(others)) if others else 0.0
    return advantage


def main_steps(attempt: Attempt) -> list[int]:
    """Return the steps that the episode used and that are no sub-agent's, in call order."""
    return [s for s, step in enumerate(attempt.steps) if not step["discarded"] and step["caller"] is None]


def owner(attempt: Attempt, step: int) -> int:
    """Return the main step that a step belongs to: itself, or the one that called its sub-agent."""
    caller = attempt.steps[step]["caller"]
    return step if caller is None else int(caller)


def paid(attempt: Attempt) -> Doubles:
    """Return the reward of each main step.

    A sub-agent's reward is paid to the step that called it. What the attempt's reward exceeds the steps' by belongs to
    the last step that the episode used. Steps that are not trained still earn.
    """
    used = [s for s, step in enumerate(attempt.steps) if not step["discarded"]]
    earned = {s: float(attempt.steps[s]["reward"]) for s in used}
    if used:
        earned[used[-1]] += attempt.reward - sum(earned.values())
    total = dict.fromkeys(main_steps(attempt), 0.0)
    for s in used:
        total[owner(attempt, s)] += earned[s]
    return np.array(list(total.values()))


def returns(rewards: Doubles, gamma: float) -> Doubles:
    """Return G_t = r_t + gamma G_{t+1}."""
    togo = np.zeros(len(rewards))
    running = 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running
        togo[t] = running
    return togo


def step_return(case: Case) -> dict[tuple[int, int], float]:
    """Return (attempt, main step) -> return to go less a baseline of the group's other graded attempts.

    The t-th main step is compared with the mean G_t of the others that reached their t-th one. If none did, the
    baseline is their mean G_0 less what this attempt had earned before: A = (1 - gamma^t) G_t + G_0 - mean G_0.
    The discount counts main steps. A group of one gets 0.
    """
    gamma = case["gamma"]
    advantage: dict[tuple[int, int], float] = {}
    for members in by_group(case):
        togo = {a.number: returns(paid(a), gamma) for a in members}
        first = {a.number: togo[a.number][0] if len(togo[a.number]) else a.reward for a in members}
        for a in members:
            others = [b.number for b in members if b.number != a.number]
            for t, s in enumerate(main_steps(a)):
                here = togo[a.number][t]
                peers = [togo[b][t] for b in others if len(togo[b]) > t]
                if not others:
                    value = 0.0
                elif peers:
                    value = here - float(np.mean(peers))
                else:
                    value = (1 - gamma**t) * here + first[a.number] - float(np.mean([first[b] for b in others]))
                advantage[a.number, s] = float(value)
    return advantage


def token_advantages(case: Case, name: str, tokens: list[Token]) -> Doubles:
    """Return the advantage of each trained token; a sub-agent's tokens take that of the step which called it."""
    if name == "step_return":
        by_step, everyone = step_return(case), attempts(case)
        return np.array([by_step[t.attempt, owner(everyone[t.attempt], t.step)] for t in tokens])
    by_attempt = rloo(case) if name == "rloo" else grpo(case, norm_by_std=name == "grpo")
    return np.array([by_attempt[t.attempt] for t in tokens])


# Weights


def token_weights(case: Case, reduction: str, tokens: list[Token]) -> Doubles:
    """Return the weight of each trained token. Units without a trained token do not count.

    token_mean        1 / number of trained tokens of the whole update
    trajectory_mean   1 / (attempts * trained tokens of the token's attempt): a mean over attempts of means over tokens
    task_mean         1 / (groups * trained tokens of the token's group)
    sum_norm          1 / (attempts * length_norm): a mean over attempts of sums over tokens, divided by a constant
    """
    group_of = {a.number: a.group for a in attempts(case)}
    if reduction == "token_mean":
        return np.full(len(tokens), 1.0 / max(len(tokens), 1))
    units = [group_of[t.attempt] if reduction == "task_mean" else t.attempt for t in tokens]
    count = {unit: units.count(unit) for unit in units}
    if reduction == "sum_norm":
        return np.array([1.0 / (len(count) * case["length_norm"]) for _ in tokens])
    return np.array([1.0 / (len(count) * count[unit]) for unit in units])


# Loss and gradient of a tiny linear model

VOCABULARY, WIDTH = 24, 3


@cache
def embedding() -> Doubles:
    """Return E [V, D], fixed."""
    v, d = np.meshgrid(np.arange(VOCABULARY), np.arange(WIDTH), indexing="ij")
    return np.asarray(np.sin(0.7 * (v + 1) * (d + 1)), np.float64)


@cache
def head() -> Doubles:
    """Return W [V, D], the only trained weights."""
    v, d = np.meshgrid(np.arange(VOCABULARY), np.arange(WIDTH), indexing="ij")
    return 0.5 * np.cos(1.1 * (v + 1) + 0.5 * d)


def features(ids: list[int]) -> Doubles:
    """Return h [T, D], the state after each token: x_t + mean of x_0 .. x_t, where x_t = (1 + t / 8) E[id_t].

    Logits of the next token are W h_t. So the state depends on every token before it and on where it stands.
    """
    place = np.arange(len(ids), dtype=np.float64)[:, None]
    x = (1 + place / 8) * embedding()[np.array(ids, np.int64)]
    return x + np.cumsum(x, axis=0) / (place + 1)


def log_softmax(logits: Doubles) -> Doubles:
    """Return log-probabilities [V]."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def token_losses(
    contexts: list[list[int]], ids: list[int], old: Doubles, advantage: Doubles
) -> tuple[Doubles, Doubles]:
    """Return the loss of each token [N] and its gradient by W [N, V, D].

    l_i = -A_i r_i with r_i = exp(log pi(id_i | context_i) - old_i), so that dl_i/dW = l_i (onehot(id_i) - pi_i) h_i^T.
    """
    losses, gradients = np.zeros(len(ids)), np.zeros((len(ids), VOCABULARY, WIDTH))
    for i, before in enumerate(contexts):
        h = features(before)[-1]
        logp = log_softmax(head() @ h)
        losses[i] = -advantage[i] * np.exp(logp[ids[i]] - old[i])
        direction = -np.exp(logp)
        direction[ids[i]] += 1.0
        gradients[i] = losses[i] * np.outer(direction, h)
    return losses, gradients


def reduced(weight: Doubles, losses: Doubles, gradients: Doubles) -> tuple[float, Doubles]:
    """Return the loss, sum_i w_i l_i, and its gradient by W [V, D]."""
    return float(weight @ losses), np.tensordot(weight, gradients, 1)


LOSS_ADVANTAGE = "grpo_no_std"  # of the loss and the gradient


def expected(case: Case) -> dict[str, Any]:
    """Return all that must come out, as `schema.json` describes it."""
    tokens = trained_tokens(case)
    advantage = {name: token_advantages(case, name, tokens) for name in ADVANTAGES}
    weight = {name: token_weights(case, name, tokens) for name in REDUCTIONS}
    contexts, ids = [context(case, t) for t in tokens], [t.id for t in tokens]
    old = np.array([t.old for t in tokens])
    trained = {(t.attempt, t.step, t.token) for t in tokens}
    each = token_losses(contexts, ids, old, advantage[LOSS_ADVANTAGE])
    both = {name: reduced(weight[name], *each) for name in REDUCTIONS}
    return {
        "tokens": [[t.attempt, t.step, t.token] for t in tokens],
        "old": old.tolist(),
        "masks": [
            [[(a.number, s, t) in trained for t in range(len(step["completion"]))] for s, step in enumerate(a.steps)]
            for a in attempts(case)
        ],
        "advantages": {name: values.tolist() for name, values in advantage.items()},
        "weights": {name: values.tolist() for name, values in weight.items()},
        "loss": {name: loss for name, (loss, _) in both.items()},
        "gradient": {name: gradient.tolist() for name, (_, gradient) in both.items()},
    }
