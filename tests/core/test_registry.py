"""Names are entry points or `module:attribute`; whatever cannot be found says what could be."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.registry import extra_of, how_to_install

ENTRIES = [
    EntryPoint("lookup", "pathlib:Path", "treadle.environments"),
    EntryPoint("arithmetic", "pathlib:PurePath.joinpath", "treadle.environments"),
    EntryPoint("lookup", "pathlib:PosixPath", "treadle.tasks"),
    EntryPoint("twice", "pathlib:Path", "treadle.tasks"),
    EntryPoint("twice", "pathlib:PurePath", "treadle.tasks"),
    EntryPoint("same", "pathlib:Path", "treadle.tasks"),
    EntryPoint("same", "pathlib:Path", "treadle.tasks"),
    EntryPoint("broken", "no_such_package:thing", "treadle.tasks"),
]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "treadle.core.registry._entry_points", lambda group, path: EntryPoints(ENTRIES).select(group=group)
    )


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that is not importable yet; modules imported from it are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("entries")
def test_a_registered_name_is_looked_up_in_its_group() -> None:
    assert registry.resolve("environments", "lookup") is Path
    assert registry.resolve("environments", "arithmetic") is Path.joinpath
    assert registry.resolve("tasks", "lookup") is type(Path())
    assert registry.resolve("tasks", "same") is Path


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    ("group", "name", "message"),
    [
        (
            "environments",
            "lokup",
            "environments: 'lokup' is not registered; did you mean 'lookup'\\? .*arithmetic, lookup",
        ),
        ("environments", "zzz", r"'zzz' is not registered; registered: arithmetic, lookup; or write 'module:attr"),
        ("environments", "", "'' is not registered"),
        ("environments", "my.module.Env", "did you mean 'my.module:Env'?"),
        ("shaping", "lookup", "'lookup' names no module; write 'module:attribute'"),
        ("agents", "tests/no.py:play", r"leave out \.py: 'tests/no:play'"),
        ("tasks", "pathlib:Pth", "did you mean 'pathlib:Path'"),
        ("tasks", "twice", "registered as pathlib:Path and pathlib:PurePath"),
        ("tasks", "broken", "tasks: 'broken': cannot import 'no_such_package': No module named"),
        ("tasks", ":thing", "must be 'module:attribute'"),
        ("tasks", "pathlib:", "must be 'module:attribute'"),
        ("tasks", "pathlib:Path.", "must be 'module:attribute'"),
        ("tasks", ".pathlib:Path", "must be 'module:attribute'"),
        ("tasks", "a:b:c", "cannot import 'a'"),
        ("tasks", "pathlib:Pth", r"'pathlib' \(.*pathlib.*\) has no 'Pth'"),
        ("tasks", "pathlib:Path.nothing", "has no 'Path.nothing'"),
    ],
)
def test_what_cannot_be_found_is_a_config_error(group: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.resolve(group, name)


def test_a_module_in_the_current_directory_is_found(user_folder: Path) -> None:
    (user_folder / "own_envs.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    assert registry.resolve("environments", "own_envs:Outer.Inner").__qualname__ == "Outer.Inner"
    assert registry.resolve("environments", " own_envs : Outer ").__qualname__ == "Outer"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("from pathlib import Pth\n", "cannot import name 'Pth'"),
        ("def broken(:\n", "invalid syntax"),
    ],
)
def test_a_user_module_that_cannot_be_imported_says_why(user_folder: Path, source: str, reason: str) -> None:
    (user_folder / "bad_envs.py").write_text(source)
    with pytest.raises(ConfigError, match=reason) as caught:
        registry.resolve("environments", "bad_envs:Env")
    assert "'bad_envs'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError | SyntaxError)


def test_a_bug_in_a_user_module_keeps_its_traceback(user_folder: Path) -> None:
    (user_folder / "buggy_envs.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        registry.resolve("environments", "buggy_envs:Env")


@pytest.mark.parametrize("group", ["environments", "tasks", "demonstrations"])
def test_what_treadle_registers_exists(group: str) -> None:
    shipped = [entry.name for entry in entry_points(group=f"treadle.{group}") if entry.value.startswith("treadle.")]
    assert {"lookup", "arithmetic"} <= set(shipped)
    for name in shipped:
        assert callable(registry.resolve(group, name))


ROOT = Path(__file__).parents[2]
LOCK = ROOT / "locks" / "treadle.txt"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        *(("torch", "train"), ("tokenizers", "train"), ("pyarrow.parquet", "train")),
        *(("huggingface_hub.errors", "train"), ("fastapi", "view"), ("starlette", "view")),
        *(("uvicorn", "view"), ("openai", "train"), ("httpx", "train"), ("tensorboard", "tensorboard")),
        *(("wandb", "wandb"), ("gguf", "train"), ("bm25s", "search"), ("faiss", "dense")),
        *(("accelerate", "train"), ("datasets", "datasets"), ("PIL.Image", "images")),
        ("pydantic", None),  # always there
        ("pytest", None),  # a contributor's
        ("no_such_package", None),
    ],
)
def test_the_smallest_extra_is_named(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra
    package = module.partition(".")[0]
    assert how_to_install(module) == (
        f"pip install 'treadle[{extra}]'" if extra else f"install the package with {package!r}"
    )


def test_a_source_tree_that_is_not_installed_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert how_to_install("torch") == "install the package with 'torch'"


def test_every_extra_that_is_mentioned_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    mentioned = {
        extra.strip()
        for page in pages
        for names in re.findall(r"(?:treadle|\.whl\)?)\[([\w, -]+)\]", page.read_text())
        for extra in names.split(",")
    }
    assert {"train", "view", "search", "ray"} <= mentioned <= extras.keys()


# Where a module lies -> the extras that its users have installed; the longest path counts. Others need Treadle alone.
EXTRAS = {
    "api": "train",
    "algorithms": "train",
    "cli/retrieve.py": "search",
    "cli/serve.py": "view",
    "cli/show.py": "train",
    "core/images.py": "images",
    "data": "train",
    "data/table.py": "datasets",
    "engines": "train",
    "envs/sql": "train",
    "integrations/harbor": "train",
    "integrations/reasoning_gym": "reasoning-gym",
    "integrations/skyrl_gym": "skyrl-gym",
    "judge": "train",
    "models": "train",
    "loop": "train",
    "placement": "ray",
    "plan": "train",
    "recipes": "train",
    "record": "train",
    "report": "train",
    "retrieval": "search",
    "retrieval/flat.py": "dense",
    "rollout/agents": "train",
    "rollout/chat_endpoint.py": "train",
    "rollout/gateway": "train",
    "tinker": "tinker",
    "training": "train",
    "view": "view",
}
# In Pythons of their own, with the library's packages; an example for users of that client; a script of ours
ELSEWHERE = (
    "engines/vllm/worker",
    "integrations/harbor/child",
    "integrations/openenv/child",
    "integrations/verifiers/child",
    "recipes/agents/with_anthropic.py",
    "recipes/build_tokenizer.py",
)
DISTRIBUTIONS = {"yaml": "pyyaml", "faiss": "faiss-cpu", "google": "protobuf", "PIL": "pillow"}
# What is part of another package's interface -> that package
PART_OF = {"starlette": "fastapi", "pydantic-core": "pydantic", "h11": "uvicorn", "omegaconf": "skyrl-gym"}
USED_IF_INSTALLED = {("rollout/agents", "anthropic")}  # by users of that client


def imported(tree: ast.AST) -> Iterator[str]:
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    for_types = {node for branch in branches if "TYPE_CHECKING" in ast.dump(branch.test) for node in branch.body}
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def declared(project: dict[str, Any], extras: str | None) -> set[str]:
    names = set()
    parts = [project["optional-dependencies"][extra.strip()] for extra in extras.split(",")] if extras else []
    for requirement in chain(project["dependencies"], *parts):
        if of_treadle := re.fullmatch(r"treadle\[(.*)\]", requirement):
            names |= declared(project, of_treadle[1])
        else:
            names.add(re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-"))
    return names


def modules() -> Iterator[tuple[str, str | None, set[str]]]:
    for file in (ROOT / "src" / "treadle").rglob("*.py"):
        path = file.relative_to(ROOT / "src" / "treadle").as_posix()
        if path.startswith(ELSEWHERE):
            continue
        room = max((room for room in EXTRAS if f"{path}/".startswith(f"{room}/")), key=len, default=None)
        names = {module.partition(".")[0] for module in imported(ast.parse(file.read_text()))}
        yield (
            path,
            room,
            {name for name in names - sys.stdlib_module_names - {"treadle"} if (room, name) not in USED_IF_INSTALLED},
        )


def test_nothing_is_imported_that_the_extra_of_its_room_does_not_declare() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    undeclared = []
    for path, room, imports in modules():
        allowed = declared(project, EXTRAS[room] if room else None)
        for name in imports:
            package = DISTRIBUTIONS.get(name, name).replace("_", "-")
            if PART_OF.get(package, package) not in allowed:
                undeclared.append(
                    f"{path} imports {name}, which {EXTRAS[room] if room else 'Treadle'} does not declare"
                )
    assert not undeclared, "\n".join(sorted(undeclared))


TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
FOR_TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
IMPORT = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    installed = importlib.metadata.distribution("torch")
    for name in {file.parts[0] for file in installed.files or [] if ".." not in file.parts}:
        (folder / name).symlink_to(Path(str(installed.locate_file(name))))
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("extras")
@pytest.mark.parametrize("extra", sorted({*EXTRAS.values(), *FOR_TRACKERS}))
def test_an_extra_alone_brings_what_its_rooms_import(extra: str, torch_alone: Path, tmp_path: Path) -> None:
    """In an empty environment: each module of its rooms, and whatever these import later.

    All environments have one place, so that what is compiled for one is there for the next.
    """
    place = torch_alone.parent / "venv"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {FOR_TRACKERS[extra]} if extra in FOR_TRACKERS else set[str]()
    for path, room, imports in modules():
        if room and EXTRAS[room] == extra:
            names |= {"treadle." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), *imports}
    uv, wanted = str(Path(sys.executable).with_name("uv")), [f"{ROOT}[{extra}]"]
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], check=True)
    if "torch" in declared(project, extra):
        [packages] = place.glob("lib/*/site-packages")
        (packages / "torch.pth").write_text(str(torch_alone))
        wanted += TORCH_NEEDS
    (tmp_path / "no_torch.txt").write_text("torch; sys_platform == 'never'")
    python = place / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "--constraint", str(LOCK)]
    subprocess.run([*install, "--override", str(tmp_path / "no_torch.txt"), *wanted], check=True, capture_output=True)
    compiled = {**os.environ, "PYTHONPYCACHEPREFIX": str(torch_alone.parent / "compiled")}
    done = subprocess.run([python, "-c", IMPORT, *sorted(names)], capture_output=True, text=True, env=compiled)
    assert done.returncode == 0, done.stderr
