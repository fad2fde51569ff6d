"""Runs an adapter over the cases: `python -m conformance.check treadle`.

    case --adapter.rows--> Row* --match--> (attempt, step, token) --compare--> state of each aspect

A trained position is identified by what stands before it in its row: it is the token of a step only if all ids up to it
are the step's prompt and reply up to there. So a row with another history trains other tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from conformance import reference
from conformance.reference import ADVANTAGES, LOSS_ADVANTAGE, REDUCTIONS

HERE = Path(__file__).resolve().parent
CASES, RESULTS = HERE / "cases", HERE / "results"

ASPECTS = (
    "tokens",
    "old",
    *(f"advantage {name}" for name in ADVANTAGES),
    *(f"weight {name}" for name in REDUCTIONS),
    "loss",
    "gradient",
)
PASS, NOT_EXPRESSIBLE, FOLLOWS = "pass", "not expressible", "follows"
"""States beside `fails: ...`. follows: not judged, because what it is computed from fails already."""

RTOL = 2e-5  # of float32
GRPO_RTOL = 1e-3  # leaves the constant beside the standard deviation free, up to 1e-4


class NotExpressible(Exception):
    """Raised by an adapter for a case that the trainer's format cannot hold, with the reason."""


class Row(NamedTuple):
    """A sequence as the trainer computes it.

    attempt: number of the attempt it belongs to. ids: the whole sequence. trained: positions in it that are trained.
    old, advantage, weight: of each of these; weight: None for trainers that leave reductions to others.
    """

    attempt: int
    ids: Sequence[int]
    trained: Sequence[int]
    old: Sequence[float]
    advantage: Sequence[float]
    weight: Sequence[float] | None = None


class Explanation(NamedTuple):
    """Why cells fail, with file and line of the trainer's. families, aspects: which ones; empty: all."""

    sentence: str
    aspects: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def covers(self, family: str, aspect: str) -> bool:
        named = any(aspect == a or aspect.split()[0] == a for a in self.aspects)
        return (not self.aspects or named) and (not self.families or family in self.families)


Rows = Callable[[dict[str, Any], str, str], list[Row]]
"""(case, advantage, reduction) -> rows; names as in `reference.ADVANTAGES` and `REDUCTIONS`."""

Loss = Callable[[dict[str, Any], str, str], tuple[float, Any]]
"""(case, advantage, reduction) -> loss, gradient by W [V, D], as the trainer computes them with `tiny.TinyModel`."""

States = dict[str, str]


def load_cases() -> dict[str, dict[str, Any]]:
    """Return all cases by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CASES.glob("*.json"))}


class Matched(NamedTuple):
    """Trained positions of rows, by expected token. places: expected index -> (row, index in `trained`)."""

    places: dict[int, tuple[Row, int]]
    extra: int
    missing: int

    @property
    def state(self) -> str:
        wrong = [f"{self.extra} that should not be trained"] * bool(self.extra)
        wrong += [f"{self.missing} not trained"] * bool(self.missing)
        return f"fails: {', '.join(wrong)}" if wrong else PASS


def match(case: dict[str, Any], rows: Sequence[Row]) -> Matched:
    """Identify the trained positions of rows by the ids up to them; among equal ones, by old log-probabilities."""
    wanted = defaultdict(list)
    tokens = reference.trained_tokens(case)
    for index, token in enumerate(tokens):
        wanted[token.attempt, (*reference.context(case, token), token.id)].append(index)
    places: dict[int, tuple[Row, int]] = {}
    extra = 0
    for row in rows:
        for at, position in enumerate(row.trained):
            candidates = wanted[row.attempt, tuple(row.ids[: position + 1])]
            if not candidates:
                extra += 1
                continue
            best = min(candidates, key=lambda index: abs(tokens[index].old - row.old[at]))
            candidates.remove(best)
            places[best] = row, at
    return Matched(places, extra, len(tokens) - len(places))


def judge(case: dict[str, Any], rows: Rows, adapter: Any, own: Loss | None = None) -> States:
    """Return the state of each aspect of one case. own: the trainer's own loss, if the adapter computes it."""
    want, rtol = case["expected"], getattr(adapter, "RTOL", RTOL)
    advantages, reductions = adapter.ADVANTAGES, adapter.REDUCTIONS
    states = dict.fromkeys(ASPECTS, NOT_EXPRESSIBLE)
    usual = LOSS_ADVANTAGE if LOSS_ADVANTAGE in advantages else (*advantages, "")[0], (*reductions, "")[0]

    @cache
    def found(advantage: str, reduction: str) -> Matched:
        return match(case, rows(case, advantage, reduction))

    def compare(matched: Matched, field: str, values: list[float], rtol: float) -> str:
        places = sorted(matched.places.items())
        return _compare(
            np.array([getattr(row, field)[at] for _, (row, at) in places]), [values[i] for i, _ in places], rtol
        )

    try:
        plain = found(*usual)
    except NotExpressible:
        return states
    states["tokens"] = plain.state
    states["old"] = compare(plain, "old", want["old"], rtol)
    for name in advantages:
        loose = max(rtol, GRPO_RTOL) if name == "grpo" and rtol == RTOL else rtol
        values = want["advantages"][name]
        states[f"advantage {name}"] = compare(found(name, usual[1]), "advantage", values, loose)
    sound = states["tokens"] == PASS
    for name in reductions:
        matched, values = found(usual[0], name), want["weights"][name]
        states[f"weight {name}"] = compare(matched, "weight", values, rtol) if sound else FOLLOWS
    if LOSS_ADVANTAGE in advantages and reductions:
        right = [name for name in reductions if states[f"weight {name}"] == PASS]
        judged = right and states["old"] == states[f"advantage {LOSS_ADVANTAGE}"] == PASS
        both = _losses(case, rows, own, right, rtol) if judged else (FOLLOWS, FOLLOWS)
        states["loss"], states["gradient"] = both
    return states


