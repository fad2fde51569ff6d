"""Names are entry points or `module:attribute`; whatever cannot be found says what could be."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest

from treadle.core import registry
from treadle.core.errors import ConfigError

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
def test_an_unknown_name_comes_with_the_nearest_and_all_others() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.resolve("environments", "lokup")
    message = str(caught.value)
    assert message.startswith("environments: 'lokup' is not registered; did you mean 'lookup'?")
    assert "registered: arithmetic, lookup" in message


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    ("group", "name", "message"),
    [
        (
            "environments",
            "zzz",
            r"'zzz' is not registered; registered: arithmetic, lookup; or write 'module:attr",
        ),
        ("environments", "", "'' is not registered"),
        ("environments", "my.module.Env", "did you mean 'my.module:Env'?"),
        ("shaping", "lookup", "'lookup' is not registered; nothing is; write 'module:attribute'"),
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
