"""Configuration: strict, rejected with errors that name the key and the fix, and stable through YAML."""

import ast
import importlib
import math
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

import treadle
from treadle.core.config import (
    REQUIRED,
    Config,
    FieldLine,
    _alias_paths,
    apply_overrides,
    build,
    describe,
    describe_sections,
    dump_yaml,
    load_yaml,
    parse_yaml,
    paths,
)
from treadle.core.errors import ConfigError
from treadle.plan.config import RunConfig


class Packing(StrEnum):
    STEP = "step"
    TREE = "tree"


class Optimizer(Config):
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="of AdamW")
    warmup: int | float | None = Field(None, description="steps, or a fraction of them")


class Training(Config):
    steps: int = Field(description="optimizer steps")
    optimizer: Optimizer = Field(Optimizer(learning_rate=0.5), description="how weights move")
    packing: Packing = Packing.STEP
    """layout of the forward pass"""


class Recipe(Config):
    name: str = Field("demo", description="of the run")
    seed: int = Field(0, ge=0, description="of every draw")
    training: Training = Field(description="the learner")
    evaluation: Optimizer | None = Field(None, description="absent: none")
    datasets: tuple[Optimizer, ...] = Field((), description="several")
    output: Path | None = Field(None, description="run directory")
    stop: tuple[str, ...] = Field((), description="stop strings")
    resume: bool = Field(False, description="go on")

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.resume and self.output is None:
            raise ConfigError("resume = true needs output; set output=runs/NAME")
        return self


MINIMAL: dict[str, Any] = {"training": {"steps": 3}}


def problems(data: dict[str, Any], source: str = "", overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(Recipe, data, source, overrides)
    return str(caught.value).splitlines()


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# build


def test_plain_data_becomes_typed() -> None:
    recipe = build(
        Recipe, {"training": {"steps": 3, "packing": "tree"}, "stop": ["a"], "output": "runs/x", "evaluation": {}}
    )
    assert recipe.training.packing is Packing.TREE
    assert (recipe.stop, recipe.output, recipe.evaluation) == (("a",), Path("runs/x"), Optimizer())


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"seed": "yes"}, "seed: got 'yes', expected a valid integer"),
        ({"seed": True}, "seed: got True, expected a valid integer"),
        ({"seed": "7"}, "seed: got '7', expected a valid integer"),
        ({"seed": 1.5}, "seed: got 1.5, expected a valid integer"),
        ({"seed": -1}, "seed: got -1, expected greater than or equal to 0"),
        ({"name": 7}, "name: got 7, expected a valid string (quote it)"),
        ({"resume": "yes"}, "resume: got 'yes', expected a valid boolean"),
        ({"stop": "</a>"}, "stop: got '</a>', expected a valid array"),
        ({"training": 3}, "training: got 3, expected an object"),
        ({"training": {"steps": None}}, "training.steps: got None, expected a valid integer"),
        ({"training": {"steps": 3, "packing": "row"}}, "training.packing: got 'row', expected 'step' or 'tree'"),
        (
            {**MINIMAL, "datasets": [{}, {"learning_rate": 0}]},
            "datasets.1.learning_rate: got 0, expected greater than 0",
        ),
        (
            {**MINIMAL, "evaluation": {"warmup": "few"}},
            "evaluation.warmup: got 'few', expected a valid integer or a valid number",
        ),
        ({"training": {}}, "missing key 'training.steps': optimizer steps"),
        ({}, "missing key 'training': the learner"),
        ({**MINIMAL, "resume": True}, "resume = true needs output; set output=runs/NAME"),
    ],
)
def test_a_problem_is_one_line_with_path_value_and_expectation(data: dict[str, Any], line: str) -> None:
    assert problems({**MINIMAL, **data} if data else {}) == [line]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"sed": 1}, "unknown key 'sed'; did you mean 'seed'?"),
        ({"training": {"steps": 3, "stepz": 4}}, "unknown key 'training.stepz'; did you mean 'training.steps'?"),
        ({"steps": 4}, "unknown key 'steps'; did you mean 'training.steps'?"),
        (
            {"warmup": 4},
            "unknown key 'warmup'; did you mean 'training.optimizer.warmup' or 'evaluation.warmup' "
            "or 'datasets.warmup'?",
        ),
        ({"datasets": [{"beta": 1}]}, "unknown key 'datasets.0.beta'; did you mean 'datasets.0.betas'?"),
        ({"evaluation": {"zzz": 1}}, "unknown key 'evaluation.zzz'; known here: learning_rate, betas, warmup"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_known_one(data: dict[str, Any], line: str) -> None:
    assert problems({**MINIMAL, **data}) == [line]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lr", "training.optimizer.learning_rate"),
        ("training.lr", "training.optimizer.learning_rate"),
        ("algorithm.beta", "algorithm.kl.coef"),
        ("num_generations", "training.group_size"),
        ("algorithm.epsilon", "algorithm.policy_loss_options.eps_low"),
        ("epsilon_high", "algorithm.policy_loss_options.eps_high"),
        ("scale_rewards", "algorithm.advantage_options.norm_by_std"),
        ("max_steps", "orchestration.updates"),
        ("max_steps", "rollout.max_steps"),
        ("training.batch_size", "training.tasks_per_update"),
        ("loss_type", "algorithm.reduction"),
        ("gradient_accumulation_steps", "training.max_tokens_per_microbatch"),
        ("peft_config", "training.lora"),
        ("warmup_ratio", "training.optimizer.warmup"),
        ("report_to", "callbacks"),
        ("max_prompt_length", "rollout.max_input_tokens"),
        ("rollout.max_new_tokens", "rollout.max_completion_tokens"),
        ("training.lora_r", "training.lora.rank"),
        ("model_name_or_path", "model.path"),
        ("training.save_steps", "orchestration.checkpoint_every"),
        ("bf16", "training.precision"),
        ("reward_funcs", "reward"),
    ],
)
def test_other_libraries_names_lead_to_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, {"data": {"train": {"source": "x"}}, "model": {"path": "x"}}, "", [f"{theirs}=1"])
    assert f"unknown key {theirs!r}; did you mean " in str(caught.value) and repr(ours) in str(caught.value)
    assert "During handling" not in "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in "".join(traceback.format_exception(caught.value))


