"""Runs an adapter over the cases: `python -m conformance.check treadle`.

    case --adapter.rows--> Row* --match--> (attempt, step, token) --compare--> state of each aspect

A trained position is identified by what stands before it in its row: it is the token of a step only if all ids up to it
are the step's prompt and reply up to there. So a row with another history trains other tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
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
LEAST = {"old": 1.0, "advantage": 0.1, "weight": 1e-3, "loss": 0.1, "gradient": 0.01}
"""Differences are compared with the largest value, at least with this: terms cancel, and their rounding stays."""
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
    """Why cells fail. where: file and line of the trainer's, `package/module.py:12`. code: stands there.

    aspects: beginnings of names of aspects. cases: names of cases, or of families. Empty: all.
    """

    sentence: str
    where: str
    code: str
    aspects: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    def covers(self, case: str, aspect: str) -> bool:
        family = case.rsplit("-", 1)[0]
        return (not self.aspects or aspect.startswith(self.aspects)) and (
            not self.cases or case in self.cases or family in self.cases
        )

    def stands(self) -> bool:
        """Return whether the installed trainer has this code on this line."""
        file, line = self.where.rsplit(":", 1)
        path = next((path for base in sys.path if (path := Path(base) / file).is_file()), None)
        return path is not None and self.code in path.read_text().splitlines()[int(line) - 1]

    def __str__(self) -> str:
        return f"{self.sentence} (`{self.where}`)"


def explanations_of(adapter: ModuleType) -> list[Explanation]:
    """Read the explanations beside the adapter: a list of `Explanation`s in a file of its name, with suffix .json."""
    path = Path(str(adapter.__file__)).with_suffix(".json")
    listed = json.loads(path.read_text()) if path.exists() else []
    lists = ("aspects", "cases")
    return [Explanation(**each | {name: tuple(each.get(name, ())) for name in lists}) for each in listed]


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
        found = np.array([getattr(row, field)[at] for _, (row, at) in places])
        return _compare(found, [values[i] for i, _ in places], rtol, LEAST[field])

    try:
        plain = found(*usual)
    except NotExpressible:
        return states
    except Exception as error:  # noqa: BLE001  # of the trainer's own code: attributed to it
        return states | {"tokens": f"fails: {type(error).__name__} {error}".splitlines()[0][:120]}
    states["tokens"] = plain.state
    states["old"] = compare(plain, "old", want["old"], rtol)
    for name in advantages:
        loose = max(rtol, GRPO_RTOL) if name == "grpo" and rtol == RTOL else rtol
        values = want["advantages"][name]
        if name == "grpo" and getattr(adapter, "POPULATION_STD", False):
            values = _population(case, values)
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


def _population(case: dict[str, Any], values: list[float]) -> list[float]:
    """Return advantage grpo with the population's deviation, the other convention: std over n, not n - 1."""
    size = {a.number: len(members) for members in reference.by_group(case) for a in members}
    tokens = case["expected"]["tokens"]
    return [v * np.sqrt(n / max(n - 1, 1)) for v, n in zip(values, (size[t[0]] for t in tokens), strict=True)]


