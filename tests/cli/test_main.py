"""`treadle` itself: light to start, its errors single lines."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pyarrow
import pytest

from tests import forks
from tests.cli.conftest import Place, Trained
from tests.cli.worlds import treadle
from treadle.cli import recipes
from treadle.cli.commands import add_commands, load_command
from treadle.cli.console import Console, make_table
from treadle.cli.main import main
from treadle.core.files import write_atomically
from treadle.models.model_cache import PACKAGED

COMMANDS = ("train", "sft", "eval", "export", "recipes", "report", "show")


def test_help_lists_the_commands_and_each_has_examples() -> None:
    done = treadle("--help")
    assert done.status == 0 and all(f"\n    {command} " in done.out for command in COMMANDS)
    for command in COMMANDS:
        assert f"\n  treadle {command}" in treadle(command, "--help").out.split("examples:")[1]


@pytest.mark.parametrize("where", ["main._parse", "options.exit_status"])
def test_ctrl_c_before_a_command_or_while_it_is_reported_ends_without_a_word(where: str) -> None:
    """PyTorch's exit handlers, which another Ctrl-C would interrupt, are left out."""
    code = f"""
import atexit, torch
from treadle.cli import main, options
def interrupted(*_): raise KeyboardInterrupt
{where} = interrupted
atexit.register(print, "late")
main.main()
"""
    done = forks.run([sys.executable, "-c", code, "recipes"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("words", ["--help", "--version", "", "trian", *(f"{name} --help" for name in COMMANDS)])
def test_help_and_refused_arguments_load_nothing_that_they_do_not_print(words: str) -> None:
    code = f"""
import contextlib, sys
from treadle.cli.main import main
with contextlib.suppress(SystemExit):
    main({words.split()!r})
print("loaded:", *(name for name in ("numpy", "pydantic", "rich", "yaml", "asyncio", "torch") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr


def functions(parser: argparse.ArgumentParser) -> Iterator[str]:
    if run := parser.get_default("run"):
        yield run
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from functions(below)


def test_what_runs_each_command_is_there() -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser)
    found = [*functions(parser)]
    assert len(found) > len(COMMANDS) and all(callable(load_command(run)) for run in found)


def test_models_get_names_the_models_that_have_a_name() -> None:
    assert f"{', '.join(PACKAGED)}, a hub's ORG/NAME" in treadle("models", "get", "--help").out


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
        "error: /locked/config.yaml: Permission denied; choose another place, or check its permissions",
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


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(params=[80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield int(request.param)


def too_wide(out: str, width: int) -> list[str]:
    """Lines that do not fit; a path is left to the terminal to wrap, so that it can be copied."""
    lines = re.split(r"[\n\r]", ESCAPE.sub("", out))
    return [line for line in lines if len(line) > width and "/" not in line]


@pytest.mark.parametrize("words", ["report RUN", "show RUN", "show RUN g000000.0", "recipes show demo", "recipes"])
def test_what_is_printed_fits(words: str, width: int, finished: Trained) -> None:
    done = treadle(*(str(finished.path) if word == "RUN" else word for word in words.split()))
    assert done.status == 0
    assert "\x1b[" in done.out
    assert too_wide(done.out, width) == []


@pytest.mark.quick(1)
def test_a_whole_run_fits_and_ends_without_bars(width: int, place: Place) -> None:
    done = place.train("orchestration.updates=2")
    assert (done.status, done.err) == (0, "")
    assert "\x1b[?25l" in done.out and "\x1b[?25h" in done.out  # the cursor is hidden, and shown again
    assert too_wide(done.out, width) == []
    text = ESCAPE.sub("", done.out)
    assert "updates ━" in text and "evaluation ━" in text
    assert re.search(r"update 1/2  reward \d\.\d{3}  success \d\.\d{3}", text)
    assert "━" not in text[text.index("held-out success, 12 tasks") :]


def test_evaluating_keeps_its_bar_off_standard_output(width: int, finished: Trained) -> None:
    done = treadle("eval", finished.path, "--json")
    assert done.status == 0 and "\x1b" not in done.out
    assert "evaluation ━" in ESCAPE.sub("", done.err)


def test_what_is_shown_cannot_steer_a_terminal_in_tables_and_in_json_either(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\nb\x7f\u202e"
    table = make_table("x", text=("x",))
    table.add_row(hostile)
    Console().table(table)
    assert capsys.readouterr().out.splitlines()[-1] == r"a\x1b[2J\nb\x7f\u202e"
    Console().json({hostile: hostile})
    out = capsys.readouterr().out
    assert json.loads(out) == {hostile: hostile}
    assert out.isascii() and all(char == "\n" or char.isprintable() for char in out)
