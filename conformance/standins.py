"""Empty modules in the place of servers that need a GPU to import and that nothing here calls."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock


class _Finder:
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None: ...


def stand_in(*packages: str) -> None:
    """Import these packages, and all of their modules, as empty ones from now on."""
    sys.meta_path.insert(0, _Finder(packages))
