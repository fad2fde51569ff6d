"""The version of what a run keeps on disk. Runs of other versions are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.core.errors import RunError

SCHEMA_VERSION = 2
"""`schema_version` in config.yaml, `user_version` of the ledger."""


def without_version(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of a run's config.yaml but its `schema_version`.

    source: the file, for errors. Raises RunError for a run of another version.
    """
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RunError(
            f"{source}: the run has schema_version {version!r}, and this Treadle reads {SCHEMA_VERSION} only; use the "
            "version of Treadle that wrote it"
        )
    return {key: value for key, value in data.items() if key != "schema_version"}
