"""Missing packages, and what brings them."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.core.extras import extra_of, how_to_install

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "train"),
        ("tokenizers", "train"),
        ("pyarrow.parquet", "train"),
        ("huggingface_hub.errors", "train"),
        ("fastapi", "gateway"),
        ("starlette", "gateway"),
        ("uvicorn", "gateway"),
        ("openai", "agents"),
        ("httpx", "vllm"),
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("gguf", "gguf"),
        ("bm25s", "search"),
        ("faiss", "dense"),
        ("accelerate", "train"),
        ("datasets", "datasets"),
        ("pydantic", None),  # always there
        ("pytest", None),  # a contributor's
        ("no_such_package", None),
    ],
)
def test_the_smallest_extra_is_named(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra
    package = module.partition(".")[0]
    assert how_to_install(module) == (
        f"pip install 'treadle[{extra}]'" if extra else f"install the package that has {package!r}"
    )


def test_a_source_tree_that_is_not_installed_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert how_to_install("torch") == "install the package that has 'torch'"


def test_every_extra_that_is_mentioned_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    mentioned = {
        extra.strip()
        for page in pages
        for names in re.findall(r"(?:treadle|\.whl)\[([\w, ]+)\]", page.read_text())
        for extra in names.split(",")
    }
    assert {"train", "agents", "gateway", "vllm"} <= mentioned <= extras.keys()


# Where a module lies -> the extra that its users have installed; the longest path counts. Others need Treadle alone.
EXTRAS = {
    "algorithms": "train",
    "benchmarks": "train",
    "benchmarks/gateway.py": "gateway",
    "cli/retrieve.py": "search",
    "cli/show.py": "train",
    "cli/view.py": "view",
    "data": "train",
    "data/hub.py": "datasets",
    "engines": "train",
    "engines/vllm": "vllm",
    "envs/sql": "sql",
    "integrations/harbor": "train",
    "integrations/reasoning_gym": "reasoning-gym",
    "integrations/skyrl_gym": "skyrl-gym",
    "models": "train",
    "models/gguf.py": "gguf",
    "orchestration": "train",
    "placement": "ray",
    "recipes": "agents",
    "recipes/build_tokenizer.py": "train",
    "retrieval": "search",
    "retrieval/flat.py": "dense",
    "rollout/agents": "agents",
    "rollout/gateway": "gateway",
    "training": "train",
    "view": "view",
}
# In Pythons of their own, with the library's packages
ELSEWHERE = (
    "engines/vllm/worker",
    "integrations/harbor/child",
    "integrations/openenv/child",
    "integrations/verifiers/child",
)
DISTRIBUTIONS = {"yaml": "pyyaml", "faiss": "faiss-cpu"}
# What is part of another package's interface -> that package
PART_OF = {"starlette": "fastapi", "pydantic-core": "pydantic", "h11": "uvicorn", "omegaconf": "skyrl-gym"}
USED_IF_INSTALLED = {("rollout/agents", "anthropic"), ("recipes", "anthropic")}  # by users of that client


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def declared(project: dict[str, dict[str, list[str]]], extra: str | None) -> set[str]:
    """The packages that Treadle and an extra ask for themselves."""
    names = set()
    for requirement in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        if of_treadle := re.fullmatch(r"treadle\[(.*)\]", requirement):
            names |= {name for part in of_treadle[1].split(",") for name in declared(project, part.strip())}
        else:
            names.add(re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-"))
    return names | (declared(project, None) if extra else set())


def test_nothing_is_imported_that_the_extra_of_its_room_does_not_declare() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    undeclared = []
    for file in (ROOT / "src" / "treadle").rglob("*.py"):
        path = file.relative_to(ROOT / "src" / "treadle").as_posix()
        if path.startswith(ELSEWHERE):
            continue
        room = max((room for room in EXTRAS if f"{path}/".startswith(f"{room}/")), key=len, default=None)
        allowed = declared(project, EXTRAS[room] if room else None)
        for name in {module.partition(".")[0] for module in imported(ast.parse(file.read_text()))}:
            package = DISTRIBUTIONS.get(name, name).replace("_", "-")
            if name == "treadle" or name in sys.stdlib_module_names or (room, name) in USED_IF_INSTALLED:
                continue
            if PART_OF.get(package, package) not in allowed:
                undeclared.append(
                    f"{path} imports {name}, which {EXTRAS[room] if room else 'Treadle'} does not declare"
                )
    assert not undeclared, "\n".join(sorted(undeclared))
