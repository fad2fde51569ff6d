"""Runs of other versions of Treadle: how config.yaml has changed since, and which runs cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from treadle.core.errors import RunError

SCHEMA_VERSION = 1
"""The version of runs written now, `schema_version` in config.yaml. Runs without that key have version 0."""

RENAMED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "orchestration.late": "orchestration.stale_policy",
        "orchestration.max_sampled": "failures.max_sampled",
        "orchestration.max_failed_fraction": "failures.max_failed_fraction",
    }
)
"""Full path of a key of version 0 -> the one that took its place."""

_RENAMED_VALUES = {("orchestration.stale_policy", "drop"): "drop_group"}


def migrated(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of a run's config.yaml with the keys and values of this version.

    source: the file, for errors. Raises RunError for a run of a newer version.
    """
    current = dict(data)
    version = current.pop("schema_version", 0)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunError(
            f"{source}: the run has schema_version {version!r}, and this Treadle reads up to {SCHEMA_VERSION}; use the "
            "version of Treadle that wrote it"
        )
    return current if version == SCHEMA_VERSION else _from_0(current)


def _from_0(data: dict[str, Any]) -> dict[str, Any]:
    for old, new in RENAMED_KEYS.items():
        (section, key), (new_section, new_key) = old.split("."), new.split(".")
        if key in (data.get(section) or {}):
            rest = dict(data[section])
            value = rest.pop(key)
            data[section] = rest
            data[new_section] = {**(data.get(new_section) or {}), new_key: _RENAMED_VALUES.get((new, value), value)}
    return data
