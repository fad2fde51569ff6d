"""Wrong references: each is `reference.py` with one text replaced, a mistake that trainers have made or could make.

Every mutant must give other numbers than expected in some case, and every case must be noticed by some mutant
(tests/test_conformance.py). `python -m conformance.mutants` prints who notices what.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Mutant(NamedTuple):
    """text: what stands in the reference, once. wrong: what takes its place."""

    text: str
    wrong: str


_STEP = """            ids, old, mask = step["completion"], step["logprobs"], step["mask"]
"""
_TOKEN = """                if mask[t]:
"""
_USED = """            if step["discarded"]:
"""
_MADE = """        made.append(Attempt(len(made), g, attempt["reward"], attempt["steps"]))
"""
_KEPT = """
    return [attempt for attempt in attempts(case) if attempt.reward is not None]
"""
_SHOWN = """
            start = len(step["prompt"])
            later = [n["prompt"][start:] for n in attempt.steps[s + 1 :] if n["prompt"][:start] == step["prompt"]]
            shown = [*(later[0] if later else ids)[: len(ids)], *ids[len(later[0]) if later else len(ids) :]]
"""
"""The reply as the first later prompt has it that goes on from this step's."""


def _step(wrong: str) -> Mutant:
    """Change what is read of a step before its tokens are trained."""
    return Mutant(_STEP, _STEP + "            " + wrong + "\n")


def _shown(wrong: str) -> Mutant:
    return Mutant(_STEP, _STEP + _SHOWN + "            " + wrong + "\n")


def _attempt(reward: str = "attempt['reward']", steps: str = "attempt['steps']") -> Mutant:
    """Change what is read of an attempt."""
    return Mutant(_MADE, f"        made.append(Attempt(len(made), g, {reward}, {steps}))\n")


_LAST = "[s for s in attempt['steps'] if not s['discarded']][-1]"