def _losses(case: dict[str, Any], rows: Rows, own: Loss | None, reductions: list[str], rtol: float) -> tuple[str, str]:
    """Compare loss and gradient: the trainer's own, or else those of the tiny model on its rows."""
    want, losses, gradients = case["expected"], [], []
    for name in reductions:
        loss, gradient = own(case, LOSS_ADVANTAGE, name) if own else _of_rows(rows(case, LOSS_ADVANTAGE, name))
        losses.append(loss)
        gradients.append(gradient)
    return (
        _compare(np.array(losses), [want["loss"][name] for name in reductions], rtol),
        _compare(np.ravel(gradients), np.ravel([want["gradient"][name] for name in reductions]), rtol),
    )


def _of_rows(rows: Sequence[Row]) -> tuple[float, Any]:
    contexts, ids, old, advantage, weight = [], [], [], [], []
    for row in rows:
        contexts += [list(row.ids[:position]) for position in row.trained]
        ids += [row.ids[position] for position in row.trained]
        old += list(row.old)
        advantage += list(row.advantage)
        weight += list(row.weight or ())
    each = reference.token_losses(contexts, ids, np.array(old), np.array(advantage))
    return reference.reduced(np.array(weight), *each)


def _compare(found: Any, expected: Any, rtol: float) -> str:
    """Return `pass` if the difference is small against the largest expected value, else what differs most."""
    wanted = np.asarray(expected, np.float64)
    if not len(wanted):
        return PASS
    scale = max(float(np.abs(wanted).max()), 1e-3)
    gap = np.abs(found - wanted)
    at = int(np.argmax(gap))
    return PASS if gap[at] <= rtol * scale else f"fails: {found[at]:.4g} instead of {wanted[at]:.4g}"


def failures(results: dict[str, Any], families: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (case, aspect, state) of everything that fails."""
    for name, states in results.items():
        for aspect, state in states.items():
            if state.startswith("fails"):
                yield name, aspect, state


def run(adapter: ModuleType, variant: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one variant of an adapter over all cases, each failure with its explanation's number."""
    rows, own = adapter.VARIANTS[variant], getattr(adapter, "LOSSES", {}).get(variant)
    states = {name: judge(case, rows, adapter, own) for name, case in cases.items()}
    explanations = [e for v, e in getattr(adapter, "EXPLAINED", ()) if v in (variant, "")]
    explained: dict[str, dict[str, int]] = {}
    unexplained, used = [], set()
    for name, aspect, state in failures(states, {}):
        family = cases[name]["family"]
        number = next((n for n, e in enumerate(explanations) if e.covers(family, aspect)), None)
        if number is None:
            unexplained.append(f"{name}: {aspect} {state}")
        else:
            used.add(number)
            explained.setdefault(name, {})[aspect] = number
    stale = [e.sentence for n, e in enumerate(explanations) if n not in used]
    return {
        "trainer": adapter.TRAINER,
        "variant": variant,
        "version": adapter.VERSION,
        "not_expressible": getattr(adapter, "LACKS", ""),
        "explanations": [e.sentence for e in explanations],
        "explained": explained,
        "unexplained": unexplained,
        "stale": stale,
        "states": states,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", help="a module of conformance/adapters, or module path of your own")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="write conformance/results")
    args = parser.parse_args()
    module = args.adapter if "." in args.adapter else f"conformance.adapters.{args.adapter}"
    adapter = importlib.import_module(module)
    cases = {name: case for name, case in load_cases().items() if args.only in name}
    bad = 0
    for variant in adapter.VARIANTS:
        found = run(adapter, variant, cases)
        title = " ".join(filter(None, (found["trainer"], variant, found["version"])))
        held = [any(s != NOT_EXPRESSIBLE for s in states.values()) for states in found["states"].values()]
        failing = {name for name, _, _ in failures(found["states"], {})}
        print(f"{title}: {sum(held) - len(failing)} of {sum(held)} cases pass, {len(held) - sum(held)} not expressible")
        for name, aspect, state in failures(found["states"], {}):
            number = found["explained"].get(name, {}).get(aspect)
            print(f"  {name}: {aspect} {state}" + ("" if number is None else f" [{number + 1}]"))
        for number, sentence in enumerate(found["explanations"], 1):
            print(f"  [{number}] {sentence}")
        bad += len(found["unexplained"]) + (len(found["stale"]) if not args.only else 0)
        for sentence in found["stale"] if not args.only else []:
            print(f"  nothing fails for this reason any more: {sentence}")
        if args.write:
            RESULTS.mkdir(exist_ok=True)
            name = "-".join(filter(None, (args.adapter, variant.replace(" ", "-"))))
            (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
