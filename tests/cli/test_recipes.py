"""`treadle recipes`."""

import importlib
import importlib.resources
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.cli.worlds import files, treadle
from tests.forks import run
from treadle.algorithms.config import KlConfig
from treadle.cli.main import main
from treadle.core.config import REQUIRED, describe, describe_sections, load_yaml
from treadle.data.config import SourceConfig, WeightedSourceConfig
from treadle.plan.config import load_recipe, recipe_names
from treadle.training.config import OptimizerConfig


def test_the_list_has_every_recipe_and_what_it_does() -> None:
    done = treadle("recipes")
    assert done.status == 0
    lines = dict(line.split(None, 1) for line in done.out.splitlines())
    assert lines == {name: load_recipe(name).about for name in recipe_names()}


def test_show_has_every_value_with_its_meaning_and_marks_what_differs() -> None:
    done = treadle("recipes", "show", "demo", "seed=7", "training.packing=step")
    assert done.status == 0
    lines = done.out.splitlines()
    config = load_recipe("demo", ["seed=7", "training.packing=step"])
    for leaf in describe(config):
        [line] = [line for line in lines if line[2:].split(" ")[0] == leaf.path]
        overridden = leaf.path in ("seed", "training.packing")
        assert line.startswith("+ " if overridden else "  " if leaf.is_default else "* ")
        assert leaf.help in line and line.endswith(leaf.help) == (leaf.is_default or leaf.default is REQUIRED)
    assert any(line.split()[:3] == ["+", "seed", "7"] for line in lines)
    assert any(line.split()[:2] == ["*", "model.build.hidden_size"] for line in lines)
    [rate] = [line for line in lines if line.startswith("* training.optimizer.learning_rate ")]
    assert rate.split()[2] == "0.0008" and rate.endswith("peak learning rate (default: 1e-06)")
    headings = [line.split(None, 1) for line in lines]
    order = [headings.index([path, meaning]) for path, meaning in describe_sections(config).items()]
    assert order == sorted(order)  # a section's own values stand between its heading and those of its parts
    shuffle, train = (next(i for i, line in enumerate(lines) if line[2:].startswith(p)) for p in ("data.sh", "data.tr"))
    assert shuffle < train


def test_show_marks_a_part_that_the_command_line_set() -> None:
    done = treadle("recipes", "show", "demo", "data.train.options.count=9", "algorithm.kl={coef: 0.1}")
    lines = done.out.splitlines()
    options, count = [line.split() for line in lines if line.startswith("+ ")][:2]
    assert options[:2] == ["+", "data.train.options"] and options[-2:] == ["(default:", "{})"]
    assert count == ["+", "data.train.options.count", "9"]
    [coef] = [line for line in lines if line[2:].startswith("algorithm.kl.coef ")]
    assert coef.startswith("+ ") and coef.split()[2] == "0.1"
    assert sum(line.startswith("+ algorithm.kl.") for line in lines) == len(KlConfig.model_fields)


def test_show_has_the_sections_and_keys_that_are_named() -> None:
    done = treadle("recipes", "show", "demo", "training.optimizer", "seed", "seed=7")
    paths = [line.split()[1 if line[:2].strip() else 0] for line in done.out.splitlines()[:-2] if line]
    assert paths == [
        "seed",
        "training.optimizer",
        *(f"training.optimizer.{key}" for key in OptimizerConfig.model_fields),
    ]
    whole = treadle("recipes", "show", "demo", "seed=7").out
    assert all(line in whole.splitlines() for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainig"], "no section or key 'trainig'; did you mean 'training'? the sections: data, data.train,"),
        (["learning_rate"], "did you mean 'warm_start.learning_rate' or 'training.optimizer.learning_rate'?"),
        (["training", "--yaml"], "--yaml prints a whole recipe; leave out training, or --yaml"),
    ],
)
def test_a_section_that_is_not_there_is_refused_with_those_that_are(words: list[str], said: str) -> None:
    done = treadle("recipes", "show", "demo", *words)
    assert done.status == 2 and said in done.err and done.out == ""


def test_what_show_prints_into_a_pipe_is_not_padded() -> None:
    assert not [line for line in treadle("recipes", "show", "demo").out.splitlines() if re.search(r"\S {3,}|\s$", line)]


@pytest.mark.parametrize("name", recipe_names())
def test_yaml_is_itself_the_same_recipe(name: str, tmp_path: Path) -> None:
    done = treadle("recipes", "show", name, "seed=7", "--yaml")
    (tmp_path / "mine.yaml").write_text(done.out)
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(name, ["seed=7"])
    assert yaml.safe_load(done.out)["seed"] == 7


def written(folder: Path, **recipes: str) -> Path:
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(recipes))}.yaml"


def test_a_recipe_extends_another_key_by_key(tmp_path: Path) -> None:
    """By a shipped name, and by a path relative to the recipe; the resolved recipe is what is shown and saved."""
    path = written(
        tmp_path,
        mine="extends: base.yaml\ntraining: {optimizer: {learning_rate: 2e-3}}\nwarm_start: null\n",
        base="recipe: base\nextends: demo\nseed: 7\ndata: {train: {options: {count: 9}}}\n",
    )
    changes = ["seed=7", "data.train.options.count=9", "training.optimizer.learning_rate=2e-3", "warm_start=null"]
    assert load_recipe(str(path)) == load_recipe("demo", ["recipe=mine", *changes])
    assert load_recipe(str(path), ["seed=8"]).seed == 8
    assert "extends" not in treadle("recipes", "show", str(path), "--yaml").out