MUTANTS = {
    # which tokens
    "mask shifted by one": _step("mask = [True, *mask[:-1]]; mask[-1:] = [False]"),
    "mask ignored": Mutant(_TOKEN, "                if True:\n"),
    "template's end token trained": _shown(
        "after = [i for i in later[0][len(ids) :][:1] if i == 2 and shown == ids] if later else []; "
        "ids, old, mask = ids + after, old + [0.0] * len(after), mask + [True] * len(after)"
    ),
    "sampled end token not trained": Mutant(_TOKEN, "                if mask[t] and ids[t] != 2:\n"),
    "cut replies not trained": Mutant(_USED, '            if step["discarded"] or step["stop"] == "length":\n'),
    "discarded answers trained": _attempt(steps="[s | {'discarded': False} for s in attempt['steps']]"),
    "re-tokenized ids trained": _shown("ids = shown"),
    "only tokens of the newest version": _step(
        "mask = [m and v == max(step['versions']) for m, v in zip(mask, step['versions'])]"
    ),
    "only the last step": _step("mask = [m and s == len(attempt.steps) - 1 for m in mask]"),
    "steps after a break dropped": _step(
        "before = attempt.steps[max(s - 1, 0)]; grown = [*before['prompt'], *before['completion']]; "
        "mask = [m and (s == 0 or step['prompt'][: len(grown)] == grown) for m in mask]"
    ),
    "shared tokens trained once": Mutant(
        "    return found\n\n\ndef context",
        "    unique = {(t.attempt, *context(case, t), t.id): t for t in reversed(found)}\n"
        "    return list(unique.values())[::-1]\n\n\ndef context",
    ),
    "merged over a break": Mutant(
        """    return [*step["prompt"], *step["completion"][: token.token]]
""",
        """    before = attempts(case)[token.attempt].steps[max(token.step - 1, 0)]
    row = [*before["prompt"], *before["completion"]] if token.step else []
    return [*row, *step["prompt"][len(row) :], *step["completion"][: token.token]]
""",
    ),
    # their old log-probabilities
    "log-probability of a re-tokenized token": _shown("old = [o * (a == b) for o, a, b in zip(old, ids, shown)]"),
    "log-probabilities shifted by one": _step("old = [0.0, *old[:-1]][: len(old)]"),
    "ratio to the policy of now": Mutant("np.exp(logp[ids[i]] - old[i])", "1.0"),
    # baselines
    "failed sibling as reward 0": _attempt(reward="attempt['reward'] or 0.0"),
    "group of a failed sibling dropped": Mutant(
        _KEPT,
        """
    lost = {attempt.group for attempt in attempts(case) if attempt.reward is None}
    return [attempt for attempt in attempts(case) if attempt.group not in lost]
""",
    ),
    "attempt with an empty completion dropped": Mutant(
        _KEPT,
        """
    whole = [attempt for attempt in attempts(case) if all(step["completion"] for step in attempt.steps)]
    return [attempt for attempt in whole if attempt.reward is not None]
""",
    ),
    "another group's baseline": Mutant(
        """    return [[a for a in graded(case) if a.group == g] for g in range(len(case["groups"]))]
""",
        "    return [graded(case)]\n",
    ),
    "baseline over rows": Mutant(
        "np.array([a.reward for a in members])\n", "np.array([a.reward for a in members for _ in a.steps])\n"
    ),
    "reward of the last step only": _attempt(
        f"attempt['reward'] and attempt['reward'] - sum(s['reward'] for s in attempt['steps'] if s is not {_LAST})"
    ),
    "deviation without Bessel's correction": Mutant("rewards.std(ddof=1)", "rewards.std()"),
    "deviation of rounding": Mutant(
        "equal = len(members) < 2 or rewards.min() == rewards.max()",
        "rewards, equal = rewards.astype(np.float32), len(members) < 2",
    ),
    "RLOO with the attempt itself": Mutant(
        "others = [b.reward for b in members if b.number != a.number]", "others = [b.reward for b in members]"
    ),
    # returns of steps
    "no discount": Mutant("running = rewards[t] + gamma * running", "running = rewards[t] + running"),
    "returns of trained steps only": Mutant(
        "        earned[used[-1]] +=",
        "        earned = {s: r * any(attempt.steps[s]['mask']) for s, r in earned.items()}\n"
        "        earned[used[-1]] +=",
    ),
    "discarded steps earn": Mutant(
        "        earned[used[-1]] +=",
        "        earned[used[-1]] += sum(s['reward'] for s in attempt.steps if s['discarded']) +",
    ),
    "returns compared with whole rewards": Mutant("peers = [togo[b][t] for b", "peers = [first[b] for b"),
    "sub-agents' steps as main steps": _attempt(steps="[s | {'caller': None} for s in attempt['steps']]"),
    # weights
    "reduction per row": Mutant(
        "t.attempt for t in tokens]\n    count", "(t.attempt, t.step) for t in tokens]\n    count"
    ),
    "attempts without trained tokens count": Mutant(
        "1.0 / (len(count) * count[unit]) for",
        "1.0 / (max(len(count), len(graded(case)) * (reduction != 'task_mean')) * count[unit]) for",
    ),
    "task mean over attempts": Mutant('group_of[t.attempt] if reduction == "task_mean" else t.attempt', "t.attempt"),
    "masked tokens in the token mean": Mutant(
        "1.0 / max(len(tokens), 1))", "1.0 / sum(len(s['completion']) for a in graded(case) for s in a.steps))"
    ),
    "length norm of the longest attempt": Mutant('case["length_norm"]', "max(count.values())"),
}


@cache
def mutated(name: str) -> dict[str, Any]:
    """Return the module of a mutant. Raises ValueError if its text is not once in the reference."""
    path = Path(__file__).resolve().parent / "reference.py"
    source, (text, wrong) = path.read_text(), MUTANTS[name]
    if source.count(text) != 1:
        raise ValueError(f"{name}: {text!r} is {source.count(text)} times in the reference")
    module: dict[str, Any] = {"__name__": "conformance.mutant"}
    exec(compile(source.replace(text, wrong), f"{path} ({name})", "exec"), module)
    return module


def notices(name: str, case: dict[str, Any]) -> bool:
    """Return whether the mutant gives something else than the case expects."""
    return not same(mutated(name)["expected"](case), case["expected"])


def same(found: Any, wanted: Any) -> bool:
    """Return whether both have the same structure, the same integers, and floats equal to 1e-9."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted or bool(isinstance(wanted, float) and np.isclose(found, wanted, rtol=1e-9, atol=1e-12))


def main() -> None:
    from conformance.check import load_cases

    for name in MUTANTS:
        caught = [case for case, content in load_cases().items() if notices(name, content)]
        print(f"{name}: {len(caught)} cases, {', '.join(sorted({case.rsplit('-', 1)[0] for case in caught}))}")


if __name__ == "__main__":
    main()
