"""Building prefix trees alone, no model: calls -> arrangement -> micro-batches, against what plain Python does.

    dict trie           the same nodes, one dictionary a node; the first calls only
    list merge          consecutive calls of a trajectory that continue each other, as `chain` packing; lists of ids
    SkyRL               `merge_stepwise_output` of skyrl 0.3.0, where it is installed: a list merge of whole records

Each is given the calls in its own form, arrays or lists, outside the timing. The last two share no more than
`chain` packing does, so they leave more tokens wherever calls do not simply continue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np

from treadle.benchmarks.report import Report, Row, cpu_seconds
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
    """Describes calls to pack, the longest of `length` tokens.

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


def measure(threads: int, repeats: int, cases: Sequence[Case] = CASES) -> Report:
    """Measure the CPU seconds of every way on every case; `threads` has no effect."""
    rows = [row for case in cases for row in _compare(case, repeats)]
    note = (
        f"ids of {_VOCABULARY}, micro-batches of {_BUDGET} tokens, median of {repeats}; "
        "treadle is so many times as fast by tokens per CPU second"
    )
    return Report("merge", note, rows)


def _compare(case: Case, repeats: int) -> list[Row]:
    calls = recorded(case)
    sample = calls[:_SAMPLE]
    ways: dict[str, tuple[Sequence[PackedCall], Callable[[], int]]] = {
        "treadle": (calls, partial(_trees, calls)),
        "dict trie": (sample, partial(dict_trie, _lists(sample))),
        "list merge": (calls, partial(list_merge, _records(calls))),
    }
    skyrl = _skyrl()
    if skyrl is not None:
        ways["SkyRL"] = (calls, partial(skyrl, _skyrl_input(calls)))
    taken = cpu_seconds({way: run for way, (_, run) in ways.items()}, repeats)
    tokens = {way: sum(len(c.token_ids) for c in given) for way, (given, _) in ways.items()}
    return [
        {
            "calls are": case.name,
            "way": way,
            "sequences": len(given),
            "longest": max(len(c.token_ids) for c in given),
            "tokens": tokens[way],
            "tokens left": run(),
            "CPU s": taken[way],
            "steps per s": len(given) / taken[way],
            "Mtokens per s": tokens[way] / taken[way] / 1e6,
            "treadle is times": (tokens["treadle"] / taken["treadle"]) / (tokens[way] / taken[way]),
        }
        for way, (given, run) in ways.items()
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

    found: list[PackedCall] = []
    prompt = whole = ids(0)
    for number in range(case.calls):
        if number % (_STEPS * _GROUP) == 0:
            prompt = ids(case.length // 2)
        if case.forks:
            first = number - number % (_STEPS * _GROUP)
            earlier = found[int(rng.integers(first, number))].token_ids if number > first else prompt
            kept = earlier[: int(rng.integers(1, len(earlier) + 1))]
            found.append(call(np.concatenate([kept, ids(case.length - len(kept))]), number))
            continue
        step = number % _STEPS
        if step == 0:
            whole = np.concatenate([prompt, ids(case.length - len(prompt))])
        found.append(call(whole[: len(prompt) + (case.length - len(prompt)) * (step + 1) // _STEPS], number))
    return found


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
    """Return how many tokens a list merge leaves.

    Each call that continues the one before, in its trajectory, is appended to it.
    """
    merged: list[list[int]] = []
    for _, own in groupby(records, key=lambda record: record[0]):
        whole: list[int] = []
        for _, prompt, completion in own:
            if not whole or prompt[: len(whole)] != whole:
                whole = []
                merged.append(whole)
            whole += prompt[len(whole) :]
            whole += completion
    return sum(map(len, merged))


# What SkyRL's file imports but its merge does not need: ray, vLLM, configuration. On Python 3.11 some of it fails.
_NOT_NEEDED = (
    "loguru",
    "torch",
    "skyrl_gym.metrics",
    "skyrl.backends.skyrl_train.inference_servers.base",
    "skyrl.train.config",
    "skyrl.train.generators.base",
    "skyrl.train.utils.trainer_utils",
)


def _skyrl() -> Callable[[dict[str, Any]], int] | None:
    """Its merge, from `skyrl/train/generators/utils.py` alone, or None where it is not installed."""
    package = find_spec("skyrl")
    if package is None or not package.submodule_search_locations:
        return None
    spec = spec_from_file_location("_skyrl", Path(package.submodule_search_locations[0], "train/generators/utils.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    stand_ins = {name: MagicMock() for name in ("skyrl", *_NOT_NEEDED)}
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)

    def merge(output: dict[str, Any]) -> int:
        with patch.dict(sys.modules, stand_ins):
            merged = module.merge_stepwise_output(output)
        return sum(map(len, merged["prompt_token_ids"])) + sum(map(len, merged["response_ids"]))

    return merge


def _skyrl_input(calls: Sequence[PackedCall]) -> dict[str, Any]:
    prompts, responses = zip(*map(_split, calls), strict=True)
    following = [c.trajectory for c in calls[1:]] + [-1]
    return {
        "prompt_token_ids": list(prompts),
        "response_ids": list(responses),
        "rewards": [0.0] * len(calls),
        "loss_masks": [[1] * len(ids) for ids in responses],
        "stop_reasons": None,
        "rollout_metrics": None,
        "rollout_logprobs": [[-1.0] * len(ids) for ids in responses],
        "trajectory_ids": [c.trajectory for c in calls],
        "rollout_expert_indices": None,
        "is_last_step": [c.trajectory != after for c, after in zip(calls, following, strict=True)],
    }
