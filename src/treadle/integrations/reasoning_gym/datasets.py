"""Data sets of reasoning-gym by name, and tasks from them.

make_dataset("chain_sum", {"max_terms": 3}, count=100, seed=0)
Task("chain_sum-train-000001", prompt=(system, question), ground_truth="-9",
     extras={"dataset": "chain_sum", "scored_by": "chain_sum", "config": {"max_terms": 3}, "metadata": {...}})
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import SYSTEM_PROMPTS

from treadle.core.errors import ConfigError
from treadle.core.types import Message, Task
from treadle.envs.tasks import split_key

COMPOSITE = "composite"
NO_SYSTEM = "none"

VARIABLE = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets with items that also depend on Python's hash seed."""

_SPLIT_SEEDS = 2**30  # held-out items have seeds from here on, training items lower ones
_OURS = ("size", "seed")
_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})


def reasoning_gym_tasks(
    split: str,
    dataset: str,
    count: int = 1000,
    seed: int = 0,
    config: Mapping[str, Any] = _NO_CONFIG,
    system: str = "default",
) -> Iterator[Task]:
    """Yield `count` items of a data set as tasks of the environment `reasoning_gym`.

    dataset: its name; `composite` mixes several, `config: {datasets: [{name: ..., weight: 1, config: {...}}]}`. config:
    the data set's own options. seed: seed of the first item, incremented for each next one; the splits' seeds never
    overlap.
    system: name of one of the library's system prompts, or `none`.

    Raises ConfigError for a name, an option or a value that the library refuses.
    """
    split_key(split, count)
    if system not in (*SYSTEM_PROMPTS, NO_SYSTEM):
        raise ConfigError(f"system is {system!r}; it must be one of {', '.join(SYSTEM_PROMPTS)}, {NO_SYSTEM}")
    _check_hash_seed(dataset, config)
    first = seed % _SPLIT_SEEDS + (_SPLIT_SEEDS if split == "held_out" else 0)
    items = make_dataset(dataset, config, count, first) if count else ()
    opening = () if system == NO_SYSTEM else (Message(role="system", content=SYSTEM_PROMPTS[system]),)
    for number in range(count):
        item = items[number]
        metadata, prompt = _with_text_keys(item["metadata"]), (*opening, Message(role="user", content=item["question"]))
        extras = {"dataset": metadata.get("source_dataset", dataset), "scored_by": dataset, "config": dict(config)}
        extras["metadata"] = metadata
        yield Task(f"{dataset}-{split}-{number:06d}", prompt, "reasoning_gym", item["answer"], extras)


def _with_text_keys(value: Any) -> Any:
    """Return metadata with keys as JSON has them: some of `graph_color` are numbers, which no scorer reads."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, list) else value


def make_dataset(name: str, config: Mapping[str, Any], count: int, seed: int) -> ProceduralDataset:
    """Return a data set of the library. Raises ConfigError for a name or options that it refuses."""
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"reasoning-gym has no data set {name!r}; {hint}")
    options = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OURS]
    if unknown := [key for key in config if key not in options]:
        ours = " (size is the option count)" if unknown[0] == "size" else ""
        raise ConfigError(f"config of {name!r}: unknown key {unknown[0]!r}{ours}; it takes {', '.join(options)}")
    parts = {"datasets": [_part(part) for part in _parts(config)]} if name == COMPOSITE else {}
    try:
        return create_dataset(name, **{**config, **parts}, size=count, seed=seed)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"config of {name!r} ({dict(config)}): {error or type(error).__name__}") from error


def _parts(config: Mapping[str, Any]) -> list[Any]:
    parts = config.get("datasets")
    if not isinstance(parts, list) or not parts:
        raise ConfigError(
            f"config of {COMPOSITE!r} must list its data sets, got {dict(config)}; write "
            "{datasets: [{name: chain_sum, weight: 1, config: {max_terms: 3}}]}"
        )
    return parts


def _part(part: Any) -> DatasetSpec:
    """Return one data set of a composite, checked separately."""
    if not isinstance(part, Mapping) or "name" not in part or not {*part} <= {"name", "weight", "config"}:
        raise ConfigError(f"config of {COMPOSITE!r}: a data set has name, weight and config, got {part!r:.200}")
    name, weight, config = part["name"], part.get("weight", 1.0), part.get("config", {})
    make_dataset(name, {key: value for key, value in config.items() if key not in _OURS}, count=1, seed=0)
    return DatasetSpec(name, weight, dict(config))


def _check_hash_seed(dataset: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for items that would differ in the next process, so that a run could not be resumed."""
    used = [part.get("name") for part in _parts(config)] if dataset == COMPOSITE else [dataset]
    if (variable := [name for name in used if name in VARIABLE]) and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise ConfigError(
            f"the items of {variable[0]!r} depend on Python's hash seed, and a resumed run would not find its "
            "tasks again; start with PYTHONHASHSEED=0 in the environment"
        )