def _losses(case: dict[str, Any], rows: Rows, own: Loss | None, reductions: list[str], rtol: float) -> tuple[str, str]:
    """Compare loss and gradient: the trainer's own, or else those of the tiny model on its rows."""
    want, losses, gradients = case["expected"], [], []
    for name in reductions:
        loss, gradient = own(case, LOSS_ADVANTAGE, name) if own else _of_rows(rows(case, LOSS_ADVANTAGE, name))
        losses.append(loss)
        gradients.append(gradient)
    return (
        _compare(np.array(losses), [want["loss"][name] for name in reductions], rtol, LEAST["loss"]),
        _compare(
            np.ravel(gradients), np.ravel([want["gradient"][name] for name in reductions]), rtol, LEAST["gradient"]
        ),
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


def _compare(found: Any, expected: Any, rtol: float, least: float) -> str:
    """Return `pass` if the difference is small against the largest expected value, else what differs most."""
    wanted = np.asarray(expected, np.float64)
    if not len(wanted):
        return PASS
    scale = max(float(np.abs(wanted).max()), least)
    gap = np.abs(found - wanted)
    at = int(np.argmax(gap))
    return PASS if gap[at] <= rtol * scale else f"fails: {found[at]:.4g} instead of {wanted[at]:.4g}"


class Failure(NamedTuple):
    """A failing cell. explained: number of the explanation that covers it, if any."""

    case: str
    aspect: str
    state: str
    explained: int | None


def run(adapter: ModuleType, variant: str, cases: dict[str, dict[str, Any]]) -> dict[str, States]:
    """Return the states of one variant of an adapter, by case."""
    rows, own = adapter.VARIANTS[variant], getattr(adapter, "LOSSES", {}).get(variant)
    return {name: judge(case, rows, adapter, own) for name, case in cases.items()}


def failures(states: dict[str, States], explanations: Sequence[Explanation]) -> list[Failure]:
    """Return everything that fails, each with the first explanation that covers it."""
    return [
        Failure(name, aspect, state, next((n for n, e in enumerate(explanations) if e.covers(name, aspect)), None))
        for name, of_case in states.items()
        for aspect, state in of_case.items()
        if state.startswith("fails")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", help="a module of conformance/adapters, or the import path of your own")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", nargs="?", type=Path, const=RESULTS, help="write ADAPTER.json here (%(const)s)")
    args = parser.parse_args()
    adapter = importlib.import_module(args.adapter if "." in args.adapter else f"conformance.adapters.{args.adapter}")
    logging.disable()  # trainers log every batch
    cases = {name: case for name, case in load_cases().items() if args.only in name}
    explanations = explanations_of(adapter)
    variants = {variant: run(adapter, variant, cases) for variant in adapter.VARIANTS}
    wrong = {variant: failures(states, explanations) for variant, states in variants.items()}
    for variant, states in variants.items():
        held = [name for name, s in states.items() if any(state != NOT_EXPRESSIBLE for state in s.values())]
        passing = len(held) - len({failure.case for failure in wrong[variant]})
        title = " ".join(filter(None, (adapter.TRAINER, adapter.VERSION, variant)))
        print(f"{title}: {passing} of {len(held)} cases pass, {len(cases) - len(held)} not expressible")
        for case, aspect, state, number in wrong[variant]:
            print(f"  {case}: {aspect} {state} [{'unexplained' if number is None else number + 1}]")
    used = {failure.explained for found in wrong.values() for failure in found}
    problems = ["some failures are unexplained"] * (None in used)
    for number, explanation in enumerate(explanations):
        print(f"  [{number + 1}] {explanation}")
        if number not in used and not args.only:
            problems.append(f"nothing fails for reason {number + 1} any more")
        if not explanation.stands():
            problems.append(f"{explanation.where} is not {explanation.code!r}")
    if args.write:
        args.write.mkdir(exist_ok=True)
        (args.write / f"{args.adapter}.json").write_text(_results(adapter, variants, wrong))
    print("".join(f"{problem}\n" for problem in problems), end="", file=sys.stderr)
    return 1 if problems else 0


def _results(adapter: ModuleType, variants: dict[str, dict[str, States]], wrong: dict[str, list[Failure]]) -> str:
    """Return the file of results: JSON, one line per case that does not pass."""
    made = {
        "trainer": adapter.TRAINER,
        "version": adapter.VERSION,
        "lacks": getattr(adapter, "LACKS", ""),
        "explanations": [str(explanation) for explanation in explanations_of(adapter)],
        "variants": {
            variant: {
                "aspects": sorted(
                    {a for of_case in states.values() for a, s in of_case.items() if s != NOT_EXPRESSIBLE}
                ),
                "not expressible": [n for n, s in states.items() if set(s.values()) == {NOT_EXPRESSIBLE}],
                "fails": [[*failure] for failure in wrong[variant]],
                "follows": [[n, a] for n, of_case in states.items() for a, s in of_case.items() if s == FOLLOWS],
            }
            for variant, states in variants.items()
        },
    }
    lists = re.compile(r"\[[^\[\]{}]*\]")
    return lists.sub(lambda found: json.dumps(json.loads(found[0])), json.dumps(made, indent=1)) + "\n"


if __name__ == "__main__":
    from conformance import check  # the module whose classes adapters import

    sys.exit(check.main())
