"""`treadle data head` and `treadle data check`."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treadle.cli.main import main

COLUMNS = [
    "data.columns.prompt=question",
    "data.columns.ground_truth=meta.answer",
    "data.columns.extras={level: meta.level}",
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n} + 1?", "meta": {"answer": str(n + 1), "level": 1}} for n in range(count)]


@pytest.mark.parametrize("name", ["math.jsonl", "math.parquet"])
def test_head_shows_rows_as_stored_and_as_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source = write(tmp_path / name, questions(3))
    assert main(["data", "head", source, *COLUMNS, "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "question       0 + 1?" in shown and 'meta           {"answer": "1", "level": 1}' in shown
    assert "user           1 + 1?" in shown and "ground_truth   2" in shown and 'extras         {"level": 1}' in shown
    assert "2 + 1?" not in shown


@pytest.mark.parametrize("rows", ["0", "-1", "many"])
def test_head_wants_a_number_of_rows(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "head", write(tmp_path / "math.jsonl", questions(1)), "-n", rows])
    assert f"argument -n: {rows!r} is not a whole number above 0" in capsys.readouterr().err


def test_head_without_columns_shows_the_row_and_then_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "head", write(tmp_path / "math.jsonl", questions(1))]) == 2
    said = capsys.readouterr()
    assert "question       0 + 1?" in said.out
    assert "data.columns.prompt=question" in said.err


@pytest.mark.parametrize("name", ["math.jsonl", "math.parquet"])
def test_check_says_what_the_tasks_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    rows = questions(4)
    source = write(tmp_path / name, [*rows, rows[0]])
    assert main(["data", "check", source, *COLUMNS]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"train: 5 tasks of {source}",
        "  prompts of 6 to 6 characters, median 6",
        "  1 prompts occur again",
        "  5 have a ground truth",
        "  extras: level (5)",
    ]


def test_check_lists_every_row_that_is_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = questions(30)
    for number in range(2, 30, 2):
        rows[number]["question"] = number
    assert main(["data", "check", write(tmp_path / "math.jsonl", rows), *COLUMNS]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0].endswith("math.jsonl:3: prompt must be text or a JSON array of messages, got 2; write "
                             '[{"role": "user", "content": "..."}]')  # fmt: skip
    assert lines[-1] == "error: and 4 more rows are no tasks"


def test_check_goes_on_after_a_line_that_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\nx\n{"prompt": "caf\xe9"}\n{"prompt": 1}\n')
    assert main(["data", "check", str(tmp_path / "a.jsonl")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert ":2: not JSON: Expecting value" in first
    assert ":3: not JSON: 'utf-8' codec" in second and second.endswith("save the file as UTF-8")
    assert ":4: prompt must be text" in third


def test_a_recipe_is_checked_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "demo", "data.held_out.options.count=8"]) == 0
    shown = capsys.readouterr().out
    assert "train: 1440 tasks of lookup" in shown and "held_out: 8 tasks of lookup" in shown
    assert "played by: environment lookup (1440)" in shown
    source = write(tmp_path / "a.jsonl", questions(9))
    parts = ["data.train.split=all[:5]", f"data.held_out={{source: {source}, split: 'all[4:]'}}"]
    assert main(["data", "check", source, *COLUMNS, *parts]) == 2
    assert "1 held-out tasks are training tasks too, for example 'a-000005'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "data.train.source: 'nope' is not registered"),
        (["no.parquet"], "cannot read no.parquet: No such file"),
        (["demo", "data.train.options.count=x"], "count must be a whole number"),
        (["a.jsonl", "data.train.weight=3"], "train: name and weight are for a list of several sources"),
        (["math.parquet", "data.columns.prompt=x"], "no column 'x': the file has question, meta; correct data.columns"),
    ],
)
def test_wrong_input_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "math.parquet", questions(1))
    assert main(["data", "check", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
