"""Which files a source means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from treadle.core.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet")
_OTHERS = (".json", ".csv", ".tsv", ".txt", ".yaml", ".yml", ".arrow", ".gz", ".zst")
ALL = "all"
"""The split that is everything."""

_SAVED = ("state.json", "dataset_dict.json")  # what `datasets` writes into the directory of a data set
_SHARD = re.compile(r"[-_.]?\d.*")


class Files(NamedTuple):
    """The files of one source, all of one kind: `Files(".parquet", {"train-00000": Path(...)})`.

    paths: by what the ids of their tasks begin with.
    """

    suffix: str
    paths: dict[str, Path]


def is_data_set(source: str) -> bool:
    """Return whether a source is a Hugging Face data set: the directory of a saved one, or ORG/NAME."""
    path = Path(source)
    if path.is_dir():
        return any((path / name).is_file() for name in _SAVED)
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and path.suffix not in (*SUFFIXES, *_OTHERS)
    return bool(named) and not path.exists()


def find_files(source: str, split: str, setting: str) -> Files | None:
    """Return the files that a source means; None if it can only be the name of a generator.

    split: of a directory's files, `train` means train-00000-of-00002.parquet and so on, and `all` every file.
    Raises ConfigError.
    """
    path = Path(source)
    if path.is_dir():
        return _in_directory(path, split, setting)
    if path.suffix not in SUFFIXES:
        if path.suffix in _OTHERS or path.is_file():
            raise ConfigError(f"{setting}.source: {source!r} is not a .jsonl or .parquet file; convert it to one")
        return None
    if split not in ("", ALL):
        raise ConfigError(f"{setting}.split: the file {source} has no split {split!r}; write all, or a part: all[:90%]")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{setting}.source: cannot read {path}: {error.strerror}; check the path (it is relative to {Path.cwd()})"
        ) from error
    return Files(path.suffix, {path.stem: path})


def _in_directory(directory: Path, split: str, setting: str) -> Files:
    every = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    where = f"{setting}.source: cannot read {directory}"
    if not every:
        raise ConfigError(f"{where}: a directory without .jsonl and .parquet files; check the path")
    splits = dict.fromkeys(_split_of(path) for path in every)
    if split not in (ALL, *splits) and (split or len(splits) > 1):
        wanted = f"there is no split {split!r}" if split else "it holds several splits"
        choices = ", ".join(filter(None, [*splits, ALL]))
        raise ConfigError(f"{setting}.split: {wanted} in {directory}; choose one of {choices}")
    files = [path for path in every if split in ("", ALL) or _split_of(path) == split]
    if len(suffixes := {path.suffix for path in files}) > 1:
        raise ConfigError(f"{where}: it holds {' and '.join(sorted(suffixes))} files; name one, or move them apart")
    return Files(suffixes.pop(), {f"{directory.name}/{path.stem}": path for path in files})


def _split_of(path: Path) -> str:
    """Return `train` for train-00000-of-00002.parquet and train.parquet, "" for 0000.parquet."""
    return _SHARD.sub("", path.stem, count=1)
