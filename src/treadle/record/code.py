"""The user's code in a run: its files, and changes to them.

code-1.json, code-2.json, ...: {"my_env": {"file": "/home/me/my_env.py", "sha256": "9f86d0..."}, ...}; one for the
start, and one for each resume with changed code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from treadle.core.files import read_proven, sha256_of
from treadle.core.user_functions import is_library
from treadle.record.run_directory import RunDirectory
from treadle.rollout.agents.command import Command
from treadle.rollout.attempt import Players

Code = dict[str, dict[str, str]]
"""Module, or word of a command -> its file and the file's SHA-256."""

_MOST_NAMED = 5


def record_code(run: RunDirectory, players: Players) -> None:
    """Write the new run's first record, which the ledger proves. Raises OSError."""
    _write(run, _code(players), 1)


def renew_code(run: RunDirectory, players: Players) -> str | None:
    """Compare the code with the record, and write another record if it differs; return a line that names files.

    Raises DamageError for a damaged record, OSError.
    """
    records = run.ledger().files("code-")
    if not records:
        return None  # older runs have none
    number = max(int(name.removesuffix(".json")) for name in records)
    content = read_proven(run.path / _name(number), records[f"{number}.json"].sha256, "restore it from a copy")
    before, now = json.loads(content), _code(players)
    own = {module.__name__ for module in _modules_of(players)}
    files = [file for key, recorded in before.items() if (file := _difference(recorded, now.get(key)))]
    files += [f"{now[key]['file']} (new)" for key in now if key not in before and (key in own or _is_word(key))]
    if not files:
        return None
    _write(run, before | now, number + 1)
    more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
    return f"changed: the code in {', '.join(files[:_MOST_NAMED])}{more}"


def _difference(before: Mapping[str, str], now: Mapping[str, str] | None) -> str | None:
    """Return the file and its change; None if unchanged. now: None for a module that is not loaded."""
    file = before["file"] if now is None else now["file"]
    sha256 = _sha256(Path(file)) if now is None else now["sha256"]
    return None if sha256 == before["sha256"] else f"{file} (gone)" if sha256 is None else file


def _name(number: int) -> str:
    return f"code-{number}.json"


def _write(run: RunDirectory, code: Code, number: int) -> None:
    run.write(_name(number), json.dumps(code, indent=2).encode())


def _code(players: Players) -> Code:
    """Return the files of all modules except Treadle's and installed libraries', and of commands.

    For the main program (`__main__`) and installed libraries, only modules that define players are included.
    """
    own = [module for module in _modules_of(players) if not module.__name__.startswith("treadle.")]
    loaded = [module for name, module in list(sys.modules.items()) if name not in ("__main__", "__mp_main__")]
    files: dict[str, Path] = {}
    for module in [*own, *(module for module in loaded if not is_library(_file(module)))]:
        if file := _file(module):  # notebook cells have none
            files.setdefault(module.__name__, Path(file))
    files |= {f"command: {word}": file for word, file in _scripts(players)}
    digests = {key: (file, _sha256(file)) for key, file in sorted(files.items())}
    return {key: {"file": str(file), "sha256": sha256} for key, (file, sha256) in digests.items() if sha256}


def _file(module: Any) -> str:
    """Return the module's source file; "" without one. Attributes of lazy modules are not touched."""
    names = getattr(module, "__dict__", None)
    file = names.get("__file__") if isinstance(names, dict) and isinstance(names.get("__name__"), str) else None
    return str(Path(file).absolute()) if isinstance(file, str) and file.endswith(".py") else ""


def _modules_of(players: Players) -> list[Any]:
    """Return the modules that define players."""
    objects: list[Any] = [*players.environments.values(), *players.agents.values(), *players.drivers.values()]
    named = set[str]()
    while objects:
        each = objects.pop()
        if isinstance(each, partial):
            objects += [each.func, *each.args, *each.keywords.values()]
        else:
            named.add(str(getattr(each, "__module__", "")))
    return [sys.modules[name] for name in sorted(named) if name in sys.modules]


def _is_word(key: str) -> bool:
    return key.startswith("command: ")


def _scripts(players: Players) -> Iterator[tuple[str, Path]]:
    """Yield words of commands that name text files or, after -m, modules, with their files."""
    for agent in players.agents.values():
        if not isinstance(agent, Command):
            continue
        folder = (agent.directory or Path()).absolute()
        for before, word in zip(["", *agent.words], agent.words, strict=False):
            module = word.replace(".", "/")
            names = [word] if before != "-m" else [f"{module}.py", f"{module}/__main__.py"]
            for file in (folder / name for name in names):
                if file.is_file() and not is_library(str(file)) and b"\0" not in file.read_bytes()[:1024]:
                    yield word, file


def _sha256(file: Path) -> str | None:
    try:
        return sha256_of(file.read_bytes())
    except OSError:
        return None
