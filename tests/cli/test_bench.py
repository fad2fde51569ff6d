"""`treadle bench`: a table, or one JSON object."""

import json

import pytest

from treadle.cli.benchmarks import rollout, update
from treadle.cli.main import main

COLUMNS = {
    "rollout": ["engine", "sessions", "sampled tokens", "CPU s", "tokens per CPU s", "times generate"],
    "update": ["packing", "micro-batch tokens", "sequences", "tokens computed", "CPU s", "times step"],
}


def test_importing_treadle_takes_less_than_a_third_of_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "import", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    seconds = {row["statement"]: row["CPU s"] for row in report["rows"]}
    assert report["benchmark"] == "import" and 0 < seconds["import treadle"] < 0.3


@pytest.mark.parametrize("name", COLUMNS)
def test_a_benchmark_prints_a_table_or_one_json_object(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = rollout.measure(1, 1, sessions=(2,)) if name == "rollout" else update.measure(1, 1, tasks=2)
    report.print(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == name
    assert all(list(row) == COLUMNS[name] and row["CPU s"] > 0 for row in found["rows"])
    report.print(as_json=False)
    table = capsys.readouterr().out
    assert f"treadle bench {name}" in table and "CPU s" in table


def test_chain_computes_fewer_tokens_than_step() -> None:
    tokens = {row["packing"]: float(row["tokens computed"]) for row in update.measure(1, 1, tasks=2).rows}
    assert tokens["chain"] < tokens["step"]


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
