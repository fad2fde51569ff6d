"""Imports point downwards only, and the lower layers stay light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

import treadle

ROOT = Path(treadle.__file__).parent
TOP_DOWN = (
    *(
        "recipes",
        "cli",
        "view",
        "testing",
        "placement",
        "api",
        "tinker",
        "plan",
        "loop",
        "report",
        "record",
        "integrations",
        "training",
    ),
    *("algorithms", "packing", "engines", "models", "judge", "rollout"),
    *("rendering", "data", "envs", "retrieval", "workers", "core"),
)  # nobody imports recipes: they are data, and scripts that built it
LIGHT = ("core", "workers", "envs", "rendering", "rollout")
HEAVY = ("torch", "transformers", "ray", "vllm", "pyarrow", "matplotlib", "PIL")


def module_name(path: Path) -> str:
    parts = ["treadle", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that `source` imports anywhere, absolute; `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name != "treadle")
            case ast.Attribute(value=ast.Name(id="treadle"), attr=attribute):
                yield f"treadle.{attribute}"
            case ast.ImportFrom(module=base, names=names, level=level):
                parents = module.split(".") if is_package else module.split(".")[:-1]
                package = parents[: len(parents) - level + 1] if level else []
                prefix = ".".join([*package, *([base] if base else [])])
                yield from (f"{prefix}.{alias.name}" for alias in names)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module` may not import: layers above its own, and the root's names, which hide their layer."""
    own = TOP_DOWN.index(module.split(".")[1])
    wrong = []
    for name in imported(source, module, is_package):
        parts = name.split(".")
        if parts[0] != "treadle" or parts[1:] == ["__version__"]:
            continue
        if len(parts) < 2 or parts[1] not in TOP_DOWN or TOP_DOWN.index(parts[1]) < own:
            wrong.append(name)
    return wrong


def sources() -> list[Path]:
    users = {ROOT / "__init__.py", *(ROOT / "recipes").glob("skeleton*/*.py")}  # they take the public names
    return [path for path in sorted(ROOT.rglob("*.py")) if path not in users]


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert packages <= set(TOP_DOWN)
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    assert wrong_imports(path.read_text(), module_name(path), path.name == "__init__.py") == []


def test_no_modules_import_each_other() -> None:
    """Imports for types alone do not count."""
    modules = {module_name(path): path for path in sources()}

    def needed(module: str) -> set[str]:
        tree = ast.parse(modules[module].read_text())
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
        names = imported(ast.unparse(tree), module, modules[module].name == "__init__.py")
        return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys() - {module}

    TopologicalSorter({module: needed(module) for module in modules}).prepare()  # raises CycleError, with their names


def test_components_are_given_their_settings_not_the_whole_configuration() -> None:
    named = {path.relative_to(ROOT).parts[0] for path in sources() if re.search(r"\bRunConfig\b", path.read_text())}
    assert named == {"plan", "api", "cli"}


FACES = {
    *("record", "run_directory", "address", "selection", "trajectory_files", "recording", "describe", "group_search"),
    "checkpoint_retention",
}


@pytest.mark.parametrize("room", ["cli", "report", "view"])
def test_who_shows_a_run_reads_it_by_its_record(room: str) -> None:
    """Not by the ledger's tables, or the files of tokens; the state of the loop is what an update is counted from."""
    names = {name for path in sources() if path.parent.name == room for name in imported(path.read_text(), "treadle")}
    inside = {name.split(".")[2] for name in names if name.startswith("treadle.record.")}
    assert inside <= (FACES | {"ledger_reader"} if room == "report" else FACES)
    assert {name for name in names if ".ledger_reader." in name} <= {"treadle.record.ledger_reader.LoopState"}


def test_the_light_layers_load_nothing_heavy() -> None:
    """In a fresh process: the public names and every module from core to rollout."""
    modules = [module_name(path) for path in sources() if module_name(path).split(".")[1] in LIGHT]
    assert "treadle.core.types" in modules
    code = f"""
import importlib, sys
import treadle
assert not any(name.startswith("treadle.") for name in sys.modules), "import treadle loads its modules"
assert "numpy" not in sys.modules, "import treadle loads numpy"
for name in {[*modules, "treadle"]!r}:
    importlib.import_module(name)
print(*sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr, result.stdout.split()) == (0, "", [])


PUBLIC = {
    *(
        "__version__",
        "Callback",
        "ConfigError",
        "EnvStep",
        "Environment",
        "Finish",
        "Form",
        "Group",
        "Message",
        "Metric",
    ),
    *("InfrastructureError", "Recovered", "Reply", "Reward", "SamplingParams", "Step", "Task", "ToolEnvironment"),
    *("Trajectory", "TreadleError", "evaluate", "export", "load_run", "resume", "sft", "train"),
}


def type_checking_imports() -> dict[str, str]:
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
