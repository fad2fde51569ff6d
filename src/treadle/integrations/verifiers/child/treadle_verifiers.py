"""Handler of worker processes (`treadle.workers.foreign`): environments of verifiers. No import of Treadle.

{"do": "rows", environment, arguments, split, first, count}                        -> {"rows": [...]}
{"do": "play", environment, arguments, split, row, digest, base_url, seconds}      -> {"reward", "metrics", "error"}
"""

import asyncio
import hashlib
import importlib.metadata
import json
import os
import sys
from typing import Any

_INSTALLED = importlib.metadata.version("verifiers")
if _INSTALLED.startswith("0.1."):
    from treadle_verifiers_classic import Library
else:
    from treadle_verifiers_v1 import Library

Json = dict[str, Any]

_libraries: dict[str, Any] = {}
_loading = asyncio.Lock()


def versions() -> dict[str, str]:
    """Return the version of the library."""
    return {"verifiers": _INSTALLED}


async def start(options: Json) -> Json:
    """Put programs of this Python first on the PATH. Raises RuntimeError if one is missing."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    Library.check_programs()
    return {}


async def run(payload: Json, stop: asyncio.Event) -> Json:
    """List the rows of an environment's data set, or play one. Reading, which may be slow, happens in threads."""
    library = await _loaded(payload["environment"], payload["arguments"], payload["split"])
    if payload["do"] == "rows":
        return {"rows": await asyncio.to_thread(_rows, library, payload["first"], payload["count"])}
    listed = await asyncio.to_thread(_listed, library, payload["row"])
    if listed["digest"] != payload["digest"]:
        raise RuntimeError(
            f"row {payload['row']} of {payload['environment']!r} differs from the row listed as a task; "
            "have it load its data in one order, with a seed among its arguments"
        )
    answer: Json = await library.play(payload["row"], payload["base_url"], payload["seconds"])
    return answer


async def close() -> None:
    """Close the environments."""
    for library in _libraries.values():
        await library.close()


async def _loaded(environment: str, arguments: Json, split: str) -> Any:
    """Load each environment once, in a thread, because it may read much data."""
    key = json.dumps([environment, arguments, split], sort_keys=True)
    async with _loading:
        if key not in _libraries:
            _libraries[key] = await asyncio.to_thread(Library, environment, arguments, split)
        return _libraries[key]


def _rows(library: Any, first: int, count: int | None) -> list[Json]:
    return [_listed(library, row) for row in library.rows(first, count)]


def _listed(library: Any, row: int) -> Json:
    data = library.data(row)
    text = json.dumps(data, sort_keys=True, default=str)
    prompt = data.get("prompt")
    return {
        "row": row,
        "prompt": prompt if isinstance(prompt, str) or _is_plain(prompt) else [],
        "answer": data.get("answer"),
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def _is_plain(prompt: Any) -> bool:
    """Return whether it is a list of text-only messages."""
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and set(message) == {"role", "content"} and isinstance(message["content"], str)
        for message in prompt
    )
