"""`treadle` itself: light to start, its errors single lines."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow
import pytest

import treadle as package
from tests.cli.conftest import Trained
from tests.cli.worlds import treadle
from treadle.cli import recipes
from treadle.cli.main import main
from treadle.core.files import write_atomically

COMMANDS = ("train", "sft", "eval", "export", "recipes", "report", "show")


def test_help_lists_the_commands_and_each_has_examples() -> None:
    done = treadle("--help")
    assert done.status == 0 and all(f"\n    {command} " in done.out for command in COMMANDS)
    for command in COMMANDS:
        assert f"\n  treadle {command}" in treadle(command, "--help").out.split("examples:")[1]


def test_version() -> None:
    assert treadle("--version").out == f"treadle {package.__version__}\n"


def test_nothing_heavy_is_loaded_before_the_inputs_are_checked() -> None:
    code = """
import contextlib, sys
from treadle.cli.main import main
for words in ("--help", "recipes", "train demo seed=x", "eval nowhere", "export nowhere out", "report nowhere"):
    with contextlib.suppress(SystemExit):
        main(words.split())
heavy = ("torch", "transformers", "pyarrow", "matplotlib", "tokenizers", "fastapi", "uvicorn", "httpx", "aiohttp")
print("loaded:", *(name for name in heavy if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr


def test_an_unknown_command() -> None:
    done = treadle("trian", "demo")
    assert done.status == 2 and "invalid choice: 'trian'" in done.err


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def missing(name: str) -> Callable[[], NoReturn]:
    return failing(ModuleNotFoundError(f"No module named {name!r}", name=name))


DIRECTORY = "error: metrics.jsonl is a directory where a file belongs; move it away, or name another file"
FAILURES: dict[str, tuple[Callable[[], object], str]] = {
    "an extra": (missing("torch"), "error: treadle recipes needs torch; install it with: pip install 'treadle[train]'"),
    "the system": (
        failing(PermissionError(13, "Permission denied", "/locked/config.yaml")),
        "error: [Errno 13] Permission denied: '/locked/config.yaml'",
    ),
    "reading a directory": (Path("metrics.jsonl").read_bytes, DIRECTORY),
    "writing a directory": (lambda: write_atomically(Path("metrics.jsonl"), b""), DIRECTORY),
    "memory": (lambda: pyarrow.allocate_buffer(2**60), "error: out of memory: malloc of size "),
}


@pytest.mark.parametrize(("fail", "error"), FAILURES.values(), ids=FAILURES)
def test_what_the_system_refuses_is_one_line(
    fail: Callable[[], object], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("metrics.jsonl").mkdir()
    monkeypatch.setattr(recipes, "recipe_names", fail)
    done = treadle("recipes")
    assert done.status == 1 and done.error.startswith(error), done


def test_a_missing_module_that_is_no_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipe_names", missing("treadle.typo"))
    with pytest.raises(ModuleNotFoundError):
        treadle("recipes")


def test_a_reader_that_leaves_is_no_error(finished: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, contextlib.redirect_stdout(out):
        assert main(["show", str(finished.path), "--json"]) == 1
    assert capsys.readouterr().err == ""
