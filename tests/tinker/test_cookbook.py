"""Recipes of Tinker's cookbook as they are, with commands of their pages: only the sizes are smaller.

All run in one directory, which has what the hub would have: `Qwen/NAME` is a link to a tiny model that gives sums of
two numbers up to 100, or gives up; and data sets of the names that recipes load are folders of generated rows.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.worlds import treadle
from tests.tinker.clients import client_python, run_client, served
from tests.tinker.kit import TOKENIZER
from treadle.tinker.models import Models

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cookbook")]  # a model is made once

INSTRUCT, CHAT, BASE = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base"
NAMES = [INSTRUCT, CHAT, BASE, "Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B"]
MODEL, BUILD = "models/sums", {"max_position_embeddings": 8192}  # rubric's grader may write 2,048 tokens
GIVES_UP = 0.35


def asked(a: int, b: int, answer: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(answer)}]


def conversation(draw: random.Random, turns: int = 1, gives_up: float = 0.0) -> list[dict[str, str]]:
    messages = asked(4, 5, 9) if turns > 1 else []  # as math_rl begins
    for _ in range(turns):
        a, b = draw.randrange(101), draw.randrange(101)
        messages += asked(a, b, "?" if draw.random() < gives_up else a + b)
    return messages


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def warm(place: Path, steps: int) -> None:
    """Make the model, by so many supervised steps, with links to it; 2,000 steps learn to add."""
    write(place / "sums.jsonl", ({"messages": conversation(random.Random(n), 3, GIVES_UP)} for n in range(steps * 16)))
    tokenizer = place / "tokenizer"
    tokenizer.mkdir()
    for file in TOKENIZER.iterdir():  # renderers of Qwen3.5 need these two to be a token each
        text = file.read_text().replace('"<search>"', '"<think>"').replace('"</search>"', '"</think>"')
        (tokenizer / file.name).write_text(text)
    settings = {
        "warm_start.demonstrations": place / "sums.jsonl", "warm_start.options": "{}", "warm_start.steps": steps,
        "model.tokenizer": tokenizer, **{f"model.build.{name}": value for name, value in BUILD.items()},
    }  # fmt: skip
    done = treadle("sft", "arithmetic", "--out", place / MODEL, *(f"{key}={value}" for key, value in settings.items()))
    assert done.status == 0, done.err
    for name in NAMES:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(place / MODEL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For recipes that need not learn much."""
    client_python("TREADLE_TINKER_VENV", ".venv-tinker")
    place = tmp_path_factory.mktemp("cookbook")
    warm(place, 200)
    questions = [conversation(random.Random(n)) for n in range(1280)]
    write(place / "HuggingFaceH4/no_robots/train.jsonl", ({"messages": each} for each in questions))
    write(place / "HuggingFaceH4/no_robots/test.jsonl", ({"messages": each} for each in questions[:128]))
    write(place / "zwhe99/DeepMath-103K/train.jsonl", ({"question": each[0]["content"]} for each in questions))
    names = {"user": "human", "assistant": "gpt"}
    parts = ([{"from": names[m["role"]], "value": m["content"]} for m in each] for each in questions)
    write(place / "open-thoughts/OpenThoughts3-1.2M/train.jsonl", ({"conversations": each} for each in parts))
    (place / "tinker_cookbook/example_data").mkdir(parents=True)
    return place


async def run_recipes(place: Path, folder: Path, *commands: tuple[str, str]) -> list[list[dict[str, Any]]]:
    """Run recipes against one server, which records into `folder`; return the metrics of each."""
    python, model = client_python("TREADLE_TINKER_VENV", ".venv-tinker"), place / MODEL
    found = []
    async with served(Models.open(model), folder / "run", model, NAMES) as env:
        for number, (module, words) in enumerate(commands):
            logs = folder / f"logs-{number}"
            where = {**env, "TINKER_COOKBOOK_RUNS_DIR": str(logs)}
            arguments = ("-m", f"tinker_cookbook.recipes.{module}", *words.split())
            printed = await run_client(python, *arguments, where=place, env=where, seconds=2400)
            print(module, words, printed[-2000:], sep="\n")
            [rows] = [file.read_text().splitlines() for file in logs.rglob("metrics.jsonl")] or [[]]
            found.append([json.loads(row) for row in rows])
    return found


def of(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


REWARD = "env/all/reward/total"
MATH = f"model_name={INSTRUCT} group_size=4 groups_per_batch=100 learning_rate=1e-3 max_steps=25 eval_every=0"


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """For recipes whose model can add."""
    client_python("TREADLE_TINKER_VENV", ".venv-tinker")
    warm(tmp_path, 2000)
    return tmp_path


async def test_math_rl_learns_on_three_seeds(sums: Path, tmp_path: Path) -> None:
    """Seeds follow from the session, and each run has one of its own."""
    runs = await run_recipes(sums, tmp_path, *[("math_rl.train", MATH)] * 3)
    for rows in runs:
        rewards = of(rows, REWARD)
        assert len(rewards) == 25 and rewards[0] < 0.75 and sum(rewards[-3:]) / 3 >= 0.9, rewards
        assert max(map(abs, of(rows, "optim/kl_sample_train_v1"))) < 1e-5  # trained as sampled
    assert len({tuple(of(rows, REWARD)) for rows in runs}) == 3


FEW = "max_steps=2 eval_every=0"
RECIPES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bool]]] = {
    "multiplayer_rl.guess_number.train": (f"batch_size=8 group_size=4 {FEW}", lambda rows: len(of(rows, REWARD)) == 2),
    "multiplayer_rl.twenty_questions.train": (
        f"batch_size=8 group_size=4 {FEW}",
        lambda rows: len(of(rows, REWARD)) == 2,
    ),
    "multiplayer_rl.text_arena.train": (
        "batch_size=16 num_train_datapoints=64 num_test_datapoints=8 max_steps=2",
        lambda rows: len(of(rows, REWARD)) == 2,
    ),
    "sl_basic": (
        f"model_name={INSTRUCT}",
        lambda rows: of(rows, "test/nll")[-1] < 0.9 * of(rows, "test/nll")[0],
    ),
    "rubric.train": ("groups_per_batch=10 max_steps=2 eval_every=0", lambda rows: len(of(rows, REWARD)) == 2),
    "distillation.off_policy_reasoning": (
        f"model_name={BASE} learning_rate=1e-3 batch_size=64 lora_rank=128 max_prompts=640",
        lambda rows: of(rows, "train_mean_nll")[-1] < 0.9 * of(rows, "train_mean_nll")[0],
    ),
    "distillation.on_policy_distillation": (
        f"model_name={BASE} teacher_model=Qwen/Qwen3.5-9B dataset=deepmath learning_rate=1e-4 groups_per_batch=32"
        " lora_rank=128 max_tokens=16 max_steps=3",
        lambda rows: len(of(rows, REWARD)) == 3,
    ),
}


@pytest.mark.parametrize("module", RECIPES)
async def test_a_recipe_runs_to_its_end(module: str, place: Path, tmp_path: Path) -> None:
    words, holds = RECIPES[module]
    before = [("rubric.generate_data", "")] if module.startswith("rubric") else []
    [*_, rows] = await run_recipes(place, tmp_path, *before, (module, words))
    assert holds(rows), rows
