"""Missing packages, and what brings them."""

import importlib.metadata
import re
import tomllib
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
