"""`import treadle` offers exactly the documented names, each loaded when first used."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

import treadle

PUBLIC = {
    "__version__",
    "Callback",
    "ConfigError",
    "EnvStep",
    "Environment",
    "Finish",
    "Group",
    "Message",
    "Metric",
    "Recovered",
    "Reply",
    "Reward",
    "SamplingParams",
    "Step",
    "Task",
    "ToolEnvironment",
    "Trajectory",
    "TreadleError",
    "train",
}


def type_checking_imports() -> dict[str, str]:
    """Name -> module, as a type checker sees them."""
    tree = ast.parse(Path(treadle.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        found.update({alias.name: node.module for alias in node.names})
    return found


def test_the_public_names() -> None:
    assert set(treadle.__all__) == PUBLIC
    assert set(dir(treadle)) >= PUBLIC


def test_type_checkers_and_the_interpreter_see_the_same() -> None:
    assert type_checking_imports() == treadle._HOME
    assert set(treadle._HOME) == PUBLIC - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'treadle' has no attribute 'Stepp'"):
        treadle.Stepp  # noqa: B018


def test_the_version_has_one_source() -> None:
    assert version("treadle") == treadle.__version__