def test_a_file_of_tasks_begins_without_the_options_of_the_source_it_replaces(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        mine=f"extends: base.yaml\ndata: {{train: {{source: my.jsonl}}, held_out: {{source: {tmp_path}}}}}\n",
        base="extends: demo\ndata: {train: {split: 'all[:9]', options: {count: 9}}, held_out: {options: {count: 5}}}\n",
    )
    data = load_recipe(str(path)).data
    assert data.train == WeightedSourceConfig(source="my.jsonl", split="all[:9]")
    assert data.held_out == SourceConfig(source=str(tmp_path))  # a directory of files
    assert load_recipe("demo", ["data.train.source=my.parquet"]).data.train == WeightedSourceConfig(source="my.parquet")
    again = load_recipe(str(path), ["data.train.source=lookup", "data.train.options.count=4"]).data.train
    assert again == WeightedSourceConfig(source="lookup", split="all[:9]", options={"count": 4})
    demo = load_recipe("demo").data
    several = json.dumps([{"source": "my.jsonl"}, {"source": "lookup"}])
    assert load_recipe("demo", [f"data.train={several}"]).data.held_out == demo.held_out
    assert isinstance(demo.train, WeightedSourceConfig)
    other = load_recipe("demo", ["data.train.source=my_tasks:hard"]).data.train  # a generator, which may take them
    assert other == WeightedSourceConfig(source="my_tasks:hard", options=demo.train.options)


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"a": "extends: a.yaml\n"}, "extends: a.yaml -> a.yaml is a cycle"),
        ({"a": "extends: b.yaml\n", "b": "extends: a.yaml\n"}, "extends: a.yaml -> b.yaml -> a.yaml is a cycle"),
        ({"a": "extends: deom\n"}, "a.yaml: extends: no recipe 'deom'; did you mean 'demo'?"),
        ({"a": "extends: no.yaml\n"}, "a.yaml: extends: no file 'no.yaml'"),
        ({"a": "extends: [demo]\n"}, "a.yaml: extends: got ['demo'], expected one recipe"),
    ],
)
def test_a_recipe_that_cannot_be_extended(tmp_path: Path, recipes: dict[str, str], message: str) -> None:
    done = treadle("recipes", "show", str(written(tmp_path, **recipes)))
    assert (done.status, done.out) == (2, "") and message in done.error


def test_shipped_recipes_name_the_schema_that_editors_find_beside_them() -> None:
    for name in recipe_names():
        text = (importlib.resources.files("treadle.recipes") / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n"), name


def test_the_schema_of_recipes_takes_all_that_are_shipped_and_no_unknown_key() -> None:
    jsonschema: Any = importlib.import_module("jsonschema")  # without types
    validator = jsonschema.Draft202012Validator(json.loads(treadle("recipes", "schema").out))
    for name in recipe_names():
        data = load_yaml(str(importlib.resources.files("treadle.recipes") / f"{name}.yaml"))
        assert [error.message for error in validator.iter_errors(data)] == [], name
    for data in ({"training": {"group_sise": 3}}, {"training": {"group_size": "x"}}, {"sed": 1}):
        assert not validator.is_valid(data)
    assert validator.is_valid({"extends": "demo", "warm_start": None, "callbacks": ["wandb", {"name": "mlflow"}]})


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", *words], cwd=folder)


@pytest.mark.slow
def test_the_package_passes_its_own_test_and_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    done = treadle("new", "env", "die")
    assert (done.status, done.err) == (0, "")
    written = {"die/__init__.py", "die/environment.py", "die/recipe.yaml", "die/test_environment.py"}
    written.add("die/recipe.schema.json")
    assert files(tmp_path).keys() == written
    assert all("skeleton" not in (tmp_path / name).read_text() for name in written)
    tested = command(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "die")
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    checked = command(tmp_path, "treadle.cli.main", "train", "die/recipe.yaml", "--dry-run")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    words = ("orchestration.updates=2", "warm_start.steps=2", "data.train.options.count=32", "training.group_size=2")
    trained = command(tmp_path, "treadle.cli.main", "train", "die/recipe.yaml", *words, "--name", "run")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()


@pytest.mark.slow
def test_the_package_with_tools_passes_its_own_test_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    assert treadle("new", "env", "shop", "--tools").status == 0
    assert all("skeleton" not in path.read_text() for path in (tmp_path / "shop").iterdir())
    tested = command(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "shop")
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout
    words = ("shop/recipe.yaml", "orchestration.updates=10", "--name", "run")
    trained = command(tmp_path, "treadle.cli.main", "train", *words)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["held_out_success_before"] < 0.4 < 0.7 < summary["held_out_success_after"]


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "die").write_text("mine")
    done = treadle("new", "env", "die")
    assert done.status == 1
    assert "already exists, and was not changed" in done.error
    assert (tmp_path / "die").read_text() == "mine"


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


def test_head_without_columns_shows_the_row_and_then_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "head", write(tmp_path / "math.jsonl", questions(1))]) == 2
    said = capsys.readouterr()
    assert "question       0 + 1?" in said.out
    assert "data.columns.prompt=question" in said.err


def test_check_lists_every_row_that_is_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = questions(30)
    for number in range(2, 30, 2):
        rows[number]["question"] = number
    assert main(["data", "check", write(tmp_path / "math.jsonl", rows), *COLUMNS]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0].endswith("math.jsonl:3: prompt must be text or a JSON array of messages, got 2; write "
                             '[{"role": "user", "content": "..."}]')  # fmt: skip
    assert lines[-1] == "error: 4 more rows are not tasks"


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
