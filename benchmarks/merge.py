"""Building prefix trees alone, no model: calls -> arrangement -> micro-batches, against what plain Python does.

    dict trie           the same nodes, one dictionary a node; the first calls only
    list merge          consecutive calls of a trajectory that continue each other, as `chain` packing; lists of ids

Each gets the calls in its own form, arrays or lists, outside the timing. A list merge shares no more than `chain`
packing does, so it leaves more tokens wherever calls do not simply continue.

    python -m benchmarks.merge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.measure import Row, Table, cpu_seconds, make_parser, show
from treadle.core.types import Ids
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, arrange, micro_batches

_BUDGET = 8192
_VOCABULARY = 151_669  # ids of Qwen3's tokenizer
_SAMPLE = 100  # calls that the dict trie is given
_STEPS = 10  # of a trajectory
_GROUP = 10  # trajectories of a group, with a common first prompt


@dataclass(frozen=True, slots=True)
class Case:
    """Calls to pack, the longest of `length` tokens.

    forks: each leaves an earlier one of its group anywhere; otherwise each trajectory is append-only, from half the
    length on.
    """

    calls: int
    length: int
    forks: bool = False

    @property
    def name(self) -> str:
        return "forks" if self.forks else "append-only"


CASES = (Case(1000, 4096), Case(1000, 4096, forks=True), Case(10_000, 2048), Case(1000, 32_768))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the CPU seconds of every way on every case; print a table."""
    options = make_parser(__doc__, repeats=3).parse_args(arguments)
    cases = (Case(60, 80), Case(60, 80, forks=True)) if options.small else CASES
    rows = [row for case in cases for row in compare(case, options.repeats)]
    note = (
        f"ids of {_VOCABULARY}, micro-batches of {_BUDGET} tokens, median of {options.repeats}; "
        "treadle is so many times as fast by tokens per CPU second"
    )
    show(options.json, Table("merge", note, rows))


def compare(case: Case, repeats: int) -> list[Row]:
    calls = recorded(case)
    sample = calls[:_SAMPLE]
    ways: dict[str, tuple[Sequence[PackedCall], Callable[[], int]]] = {
        "treadle": (calls, partial(_trees, calls)),
        "dict trie": (sample, partial(dict_trie, _lists(sample))),
        "list merge": (calls, partial(list_merge, _records(calls))),
    }
    taken = cpu_seconds({way: run for way, (_, run) in ways.items()}, repeats)
    tokens = {way: sum(len(c.token_ids) for c in packed) for way, (packed, _) in ways.items()}
    return [
        {
            "calls are": case.name,
            "way": way,
            "sequences": len(packed),
            "longest": max(len(c.token_ids) for c in packed),
            "tokens": tokens[way],
            "tokens left": run(),
            "CPU s": taken[way],
            "steps per s": len(packed) / taken[way],
            "Mtokens per s": tokens[way] / taken[way] / 1e6,
            "treadle is times": (tokens["treadle"] / taken["treadle"]) / (tokens[way] / taken[way]),
        }
        for way, (packed, run) in ways.items()
    ]


def recorded(case: Case) -> list[PackedCall]:
    """Return calls in the order in which agents make them."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Ids:
        return rng.integers(0, _VOCABULARY, count).astype(np.int32)

    sampled = max(1, case.length // (4 * _STEPS))  # half of what an append-only trajectory grows by in a step

    def call(token_ids: Ids, number: int) -> PackedCall:
        trajectory = number // _STEPS
        return PackedCall(token_ids, len(token_ids) - sampled, number * sampled, trajectory, trajectory // _GROUP)

    made: list[PackedCall] = []
    prompt = whole = ids(0)
    for number in range(case.calls):
        if number % (_STEPS * _GROUP) == 0:
            prompt = ids(case.length // 2)
        if case.forks:
            first = number - number % (_STEPS * _GROUP)
            earlier = made[int(rng.integers(first, number))].token_ids if number > first else prompt
            kept = earlier[: int(rng.integers(1, len(earlier) + 1))]
            made.append(call(np.concatenate([kept, ids(case.length - len(kept))]), number))
            continue
        step = number % _STEPS
        if step == 0:
            whole = np.concatenate([prompt, ids(case.length - len(prompt))])
        made.append(call(whole[: len(prompt) + (case.length - len(prompt)) * (step + 1) // _STEPS], number))
    return made


def _trees(calls: Sequence[PackedCall]) -> int:
    return sum(map(len, micro_batches(arrange(calls, Packing.TREE), _BUDGET)))


Record = tuple[int, list[int], list[int]]
"""(trajectory, prompt, completion)."""


def _records(calls: Sequence[PackedCall]) -> list[Record]:
    return [(c.trajectory, *_split(c)) for c in calls]


def _split(call: PackedCall) -> tuple[list[int], list[int]]:
    return call.token_ids[: call.prompt_length].tolist(), call.token_ids[call.prompt_length :].tolist()


def _lists(calls: Sequence[PackedCall]) -> list[tuple[int, list[int]]]:
    return [(c.group, c.token_ids.tolist()) for c in calls]


def dict_trie(calls: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return the number of unique nodes of calls (group, ids)."""
    roots: dict[int, dict[int, Any]] = {}
    nodes = 0
    for group, ids in calls:
        node = roots.setdefault(group, {})
        for token in ids:
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                nodes += 1
            node = child
    return nodes


def list_merge(records: Sequence[Record]) -> int:
    """Return how many tokens are left when each call is appended to the one of its trajectory that it continues."""
    merged: list[list[int]] = []
    for _, calls in groupby(records, key=lambda record: record[0]):
        whole: list[int] = []
        for _, prompt, completion in calls:
            if not whole or prompt[: len(whole)] != whole:
                whole = []
                merged.append(whole)
            whole += prompt[len(whole) :]
            whole += completion
    return sum(map(len, merged))


if __name__ == "__main__":
    main()