def test_what_other_libraries_names_stand_for_exists() -> None:
    ours = list(paths(RunConfig))
    for name, alias in RunConfig.aliases.items():
        if not alias.startswith("("):
            assert len(_alias_paths(RunConfig, name)) >= len(alias.split(", ")), name
            same = {path for path in ours if path.rpartition(".")[2] == name}
            assert same <= {*_alias_paths(RunConfig, name)}, name  # our keys of that name are named, too


def test_settings_that_others_have_and_the_likeliest_are_said_first() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'output_dir' \(--runs and --name choose the directory"):
        build(RunConfig, {}, "", ["output_dir=x"])
    with pytest.raises(ConfigError, match=r"did you mean 'training\.optimizer\.learning_rate' or 'warm_start\.lea"):
        build(RunConfig, {}, "", ["lr=1"])


def test_all_problems_come_at_once_each_with_its_source() -> None:
    lines = problems({"seed": "x", "nmae": "y", "training": {}}, "runs/a.yaml")
    assert len(lines) == 3
    assert all(line.startswith("runs/a.yaml: ") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["seed=-1"], ["seed=-1: got -1, expected greater than or equal to 0"]),
        (["name=x", "seed=1", "seed=x"], ["seed=1 seed=x: got 'x', expected a valid integer"]),
        (["training.stepps=3"], ["training.stepps=3: unknown key 'training.stepps'; did you mean 'training.steps'?"]),
        (["evaluation.learning_rate=0"], ["evaluation.learning_rate=0: got 0, expected greater than 0"]),
        (["training={steps: x}", "name=y"], ["training={steps: x}: training.steps: got 'x', expected a valid integer"]),
        (["resume=true"], ["resume=true: resume = true needs output; set output=runs/NAME"]),
    ],
)
def test_an_override_is_to_blame_for_what_it_breaks(overrides: list[str], lines: list[str]) -> None:
    assert problems(MINIMAL, "a.yaml", overrides) == lines


@given(st.sets(st.sampled_from(["seed=x", "name=7", "stop=a", "resume=3", "training.steps=x", "sed=1"]), min_size=1))
def test_every_problem_is_blamed_on_the_override_that_made_it(overrides: set[str]) -> None:
    lines = problems(MINIMAL, "a.yaml", sorted(overrides))
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(overrides)


@pytest.mark.parametrize("key", ["datasets", "stop", "note", "options"])
def test_null_is_what_is_empty_by_default_in_files_and_in_overrides(key: str) -> None:
    class World(Recipe):
        note: str = Field("", description="free text")
        options: dict[str, Any] = Field({}, description="of the world")

    plain = build(World, MINIMAL)
    assert build(World, {**MINIMAL, key: None}) == plain
    assert build(World, {**MINIMAL, key: "replaced"}, overrides=[f"{key}=null"]) == plain
    assert build(World, MINIMAL, overrides=[f"{key}="]) == plain


