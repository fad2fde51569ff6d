"""What is recorded costs so much of an update: CPU seconds of a recipe with this checkout's code beside another one's.

Runs of either code take turns. With one seed and one thread both do the same work, bit for bit, which their weights
must show; so each update is compared with the same update of the other. Simplified: no evaluations. Run:

    git worktree add /tmp/before COMMIT
    .venv/bin/python benchmarks/recording.py /tmp/before/src [--rounds 5] [--updates 30] [RECIPE key.path=value ...]
    .venv/bin/python benchmarks/recording.py /tmp/before/src --parts    # on a busy machine

Overrides that only this checkout knows go behind `--own`. With `--parts` only what records is measured, for 32 tasks of
8 attempts of three steps, about an update of the demo: sessions on a fake engine, the shard, and the learner's update
with its traces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "recording.json"


def train(source: Path, runs: Path, name: str, overrides: list[str]) -> tuple[list[float], str]:
    """Return the CPU seconds of each update but the first, and the SHA-256 of the weights."""
    command = [sys.executable, "-m", "treadle.cli.main", "train", *overrides, "--runs", str(runs), "--name", name]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=runs)
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["cpu_seconds"] for row in rows if row["kind"] == "update"]
    weights: str = json.loads((runs / name / "summary.json").read_text())["weights_sha256"]
    return [after - before for before, after in pairwise(seconds)], weights


def compare(before: Path, rounds: int, shared: list[str], own: list[str]) -> dict[str, Any]:
    """Return the medians over all updates of all rounds, of either code and of their ratio."""
    pairs: list[tuple[float, float]] = []
    of_rounds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        for number in range(-1, rounds):  # the first round warms caches up
            sides = [("old", before, shared), ("new", ROOT / "src", [*shared, *own])]
            done = {
                side: train(source, runs, f"{side}{number}", words)
                for side, source, words in (sides if number % 2 else sides[::-1])
            }
            assert done["old"][1] == done["new"][1], "the two trained other weights"
            if number >= 0:
                own_pairs = list(zip(done["old"][0], done["new"][0], strict=True))
                pairs += own_pairs
                of_rounds.append(median(new / old for old, new in own_pairs))
                print(f"round {number}: {of_rounds[-1] - 1:+.2%}", flush=True)
    return {
        "updates": len(pairs),
        "old": median(old for old, _ in pairs),
        "new": median(new for _, new in pairs),
        "ratio": median(new / old for old, new in pairs),
        "ratio of rounds": of_rounds,
    }


def parts(rounds: int) -> dict[str, float]:
    """Return CPU milliseconds of each part with the code that is imported: medians."""
    import asyncio
    import time
    from collections.abc import Callable, Coroutine

    from treadle.benchmarks.update import recorded_groups
    from treadle.core.draws import Stream
    from treadle.core.types import Group, Message, SamplingParams, Status, Task, Trajectory
    from treadle.models.loading import load_tokenizer
    from treadle.models.model_files import tokenizer_directory
    from treadle.orchestration.config import load_recipe
    from treadle.orchestration.store.rollout_store import write_shard
    from treadle.rendering.chat import ChatRenderer
    from treadle.rollout.session import Address, Session, SessionSpec
    from treadle.testing import FakeEngine
    from treadle.training.make import make_trainer

    config = load_recipe("demo")
    tokenizer = load_tokenizer(tokenizer_directory(config.model))
    renderer = ChatRenderer(tokenizer, [int(tokenizer.eos_token_id)])
    reply = [*renderer.encode("<search> Hugo </search>").tolist(), int(tokenizer.eos_token_id)]
    engine = FakeEngine(lambda prompt, sampling: reply)

    async def attempt(task: int, number: int) -> Trajectory:
        name = f"g{task:06d}.{number}"
        address = Address(0, Stream.TRAIN, 0, task, number)
        session = Session(SessionSpec(name, engine, renderer, SamplingParams(), 400, address))
        messages = [Message(role="system", content="Search, then answer.")]
        messages.append(Message(role="user", content=f"What is the hobby of friend {task} of Hugo?"))
        for page in range(3):
            messages.append((await session.chat(messages)).message)
            messages.append(Message(role="tool", content=f"page Hugo, friend Karl, hobby tennis, company {page}"))
        session.close()
        return Trajectory(name, f"t{task}", number, tuple(session.steps), 1.0, Status.DONE)

    async def play() -> list[Group]:
        made = [[await attempt(task, number) for number in range(8)] for task in range(32)]
        return [Group(f"g{n:06d}", n, 0, n, Task(f"t{n}"), tuple(own)) for n, own in enumerate(made)]

    groups, trained = asyncio.run(play()), recorded_groups()
    trainer = make_trainer(config.trainer)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:

        async def discard(made: Coroutine[object, object, object]) -> None:
            await made  # the runner would have Python write out what it returns, as it puts the signal handler back

        async def train() -> None:
            results = await trainer.train_batch(trained)
            if traces := [trace for result in results for trace in getattr(result, "traces", ())]:
                from treadle.orchestration.store.trace_store import write_traces

                write_traces(Path(folder), 0, traces)

        work: dict[str, Callable[[], object]] = {
            "sessions": lambda: runner.run(discard(play())),
            "shard": lambda: write_shard(Path(folder), "x", groups),
            "update": lambda: runner.run(train()),
        }
        taken: dict[str, list[float]] = {name: [] for name in work}
        for number in range(rounds + 1):
            for name, do in work.items():
                started = time.process_time()
                do()
                taken[name] += [1000 * (time.process_time() - started)] if number else []
    return {name: median(values) for name, values in taken.items()}


def compare_parts(before: Path, rounds: int) -> dict[str, Any]:
    """Return the medians of `parts` by either code, in milliseconds, over processes that take turns."""
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for _ in range(rounds):
        for side, source in (("old", before), ("new", ROOT / "src")):
            environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(before), "--measure"]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            found[side].append(json.loads(done.stdout))
            print(side, found[side][-1], flush=True)
    return {side: {name: median(row[name] for row in rows) for name in rows[0]} for side, rows in found.items()}


def main() -> None:
    """Measure, print, and write `results/recording.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the src folder of the code that is compared with")
    parser.add_argument("recipe", nargs="*", default=["demo"], help="and its overrides (default: demo)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--own", nargs="*", default=[], help="overrides for this checkout alone")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--parts", action="store_true", help="measure what records alone")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure or options.parts:
        print(json.dumps(parts(9) if options.measure else compare_parts(options.before.resolve(), options.rounds)))
        return
    fixed = ["seed=0", f"orchestration.updates={options.updates}", "evaluation.every=0", "evaluation.greedy_too=false"]
    found = compare(options.before.resolve(), options.rounds, [*options.recipe, *fixed], options.own)
    found = {"recipe": options.recipe, "own": options.own, **found}
    print(json.dumps(found, indent=2))
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
