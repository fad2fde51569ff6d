"""The conformance suite: its cases, its reference and mutants, and that Treadle passes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # no stubs
import pytest

from conformance import check, example, generate, mutants, page
from conformance.adapters import treadle

ROOT = Path(__file__).resolve().parent.parent / "conformance"
CASES = check.load_cases()


def test_cases_follow_the_schema() -> None:
    schema = json.loads((ROOT / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert 80 <= len(CASES) <= 120
    for case in CASES.values():
        validator.validate(case)


def test_the_script_makes_the_cases() -> None:
    made = generate.cases()
    assert list(made) == [name for family, n in generate.FAMILIES.items() for name in _names(family.__name__, n)]
    assert made.keys() == CASES.keys()
    assert [name for name, case in made.items() if not mutants.same(case, CASES[name])] == []


def _names(family: str, count: int) -> list[str]:
    return [f"{family}-{n + 1:02}" for n in range(count)]


def test_sizes_that_a_reader_can_check() -> None:
    assert _lines(ROOT / "reference.py") <= 400
    assert {path.stem: n for path in (ROOT / "adapters").glob("*.py") if (n := _lines(path)) > 80} == {}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_noticed(name: str) -> None:
    assert any(mutants.notices(name, case) for case in CASES.values())


def test_each_case_notices_a_mutant() -> None:
    assert len(mutants.MUTANTS) >= 25
    assert [n for n, case in CASES.items() if not any(mutants.notices(name, case) for name in mutants.MUTANTS)] == []


@pytest.mark.parametrize("packing", treadle.VARIANTS)
def test_treadle_passes(packing: str) -> None:
    found = check.run(treadle, packing, CASES)
    assert {state for states in found.values() for state in states.values()} == {check.PASS}


def test_trees_are_shared_where_treadle_passes() -> None:
    algorithm = treadle.config(CASES["forks-01"], "grpo", "token_mean").model_dump_json()
    learner = treadle.learner("tree", algorithm)
    trees = learner.trees(treadle.batch_of(CASES["forks-01"]))
    assert learner.forward.shares and sum(map(len, trees)) < _tokens(CASES["forks-01"])


def _tokens(case: dict[str, Any]) -> int:
    steps = [step for group in case["groups"] for attempt in group for step in attempt["steps"]]
    return sum(len(step["prompt"]) + len(step["completion"]) for step in steps)


def test_the_page_shows_what_the_runs_gave() -> None:
    text = page.PAGE.read_text()
    assert page.with_tables(text) == text
    assert f"\n{len(CASES)} recorded episodes" in text and f"{len(mutants.MUTANTS)} mutants of the reference" in text
    written = json.loads((check.RESULTS / "treadle.json").read_text())
    assert list(written["variants"]) == list(treadle.VARIANTS) and not written["explanations"]
    for found in written["variants"].values():
        assert found == {"aspects": sorted(check.ASPECTS), "not expressible": [], "fails": [], "follows": []}


def test_a_wrong_trainer_is_caught_where_it_is_wrong() -> None:
    assert (ROOT / "example.py").read_text() in page.PAGE.read_text()
    wrong = {failure.case.rsplit("-", 1)[0] for failure in check.failures(check.run(example, "", CASES), [])}
    assert {"drift", "stripped_thoughts", "sliding_window", "compaction", "sub_agents", "forks"} <= wrong
    assert not wrong & {"append_only", "versions", "end_tokens", "failed_siblings", "retries"}


def test_an_explanation_covers_cells_and_must_stand_in_the_code() -> None:
    here = check.Explanation("why", "conformance/check.py:1", "Runs an adapter", ("advantage",), ("drift",))
    assert here.stands() and not here._replace(code="something else").stands()
    assert here.covers("drift-01", "advantage grpo") and here._replace(cases=()).covers("forks-02", "advantage rloo")
    assert not here.covers("drift-01", "tokens") and not here.covers("forks-01", "advantage grpo")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in page.ORDER if name != "treadle"])
def test_another_trainer_gives_what_the_page_shows(name: str, tmp_path: Path) -> None:
    python = Path(os.environ.get("TREADLE_PEER_VENVS", ROOT.parent / ".venv-peers")) / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}; `make conformance-{name}` makes it")
    command = [str(python), "-W", "ignore", "-m", "conformance.check", name, "--write", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    subprocess.run(command, cwd=ROOT.parent, env=environment, check=True, capture_output=True)
    assert (tmp_path / f"{name}.json").read_text() == (check.RESULTS / f"{name}.json").read_text()
