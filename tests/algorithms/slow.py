"""Slow, obvious float64 references, written from the formulas: plain Python, one number at a time.

A batch is a list of groups, a group a list of trajectories, a trajectory (or None for a failed one) a list of steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

Values = list[float]


@dataclass
class SlowStep:
    """Per token: whether it is trained, and what the loss may use."""

    mask: list[bool]
    reward: float = 0.0
    state: int = 0
    values: Values = field(default_factory=list)
    token_rewards: Values = field(default_factory=list)
    given: Values = field(default_factory=list)  # the part of `reward` that single tokens were given
    opens: bool = False  # a segment: it goes on from a summary
    caller: int | None = None  # of a sub-agent's step: the step of the main branch that called it


@dataclass
class SlowTrajectory:
    """Its reward is the sum of its steps' unless it has none."""

    steps: list[SlowStep]
    reward: float


SlowGroup = list[SlowTrajectory]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def equal(values: Sequence[float]) -> bool:
    return max(values) == min(values)


# Advantages: of one group's rewards


def grpo(rewards: Values, norm_by_std: bool) -> Values:
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / (std(rewards) + 1e-6 if norm_by_std else 1.0) for r in rewards]


def rloo(rewards: Values) -> Values:
    if equal(rewards):
        return [0.0] * len(rewards)
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def maxrl(rewards: Values) -> Values:
    if equal(rewards):
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / mean(rewards) for r in rewards]


def discounted(rewards: Values, gamma: float) -> float:
    return math.fsum(gamma**k * r for k, r in enumerate(rewards))


def main_branch(group: SlowGroup) -> SlowGroup:
    """The group without sub-agents' steps, whose rewards go to the steps that called them."""
    found = []
    for t in group:
        rewards = [
            math.fsum(o.reward for j, o in enumerate(t.steps) if k in (j, o.caller)) for k in range(len(t.steps))
        ]
        main = [replace(s, reward=r) for s, r in zip(t.steps, rewards, strict=True) if s.caller is None]
        found.append(SlowTrajectory(main, t.reward))
    return found


def for_all_steps(group: SlowGroup, main: list[Values]) -> list[Values]:
    """From values of main branches to values of all steps: a sub-agent's are those of the step that called it."""
    found = []
    for t, own in zip(group, main, strict=True):
        of_main = dict(zip([k for k, s in enumerate(t.steps) if s.caller is None], own, strict=True))
        found.append([of_main[k if s.caller is None else s.caller] for k, s in enumerate(t.steps)])
    return found


def by_segment(group: SlowGroup) -> SlowGroup:
    """The group with each segment of a trajectory as one step, which is given what its steps were."""
    found = []
    for t in group:
        parts: list[list[SlowStep]] = []
        for step in t.steps:
            if step.opens or not parts:
                parts.append([])
            parts[-1].append(step)
        steps = [replace(part[0], reward=math.fsum(step.reward for step in part)) for part in parts]
        found.append(SlowTrajectory(steps, t.reward))
    return found


def segment_return(group: SlowGroup, gamma: float) -> list[Values]:
    """For each trajectory, for each step: the `step_return` of its segment."""
    found = []
    for t, values in zip(group, step_return(by_segment(group), gamma), strict=True):
        numbers = [sum(step.opens for step in t.steps[1 : k + 1]) for k in range(len(t.steps))]
        found.append([values[n] for n in numbers])
    return found


def step_return(group: SlowGroup, gamma: float) -> list[Values]:
    """For each trajectory, for each step."""

    def togo(t: SlowTrajectory, index: int) -> float:
        return discounted([s.reward for s in t.steps[index:]], gamma)

    def whole(t: SlowTrajectory) -> float:
        return togo(t, 0) if t.steps else t.reward

    found = []
    for i, own in enumerate(group):
        others = group[:i] + group[i + 1 :]
        found.append([0.0] * len(own.steps))
        for index in range(len(own.steps) if others else 0):
            reached = [togo(o, index) for o in others if len(o.steps) > index]
            if index == 0:
                baseline = mean([whole(o) for o in others])
            elif reached:
                baseline = mean(reached)
            else:
                so_far = discounted([s.reward for s in own.steps[:index]], gamma)
                baseline = mean([whole(o) for o in others]) - so_far
            found[-1][index] = togo(own, index) - baseline
    return found


def gigpo(group: SlowGroup, gamma: float, weight: float, norm_by_std: bool) -> list[Values]:
    episode = grpo([t.reward for t in group], norm_by_std)
    met: dict[int, list[tuple[int, int, float]]] = {}
    for i, t in enumerate(group):
        for k, s in enumerate(t.steps):
            togo = discounted([later.reward for later in t.steps[k:]], gamma)
            met.setdefault(s.state, []).append((i, k, togo))
    found = [[episode[i]] * len(t.steps) for i, t in enumerate(group)]
    for places in met.values():
        for (i, k, _), a in zip(places, grpo([g for *_, g in places], norm_by_std), strict=True):
            found[i][k] += weight * a
    return found


