"""Data sets of Hugging Face's `datasets`: from the hub, its cache, or a directory that one was saved to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError
from treadle.core.registry import how_to_install
from treadle.data.files import ALL
from treadle.data.table import ArrowTable, dataset_part


def open_data_set(source: str, split: str, options: Mapping[str, Any], setting: str) -> ArrowTable:
    """Return one split of a data set as a table. split: its name; may be "" or `all` if there is only one.

    options: of `datasets.load_dataset` (name, revision, data_dir, ...).

    Raises ConfigError: there is no such data set or split, or `datasets` is not installed.
    """
    if "split" in options:
        raise ConfigError(f"{setting}.options: 'split' is not an option; write {setting}.split={options['split']}")
    try:
        import datasets
    except ModuleNotFoundError as error:
        missing = error.name or "datasets"
        raise ConfigError(f"{setting}.source: {source!r} needs {missing}; {how_to_install(missing)}") from error
    if not Path(source).is_dir():
        opened: Any = _load(datasets, source, options, setting)
    elif options:
        raise ConfigError(f"{setting}.options: the directory {source} takes no options; remove {', '.join(options)}")
    else:
        opened = datasets.load_from_disk(source)
    split = "" if split == ALL else split
    splits = dict(opened) if isinstance(opened, dict) else {str(opened.split or ""): opened}
    if split not in splits and (split or len(splits) > 1):
        wanted = f"there is no split {split!r}" if split else "it has several splits"
        raise ConfigError(f"{setting}.split: {wanted} in {source}; choose one of {', '.join(filter(None, splits))}")
    chosen = splits[split] if split in splits else next(iter(splits.values()))
    if not isinstance(chosen, datasets.Dataset):
        raise ConfigError(
            f"{setting}.options: {source!r} was opened as a stream, in which no task has a number; remove it"
        )
    name = split or str(chosen.split or "")
    part = dataset_part(
        chosen, f"{source}{f', split {name}' if name else ''}", "-".join(filter(None, (Path(source).name, name)))
    )
    return ArrowTable([part])


def _load(datasets: Any, source: str, options: Mapping[str, Any], setting: str) -> Any:
    """Return the data set of this name: the hub's, or the cache's if the hub cannot be reached. Raises ConfigError."""
    try:
        return datasets.load_dataset(source, **options)
    except ConnectionError as error:
        raise ConfigError(
            f"{setting}.source: {source!r} is not a file or directory here, and not in the cache "
            f"{datasets.config.HF_DATASETS_CACHE} (HF_DATASETS_CACHE), and the hub cannot be reached or "
            "HF_HUB_OFFLINE is set; load it once where it can be reached and bring the cache here, or give the "
            "directory of one that save_to_disk wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}.source: {source!r} is not a file or directory here, and the hub's data set cannot be loaded: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}; check the name, and HF_TOKEN for one that is "
            "private or gated"
        ) from error