def test_null_is_no_value_of_what_has_another_default() -> None:
    with pytest.raises(ConfigError, match=r"^seed=: got None, expected a valid integer$"):
        build(Recipe, MINIMAL, overrides=["seed="])


# overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("5e-4", 5e-4), ("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("1.", 1.0), (".inf", math.inf), ("7", 7)),
        *(("-7", -7), ("10_000", 10_000), ("0x10", 16), ("010", "010"), ("1:30", "1:30")),
        *(("2024-01-01", "2024-01-01"), ("true", True), ("yes", "yes"), ("off", "off"), ("null", None), ("~", None)),
        *(("", None), ("[1, 5e-4, a]", [1, 5e-4, "a"]), ("{a: 1}", {"a": 1}), ("'7'", "7"), ("a=b", "a=b")),
        *(("1e", "1e"), ("e5", "e5"), (".", ".")),
    ],
)
def test_override_values_are_yaml(text: str, value: Any) -> None:
    found = apply_overrides({}, [f"key={text}"])["key"]
    assert found == value
    assert type(found) is type(value)


def test_overrides_reach_into_nested_mappings_and_leave_the_input_alone() -> None:
    data = {"training": {"steps": 3, "optimizer": {"betas": [1, 2]}}, "evaluation": None}
    frozen = repr(data)
    changed = apply_overrides(
        data, ["training.optimizer.learning_rate=5e-4", "training.steps=4", "training.steps=5", "evaluation.warmup=1"]
    )
    assert changed == {
        "training": {"steps": 5, "optimizer": {"betas": [1, 2], "learning_rate": 5e-4}},
        "evaluation": {"warmup": 1},
    }
    assert repr(data) == frozen


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "'seed' must look like key.path=value"),
        ("=3", "'=3' must look like key.path=value"),
        ("training..steps=3", "must look like key.path=value"),
        ("training.=3", "must look like key.path=value"),
        ("training.steps.deep=3", "'training.steps' is 3, which has no keys"),
        ("stop.0=a", r"'stop' is \['x'\], which has no keys"),
        *(("name=[a", "quote the value"), ("name=@home", "quote the value")),
        *(("name={a: 1, a: 2}", "'a' appears twice"), ("name=a: b: c", "quote the value")),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides({"training": {"steps": 3}, "stop": ["x"]}, [override])


# files


