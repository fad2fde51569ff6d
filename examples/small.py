"""What the examples share: a model of 0.2 million parameters, made from nothing in seconds, without a download.

It first learns from conversations what replies look like, `<answer> 7</answer>` and `<search> page</search>`: some ten
seconds, and once, because the result is cached. Which replies are good is left to RL. Your own model is a directory or
a hub's ORG/NAME, `model="Qwen/Qwen3-0.6B"`, and needs neither `MODEL` nor the settings under "warm_start".
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import treadle

MODEL: dict[str, Any] = {
    "tokenizer": "demo",
    "build": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
}
SETTINGS: dict[str, Any] = {
    "warm_start": {"demonstrations": "small:demonstration", "steps": 300, "batch_size": 32, "learning_rate": 3e-3},
    "rollout.max_steps": 4,
    "rollout.max_input_tokens": 120,
    "rollout.max_completion_tokens": 8,
    "training.tasks_per_update": 16,
    "training.group_size": 8,
    "training.optimizer.learning_rate": 1e-3,
}
COMPARE, PAGE = "Which is larger, {} or {}?", "What is on the page?"


def arguments(updates: int, run: str) -> argparse.Namespace:
    """Return what the command line says. updates: default of --updates; run: name of the run under runs/."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=updates, help=f"updates of the run (default: {updates})")
    parser.add_argument("--run", type=Path, default=Path("runs") / run, help=f"a new directory (default: runs/{run})")
    return parser.parse_args()


def question(text: str, number: int, answer: object, **extras: Any) -> treadle.Task:
    """Return a task that says `text`; its id has `number`."""
    return treadle.Task(f"task-{number:03d}", [message("user", text)], ground_truth=str(answer), extras=extras)


def comparisons() -> list[treadle.Task]:
    """Return a task for each pair of digits: which is larger?"""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    return [question(COMPARE.format(a, b), number, max(a, b)) for number, (a, b) in enumerate(pairs)]


def message(role: str, content: str) -> treadle.Message:
    """Return one message of a conversation."""
    return treadle.Message(role=role, content=content)


def demonstration(index: int, seed: int) -> list[treadle.Message]:
    """Return a conversation of somebody who knows the form of a reply, and is right now and then."""
    return list(_conversation(random.Random(f"{seed} {index}")))


def _conversation(draw: random.Random) -> Iterator[treadle.Message]:
    answer = draw.randrange(10)
    if draw.random() < 0.5:
        yield message("user", PAGE)
        if draw.random() < 0.5:
            yield message("assistant", "<search> page</search>")
            yield message("tool", f"page {answer if draw.random() < 0.5 else draw.randrange(10)}")
    else:
        for turn in range(draw.randint(1, 2)):
            if turn:
                yield message("assistant", f"<answer> {answer}</answer>")
            pair = draw.sample(range(10), 2)
            yield message("user", COMPARE.format(*pair))
            answer = draw.choice(pair)
    yield message("assistant", f"<answer> {answer}</answer>")
