"""`treadle` itself: light to start, its errors single lines."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

import treadle as package
from tests.cli.conftest import Trained
from tests.cli.worlds import finish, start_treadle, treadle
from treadle.cli import recipes
from treadle.core.files import write_atomically

COMMANDS = ("train", "sft", "eval", "export", "recipes", "report", "show")


def test_help_lists_the_commands() -> None:
    done = treadle("--help")
    assert done.status == 0
    assert all(f"\n    {command} " in done.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_examples(command: str) -> None:
    done = treadle(command, "--help")
    assert done.status == 0 and f"\n  treadle {command}" in done.out.split("examples:")[1]


def test_version() -> None:
    assert treadle("--version").out == f"treadle {package.__version__}\n"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "words", [["--help"], ["recipes"], ["train", "demo", "seed=x"], ["eval", "nowhere"], ["export", "nowhere", "out"]]
)
def test_nothing_heavy_is_loaded_before_the_inputs_are_checked(words: list[str]) -> None:
    code = """
import sys
from treadle.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = ("torch", "transformers", "pyarrow", "matplotlib", "tokenizers", "fastapi", "uvicorn", "httpx", "aiohttp")
    print("loaded:", *(name for name in heavy if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr


def test_an_unknown_command() -> None:
    done = treadle("trian", "demo")
    assert done.status == 2 and "invalid choice: 'trian'" in done.err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipe_names", lambda: (_ for _ in ()).throw(_missing("torch")))
    done = treadle("recipes")
    assert done.status == 1
    assert done.error == "error: treadle recipes needs torch; install it with: pip install 'treadle[train]'"


def _missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_module_that_is_no_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipe_names", lambda: (_ for _ in ()).throw(_missing("treadle.typo")))
    with pytest.raises(ModuleNotFoundError):
        treadle("recipes")


def test_an_error_of_the_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(13, "Permission denied", "/locked/config.yaml")
    monkeypatch.setattr(recipes, "recipe_names", lambda: (_ for _ in ()).throw(error))
    done = treadle("recipes")
    assert (done.status, done.error) == (1, "error: [Errno 13] Permission denied: '/locked/config.yaml'")


@pytest.mark.parametrize("write", [Path.read_bytes, lambda path: write_atomically(path, b"")])
def test_a_directory_where_a_file_belongs_is_named(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "metrics.jsonl").mkdir()
    monkeypatch.setattr(recipes, "recipe_names", lambda: write(path))
    done = treadle("recipes")
    told = f"error: {path} is a directory where a file belongs; move it away, or name another file"
    assert (done.status, done.error) == (1, told)


def test_memory_that_pyarrow_is_refused_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate() -> list[str]:
        pyarrow.allocate_buffer(2**60)
        raise AssertionError("there was room")

    monkeypatch.setattr(recipes, "recipe_names", allocate)
    done = treadle("recipes")
    assert done.status == 1 and done.error.startswith("error: out of memory: malloc of size "), done


def test_a_reader_that_leaves_is_no_error(finished: Trained) -> None:
    process = start_treadle("show", finished.path, "--json")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    done = finish(process)
    assert (done.status, done.err) == (1, "")