def test_a_file_is_read_as_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "# a comment\ntraining:\n  steps: 3\n  lr: 5e-4\nname: añb\n")
    assert load_yaml(path) == {"training": {"steps": 3, "lr": 5e-4}, "name": "añb"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of keys to values, found nothing"),
        *(("- a\n", "found a list"), ("just text\n", "found a str"), ("a: 1\nb: [1\nc: 2\n", r"recipe\.yaml:3: ")),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r"recipe\.yaml:4: key 'c' appears twice"),
        ("a: 1\ntrue: 2\n", r"recipe\.yaml:2: key True is not a string"),
        ("a: 1\n? [1]\n: 2\n", r"recipe\.yaml:2: key \[1\] is not a string"),
        ("a: !!python/object:os.system 1\n", r"recipe\.yaml:1: could not determine a constructor"),
        ("a: &x [*x]\n", r"recipe\.yaml:1: "),
        ("a: 1\n---\nb: 2\n", r"recipe\.yaml:2: "),
        ("a: \x07\n", r"recipe\.yaml: unacceptable character"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: ä".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
        load_yaml(tmp_path / "latin.yaml")


OPTIMIZERS = st.builds(
    Optimizer,
    learning_rate=st.floats(0, exclude_min=True, allow_nan=False),
    betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    warmup=st.none() | st.integers() | st.floats(allow_nan=False),
)
TEXT = st.text() | st.sampled_from(["yes", "5e-4", "1_0", "0x1", "null", "", "2024-01-01", "1:30", "=", "<<", "~"])
RECIPES = st.builds(
    Recipe,
    name=TEXT,
    seed=st.integers(0),
    training=st.builds(Training, steps=st.integers(), optimizer=OPTIMIZERS, packing=st.sampled_from(Packing)),
    evaluation=st.none() | OPTIMIZERS,
    datasets=st.lists(OPTIMIZERS, max_size=2).map(tuple),
    output=st.just(Path("runs/x")),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    resume=st.booleans(),
)


@given(RECIPES)
def test_every_config_survives_yaml(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = write(tmp_path_factory.getbasetemp(), dump_yaml(recipe))
    assert build(Recipe, load_yaml(path)) == recipe


# describe


def test_describe_lists_every_leaf_with_its_help() -> None:
    lines = describe(build(Recipe, {"training": {"steps": 3, "optimizer": {"learning_rate": 0.1}}, "seed": 1}))
    assert lines == [
        FieldLine("name", "demo", True, "of the run", "demo"),
        FieldLine("seed", 1, False, "of every draw", 0),
        FieldLine("training.steps", 3, False, "optimizer steps", REQUIRED),
        FieldLine("training.optimizer.learning_rate", 0.1, False, "peak learning rate", 0.5),
        FieldLine("training.optimizer.betas", (0.9, 0.95), True, "of AdamW", (0.9, 0.95)),
        FieldLine("training.optimizer.warmup", None, True, "steps, or a fraction of them", None),
        FieldLine("training.packing", Packing.STEP, True, "layout of the forward pass", Packing.STEP),
        FieldLine("evaluation", None, True, "absent: none", None),
        FieldLine("datasets", (), True, "several", ()),
        FieldLine("output", None, True, "run directory", None),
        FieldLine("stop", (), True, "stop strings", ()),
        FieldLine("resume", False, True, "go on", False),
    ]


def test_describe_opens_optional_configs_and_knows_the_parents_defaults() -> None:
    recipe = build(Recipe, {**MINIMAL, "evaluation": {"warmup": 2}})
    lines = {line.path: line for line in describe(recipe)}
    assert lines["evaluation.warmup"] == FieldLine("evaluation.warmup", 2, False, "steps, or a fraction of them", None)
    assert lines["training.optimizer.learning_rate"].value == 0.5
    assert lines["training.optimizer.learning_rate"].is_default
    assert describe_sections(recipe) == {
        "training": "the learner",
        "training.optimizer": "how weights move",
        "evaluation": "absent: none",
    }
    assert not lines["training.steps"].is_default


# the library's own configs


def config_modules() -> list[str]:
    root = Path(treadle.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if "Config)" not in source:
            continue
        classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
        if any(isinstance(base, ast.Name) and base.id == "Config" for c in classes for base in c.bases):
            found.append(".".join(["treadle", *path.relative_to(root).with_suffix("").parts]))
    return found


@pytest.mark.parametrize("name", config_modules())
def test_every_field_of_the_library_says_what_it_means(name: str) -> None:
    members = vars(importlib.import_module(name)).values()
    for config in {m for m in members if isinstance(m, type) and issubclass(m, Config)}:
        silent = [field for field, info in config.model_fields.items() if not info.description]
        assert not silent, f"{name}.{config.__name__}: fields without a description"


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 500))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: " + "[" * 300 + "]" * 300, "f.yaml:1: nested deeper than 64 levels"),
        ("a: [1,\n" + "[1,\n" * 100_000, "f.yaml:64: nested deeper than 64 levels"),
        ("a: " + "{a: " * 900 + "}" * 900, "f.yaml:1: nested deeper than 64 levels"),
        ("\n".join(" " * i + "a:" for i in range(900)), "f.yaml:65: nested deeper than 64 levels"),
        ("- " * 900 + "x", "f.yaml:1: nested deeper than 64 levels"),
        (CHAIN, "f.yaml:65: nested deeper than 64 levels"),
        (BOMB, r"f.yaml:\d: more than 10,000,000 characters with aliases expanded; keep data in a separate file"),
        ("a: &a {k: &b " + "x" * 100_000 + "}\nb: [" + "*b, " * 100 + "]", "f.yaml:2: more than 10,000,000 characters"),
        ("a: &a [*a]", "f.yaml:1: 'a' refers to itself"),
        ("a: &a {b: *a}", "f.yaml:1: 'a' refers to itself"),
    ],
)
def test_yaml_has_limits(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        parse_yaml(text.encode(), "f.yaml")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("k=" + "[" * 900 + "]" * 900, "nested deeper than 64 levels"),
        ("k=&a [*a]", "'a' refers to itself"),
        (".".join("k" * 3000) + "=1", "more than 64 keys"),
        ('k="\\ud800"', "half a character"),
    ],
)
def test_overrides_have_limits(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        apply_overrides({}, [override])
    assert len(str(refused.value)) < 300


def test_values_that_cannot_be_shown_are_named_all_the_same() -> None:
    with pytest.raises(ConfigError, match="learning_rate=0xfff"):
        build(Training, {"steps": 1}, "f.yaml", ["optimizer.learning_rate=0x" + "f" * 10_000])


def test_aliases_are_read() -> None:
    assert parse_yaml(b"a: &a [1, {b: 2}]\nb: *a\nc: {d: *a}", "f.yaml")["c"] == {"d": [1, {"b": 2}]}
