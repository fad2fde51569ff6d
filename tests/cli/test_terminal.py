"""On a terminal: colours and live bars, and nothing wider than the window."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import treadle
from treadle.cli.console import Console, make_table

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(params=[80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """rich takes any output for a terminal of this width."""
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