# Advantages: of a whole update, by token


def trained(t: SlowTrajectory) -> list[tuple[int, int]]:
    return [(k, n) for k, s in enumerate(t.steps) for n, m in enumerate(s.mask) if m]


def paid(t: SlowTrajectory) -> Values:
    """For each trained token: what was paid from it on, before the next trained token, and its own penalty."""
    places = trained(t)
    found = []
    for i, (k, n) in enumerate(places):
        reward = t.steps[k].token_rewards[n]
        following = places[i + 1][0] if i + 1 < len(places) else len(t.steps)
        reward += math.fsum(s.reward - math.fsum(s.given) for s in t.steps[k:following])
        until = places[i + 1] if i + 1 < len(places) else (len(t.steps), 0)
        everywhere = [(j, m, g) for j, s in enumerate(t.steps) for m, g in enumerate(s.given)]
        reward += math.fsum(g for j, m, g in everywhere if (k, n) <= (j, m) < until)
        found.append(reward)
    return found


def sources(t: SlowTrajectory) -> list[int]:
    """For each trained token, by its number among them, the one whose return it takes."""
    places = trained(t)
    found = []
    for i, (k, _) in enumerate(places):
        caller = t.steps[k].caller
        main = [
            j for j, (m, _) in enumerate(places) if t.steps[m].caller is None and caller is not None and m <= caller
        ]
        found.append(main[-1] if main else i)
    return found


def paid_on_path(t: SlowTrajectory) -> dict[int, float]:
    """By number, the trained tokens that take their own return, and what was paid to them and for them."""
    rewards, source = paid(t), sources(t)
    return {
        i: math.fsum(r for r, s in zip(rewards, source, strict=True) if s == i) for i, s in enumerate(source) if s == i
    }


def reinforce_plus_plus(groups: list[SlowGroup], gamma: float) -> Values:
    """For each trained token of the update."""
    togo = []
    for t in (t for group in groups for t in group):
        path = paid_on_path(t)
        found = {i: discounted(list(path.values())[n:], gamma) for n, i in enumerate(path)}
        togo += [found[i] for i in sources(t)]
    return grpo(togo, norm_by_std=True) if togo else []


def reinforce_plus_plus_baseline(groups: list[SlowGroup]) -> Values:
    centred: list[float | None] = []
    for group in groups:
        rewards = [t.reward for t in group]
        for t in group:
            centred += [None if equal(rewards) else t.reward - mean(rewards)] * len(trained(t))
    used = [c for c in centred if c is not None]
    white = iter(grpo(used, norm_by_std=True) if used else [])
    return [0.0 if c is None else next(white) for c in centred]


def gae(t: SlowTrajectory, gamma: float, decay: float) -> Values:
    """For each trained token of a trajectory, from the sum of discounted errors."""
    everyone, path = [t.steps[k].values[n] for k, n in trained(t)], paid_on_path(t)
    values, rewards = [everyone[i] for i in path], list(path.values())
    deltas = [r + gamma * (values[i + 1] if i + 1 < len(values) else 0.0) - values[i] for i, r in enumerate(rewards)]
    togo = {i: discounted(deltas[n:], gamma * decay) + everyone[i] for n, i in enumerate(path)}
    return [togo[source] - value for source, value in zip(sources(t), everyone, strict=True)]


# Losses, of one token


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo_clip(new: float, old: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    ratio = math.exp(new - old)
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    return -max(objective, dual * a) if dual is not None and a < 0 else -objective


def cispo_weight(new: float, old: float, low: float, high: float) -> float:
    return clip(math.exp(new - old), 1 - low, 1 + high)


def sapo(new: float, old: float, a: float, positive: float, negative: float) -> float:
    tau = positive if a > 0 else negative
    return -(4 / tau) / (1 + math.exp(-tau * (math.exp(new - old) - 1))) * a


def divergence(new: float, old: float, kind: str) -> float:
    pi, mu = math.exp(new), math.exp(old)
    if kind == "tv":
        return abs(mu - pi)
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def dppo(new: float, old: float, a: float, kind: str, delta: float) -> float:
    away = (a > 0 and new > old) or (a < 0 and new < old)
    return 0.0 if away and divergence(new, old, kind) > delta else -math.exp(new - old) * a


# Over units


def over_unit(values: Values, mask: list[bool], unit: list[int], combine: Callable[[Values], float]) -> Values:
    """`combine` of the trained values of each token's unit; of nothing for a unit without any."""
    return [combine([v for v, m, u in zip(values, mask, unit, strict=True) if m and u == own]) for own in unit]
