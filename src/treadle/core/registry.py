"""The one registry: a name is a registered entry point, or `module:attribute`.

Treadle's own environments are registered like any package's, in a `pyproject.toml` under
`[project.entry-points."treadle.environments"]`. Unpackaged code is named `my_module:MyEnvironment`. The error for a
missing package names the extra of Treadle that installs it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from treadle.core.config import Config, build
from treadle.core.errors import ConfigError

C = TypeVar("C", bound=Config)
_BRINGS = {  # import name -> distribution in an extra that provides it
    "starlette": "fastapi",
    "huggingface_hub": "transformers",
    "faiss": "faiss-cpu",
    "PIL": "pillow",
    "google": "protobuf",
    "skyrl_gym": "skyrl-gym",
    "omegaconf": "skyrl-gym",
    "reasoning_gym": "reasoning-gym",
}
# package -> preferred extra, if several provide it
_PREFERRED = {"fastapi": "view", "uvicorn": "view", "httpx": "train", "tokenizers": "train", "pyarrow": "train"}
_REQUIREMENT = re.compile(r"([\w.-]+).*; extra == ['\"]([\w-]+)['\"]")


class NoOptions(Config):
    """Options type of components without options."""


def resolve(group: str, name: str, setting: str = "") -> Any:
    """Return the object that `name` stands for in `group` (`environments`, `engines`, `policy_losses`, ...).

    setting: the configuration's key or the command's option that chose it, for errors (default: the group).

    `resolve("environments", "lookup")` loads the entry point `lookup` of `treadle.environments`;
    `resolve("environments", "my_module:Outer.Inner")` imports `my_module`, also from the current directory.
    Raises ConfigError for an unknown name, a module that cannot be imported, or a missing attribute.
    """
    where = f"{setting or group}: {name!r}"
    return _load(name if ":" in name else _target(group, name, where), where)


def check_name(group: str, name: str, setting: str = "") -> None:
    """Raise ConfigError, as `resolve` does, for a name that is not registered. Imports nothing."""
    if ":" not in name:
        _target(group, name, f"{setting or group}: {name!r}")


def build_options(options_type: type[C], options: Mapping[str, Any], setting: str, name: str) -> C:
    """Return the options of a registered loss, advantage, engine or driver as an instance of its options type.

        build_options(GspoOptions, {"scope": "step"}, "algorithm.policy_loss_options", "gspo")

    setting: key of the options. name: component they belong to. Raises ConfigError for an unknown option, a wrong or
    missing value, or any option of a component without options.
    """
    if options and not options_type.model_fields:
        raise ConfigError(f"{setting} is set, but {name!r} has no options; leave it out")
    return build(options_type, options, setting)


def _target(group: str, name: str, where: str) -> str:
    registered = _registered(group)
    if name not in registered:
        near = [other for other in sorted(registered) if other.startswith(f"{name}_")]  # ppo: ppo_clip
        near = near or difflib.get_close_matches(name, sorted(registered), n=1)
        module, _, attribute = name.rpartition(".")
        meant = f"did you mean {near[0]!r}? " if near else f"did you mean '{module}:{attribute}'? " if module else ""
        if not registered:
            raise ConfigError(f"{where} names no module; {meant}write 'module:attribute'")
        known = f"registered: {', '.join(sorted(registered))}; or"
        raise ConfigError(f"{where} is not registered; {meant}{known} write 'module:attribute'")
    targets = registered[name]
    if len(targets) > 1:
        raise ConfigError(f"{where} is registered as {' and '.join(sorted(targets))}; write the one you mean")
    return targets.pop()


def names(group: str) -> list[str]:
    return sorted(_registered(group))


def _registered(group: str) -> dict[str, set[str]]:
    """Return name -> targets. Several if installed packages registered the same name for different things."""
    targets: dict[str, set[str]] = {}
    for entry in _entry_points(f"treadle.{group}", tuple(sys.path)):
        targets.setdefault(entry.name, set()).add(entry.value)
    return targets


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Return a group's entry points. path: `sys.path`, as the cache key, because scanning all packages takes 10 ms."""
    return importlib.metadata.entry_points(group=group)


def _load(target: str, where: str) -> Any:
    module_name, _, attribute = (part.strip() for part in target.partition(":"))
    if not module_name or not all(attribute.split(".")) or module_name.startswith("."):
        raise ConfigError(f"{where} must be 'module:attribute', for example 'my_module:MyEnvironment'")
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        # Appended, not prepended: a user's `random.py` must not shadow the standard library's.
        sys.path.append(here)
    # The module may be newer than Python's cached listing of its folder.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        # Anything else that importing a module raises is a bug in it, and its traceback helps most.
        missing = (isinstance(error, ModuleNotFoundError) and error.name) or module_name
        is_own = f"{module_name}.".startswith(f"{missing}.")
        hint = "" if is_own else f"; {how_to_install(missing)}"
        if is_own and module_name.endswith(".py"):
            hint = f"; leave out .py: '{module_name.removesuffix('.py')}:{attribute}'"
        raise ConfigError(f"{where}: cannot import {module_name!r}: {error}{hint}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        place = getattr(module, "__file__", None) or "a namespace package"
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean '{module_name}:{near[0]}'?" if near else ""
        raise ConfigError(f"{where}: {module_name!r} ({place}) has no {attribute!r}: {error}{hint}") from error


def extra_of(module: str) -> str | None:
    """Return the smallest extra of Treadle that installs a module: "train" for `openai`; None if no extra does."""
    try:
        requirements = importlib.metadata.requires("treadle") or []
    except importlib.metadata.PackageNotFoundError:  # running from a source tree
        return None
    members = defaultdict(set)
    for requirement in requirements:
        if match := _REQUIREMENT.fullmatch(requirement):
            members[match[2]].add(match[1])
    package = _BRINGS.get(name := module.partition(".")[0], name)
    if (preferred := _PREFERRED.get(package)) in members:
        return preferred
    extras = [extra for extra, packages in members.items() if package in packages]
    return min((e for e in extras if e != "dev"), key=lambda extra: (len(members[extra]), extra), default=None)


def how_to_install(module: str) -> str:
    """Return the remedy for a missing module: "pip install 'treadle[train]'" for `openai`."""
    extra = extra_of(module)
    return f"pip install 'treadle[{extra}]'" if extra else f"install the package with {module.partition('.')[0]!r}"
