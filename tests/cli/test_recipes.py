"""`treadle recipes`."""

from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Place
from tests.cli.worlds import treadle
from treadle.algorithms.config import KlConfig
from treadle.core.config import REQUIRED, describe, describe_sections
from treadle.orchestration.config import load_recipe, recipe_names


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
    assert any(line.split()[:2] == [".hidden_size", "96"] for line in lines)
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
    assert count == ["+", ".count", "9"]
    [coef] = [line for line in lines if line[2:].startswith("algorithm.kl.coef ")]
    assert coef.startswith("+ ") and coef.split()[2] == "0.1"
    assert sum(line.startswith("+ algorithm.kl.") for line in lines) == len(KlConfig.model_fields)


@pytest.mark.parametrize("name", recipe_names())
def test_yaml_is_itself_the_same_recipe(name: str, tmp_path: Path) -> None:
    done = treadle("recipes", "show", name, "seed=7", "--yaml")
    (tmp_path / "mine.yaml").write_text(done.out)
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(name, ["seed=7"])
    assert yaml.safe_load(done.out)["seed"] == 7


def test_a_recipe_file_can_be_shown(place: Place) -> None:
    assert "sums of two digits by a model of one layer" in treadle("recipes", "show", place.recipe).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "no recipe 'nope'; shipped: "),
        (["demo", "seed=x"], "seed=x: got 'x', expected a valid integer"),
        (["demo", "training.pakcing=step"], "did you mean 'training.packing'?"),
    ],
)
def test_wrong_input(words: list[str], message: str) -> None:
    done = treadle("recipes", "show", *words)
    assert (done.status, done.out) == (2, "") and message in done.error


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    done = treadle("recipes", "show", tmp_path / "list.yaml")
    assert done.status == 2 and "expected a mapping of keys to values, found a list" in done.error


def written(folder: Path, **recipes: str) -> Path:
    """Recipes by name; returns the path of the first."""
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
