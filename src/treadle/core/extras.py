"""Which extra of Treadle brings a package that is not installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict

_BRINGS = {  # imported package -> the package of an extra that it comes with, or by another name
    "starlette": "fastapi",
    "huggingface_hub": "transformers",
    "faiss": "faiss-cpu",
    "skyrl_gym": "skyrl-gym",
    "omegaconf": "skyrl-gym",
    "reasoning_gym": "reasoning-gym",
}
# package -> the extra to name, though a smaller one (`search`, `view`) brings it, too
_PREFERRED = {"httpx": "vllm", "tokenizers": "train", "pyarrow": "train"}
_REQUIREMENT = re.compile(r"([\w.-]+).*; extra == ['\"]([\w-]+)['\"]")


def extra_of(module: str) -> str | None:
    """Return the smallest extra of Treadle that brings a module: "agents" for `openai`; None if there is none."""
    members = defaultdict(set)
    for requirement in _requirements():
        if match := _REQUIREMENT.fullmatch(requirement):
            members[match[2]].add(match[1])
    package = module.partition(".")[0]
    if (preferred := _PREFERRED.get(package)) in members:
        return preferred
    extras = [extra for extra, packages in members.items() if _BRINGS.get(package, package) in packages]
    return min(
        (extra for extra in extras if extra != "dev"), key=lambda extra: (len(members[extra]), extra), default=None
    )


def how_to_install(module: str) -> str:
    """Return what to do about a missing module: "pip install 'treadle[agents]'" for `openai`.

    pip then adds to the Treadle that is installed, from wherever it came.
    """
    extra = extra_of(module)
    return f"pip install 'treadle[{extra}]'" if extra else f"install the package that has {module.partition('.')[0]!r}"


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("treadle") or []
    except importlib.metadata.PackageNotFoundError:  # running from a source tree
        return []
