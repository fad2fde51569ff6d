"""Beside TRL: single-turn GRPO on SmolLM2 with the same tasks, batch, lengths, loss and optimizer, and one gradient.

    treadle models get smollm2
    python -m benchmarks.against_trl                     both, 20 updates each, and the gradients
    python -m benchmarks.against_trl --updates 3         a first look
    python -m benchmarks.against_trl --case long --threads 1 --updates 4 --repetitions 3    long completions
    python -m benchmarks.against_trl --parts DIRECTORY   parts that are complete there are not repeated

Each side is a process of its own, on `--threads` threads. Sampling and training are measured where each library
switches from one to the other: what is neither (rewards, logging) counts as training. The gradient is that of TRL's
first update that has one (until then weights are as they were), taken by both on the tokens that TRL sampled; once in
float32 and, in the short case, once in float64, where rounding does not hide a difference. `SAME` and a `Case` are what
both are given. Repetitions are interleaved: TRL, Treadle, TRL, Treadle. Each repetition has the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import numpy as np

from treadle.envs.phone_book import NAMES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEOPLE = 3
SAME: Mapping[str, Any] = {
    "temperature": 1.0,
    "loss": "PPO clip 0.2 / 0.28, mean over the update's tokens (dapo)",
    "advantage": "reward - mean of the group, not divided by its deviation",
    "beta": 0.0,
    "optimizer": "AdamW, lr 1e-5, constant, betas 0.9 / 0.95, eps 1e-8, no weight decay, gradient norm at most 1",
    "precision": "float32, no gradient checkpointing",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of an update: tasks, completions a task (group), and longest completion in tokens.

    sequences: completions in one of TRL's micro-batches. tokens: budget of one of Treadle's, which holds as many.
    story: ask for a story and reward its variety, rather than a number of a phone book.
    """

    tasks: int
    group: int
    longest: int
    sequences: int
    tokens: int
    story: bool = False

    def prompts(self, count: int) -> list[tuple[list[dict[str, str]], str]]:
        """Return `count` prompts with their answers; always the same."""
        draw = _story if self.story else _prompt
        return [draw(Random(f"against_trl/{index}")) for index in range(count)]

    def grade(self, text: str, answer: str) -> float:
        """Reward of a reply."""
        return variety(text) if self.story else grade(text, answer)


CASES = {
    "short": Case(tasks=4, group=8, longest=16, sequences=32, tokens=8192),
    "long": Case(tasks=2, group=4, longest=256, sequences=4, tokens=1400, story=True),
}


def _prompt(draws: Random) -> tuple[list[dict[str, str]], str]:
    examples = [_question(draws, "train") for _ in range(2)]
    question, answer = _question(draws, "held_out")
    messages = []
    for asked, number in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": number}]
    return [*messages, {"role": "user", "content": question}], answer


def _story(draws: Random) -> tuple[list[dict[str, str]], str]:
    first, second, third = draws.sample(NAMES["train"], PEOPLE)
    return [{"role": "user", "content": f"Write a long story about {first}, {second} and {third}."}], ""


def _question(draws: Random, names: str) -> tuple[str, str]:
    people, numbers = draws.sample(NAMES[names], PEOPLE), draws.sample(range(100, 1000), PEOPLE)
    book = ", ".join(f"{name} {number}" for name, number in zip(people, numbers, strict=True))
    which = draws.randrange(PEOPLE)
    return f"{book}. What is the number of {people[which]}?", str(numbers[which])


def grade(text: str, answer: str) -> float:
    """Return 1 for a reply whose only number is the answer, else 0."""
    return float(re.findall(r"\d+", text) == [answer])


def variety(text: str) -> float:
    """Share of a text's words that are different ones."""
    words = text.split()
    return len(set(words)) / max(len(words), 1)


@dataclass(frozen=True, slots=True)
class Moment:
    """Holds the clocks at one moment: seconds of wall and CPU time of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        """Read the clocks."""
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True, slots=True)
class Update:
    """Holds what one update took. reward: mean over its completions; tokens: sampled, mean of a completion."""

    sampling_seconds: float
    sampling_cpu: float
    training_seconds: float
    training_cpu: float
    reward: float
    tokens: float

    @classmethod
    def between(cls, start: Moment, sampled: Moment, end: Moment, reward: float, tokens: float) -> Update:
        """Return the update of these moments."""
        return cls(
            sampled.wall - start.wall,
            sampled.cpu - start.cpu,
            end.wall - sampled.wall,
            end.cpu - sampled.cpu,
            reward,
            tokens,
        )


def run_trl(case: Case, model: Path, updates: int, folder: Path, dtype: str = "float32") -> list[Update]:
    """Train with TRL; leaves tokens, rewards and gradient of the first update that has one in `folder`."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl: Any = import_module("trl")

    made: list[Update] = []

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        """Notes when sampling begins and ends, and keeps the first gradient."""

        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            self.start = Moment.now()
            answer = super()._generate_single_turn(prompt_ids, *rest, **named)
            self.sampled = Moment.now()
            self.prompt_ids, self.completion_ids = prompt_ids, answer[0]
            return answer

        def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
            rewards = super()._calculate_rewards(*arguments, **named)
            self.rewards = rewards[:, 0].tolist()
            return rewards

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            last = self._step % self.current_gradient_accumulation_steps == 0
            if last and len(set(self.rewards)) > 1 and not (folder / "first.json").exists():
                gradient = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
                save_file(gradient, folder / "gradient.safetensors")
                first = {"update": len(made), "prompts": self.prompt_ids, "rewards": self.rewards}
                (folder / "first.json").write_text(json.dumps({**first, "completions": self.completion_ids}))
            return loss

        def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> Any:
            """Is called right after each optimizer step, and once more at the end."""
            if self.state.global_step == len(made):
                return super()._maybe_log_save_evaluate(*arguments, **named)
            tokens = mean(map(len, self.completion_ids))
            made.append(Update.between(self.start, self.sampled, Moment.now(), mean(self.rewards), tokens))
            print(_line(len(made), made[-1]), flush=True)
            return super()._maybe_log_save_evaluate(*arguments, **named)

    def reward(completions: Any, answer: Any, **_: Any) -> list[float | None]:
        texts = [messages[0]["content"] for messages in completions]
        return [case.grade(text, number) for text, number in zip(texts, answer, strict=True)]

    rows = [{"prompt": messages, "answer": number} for messages, number in case.prompts(case.tasks * updates)]
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.sequences,
        gradient_accumulation_steps=case.tasks * case.group // case.sequences,
        num_generations=case.group,
        max_completion_length=case.longest,
        max_steps=updates,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(model)
    Timed(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
    ).train()
    return made


def run_treadle(case: Case, model: Path, updates: int, folder: Path, threads: int) -> list[Update]:
    """Train with Treadle; leaves the prompts of all updates in `folder`."""
    import treadle
    from treadle.core.types import Group

    made: list[Update] = []

    class Clocks(treadle.Callback):
        """Notes when sampling begins and ends, and the prompts of each update."""

        def __init__(self) -> None:
            self.prompts: list[list[list[int]]] = []

        def phase(self, name: str, done: int, total: int) -> None:
            if name == "rollout" and done == 0:
                self.began = Moment.now()

        def batch(self, groups: Sequence[Group], version: int) -> None:
            self.ended = Moment.now()
            steps = [step for group in groups for t in group.trajectories for step in t.steps]
            self.tokens = mean(len(step.completion_ids) for step in steps)
            self.reward = mean(t.reward or 0.0 for group in groups for t in group.trajectories)
            self.prompts.append([step.prompt_ids.tolist() for step in steps])
            (folder / "ours.json").write_text(json.dumps(self.prompts))

        def publish(self, version: int) -> None:
            if version:
                made.append(Update.between(self.began, self.ended, Moment.now(), self.reward, self.tokens))
                print(_line(len(made), made[-1]), flush=True)

    def reward(task: treadle.Task, text: str) -> float:
        return case.grade(text, str(task.ground_truth))

    tasks = [{"prompt": messages, "ground_truth": number} for messages, number in case.prompts(case.tasks * updates)]
    settings = {
        "data.shuffle": False,
        "training.tasks_per_update": case.tasks,
        "training.group_size": case.group,
        "training.max_tokens_per_microbatch": case.tokens,
        "training.threads": threads,
        "training.optimizer": {"learning_rate": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "rollout.max_completion_tokens": case.longest,
        "algorithm.advantage_options": {"norm_by_std": False},
        "evaluation.every": 0,
        "orchestration.updates": updates,
    }
    treadle.train(reward, tasks, model=str(model), run=folder / "treadle", settings=settings, callbacks=[Clocks()])
    return made


def gradient_gap(case: Case, model: Path, folder: Path, dtype: str) -> dict[str, Any]:
    """Return how far Treadle's gradient on the batch that TRL left is from TRL's, both in this precision."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from treadle.algorithms.config import AlgorithmConfig
    from treadle.algorithms.estimators import advantages
    from treadle.core.config import build
    from treadle.packing.flat import flatten
    from treadle.training.config import TrainingConfig
    from treadle.training.learner import Learner

    first = json.loads((folder / "first.json").read_text())
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    training = build(TrainingConfig, {"max_tokens_per_microbatch": case.tokens})
    algorithm = build(AlgorithmConfig, {"advantage_options": {"norm_by_std": False}})
    learner = Learner(policy, training, algorithm, 1)
    batch = flatten(_groups(first, case.group))
    learner.accumulate(batch, advantages(batch, algorithm))
    theirs = load_file(folder / "gradient.safetensors")
    mine = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    gaps = {name: float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    total = float(sum((mine[n] - theirs[n]).double().square().sum() for n in theirs) ** 0.5)
    norm = float(sum(theirs[n].double().square().sum() for n in theirs) ** 0.5)
    worst = max(gaps, key=lambda name: gaps[name])
    largest = max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)
    return {
        "relative": total / norm,
        "of the worst weight": {worst: gaps[worst]},
        "largest difference": largest,
        "norm": norm,
        "tokens": len(batch),
    }


def _groups(first: Mapping[str, Any], size: int) -> list[Any]:
    """Return TRL's completions as recorded groups; a single update asks for no recorded log-probabilities."""
    from treadle.core.types import Group, SamplingParams, Status, Step, StopReason, Task, Trajectory

    def trajectory(number: int) -> Trajectory:
        completion = np.array(first["completions"][number], np.int32)
        step = Step(
            prompt_ids=np.array(first["prompts"][number], np.int32),
            completion_ids=completion,
            logprobs=np.full(len(completion), -1.0, np.float32),
            policy_versions=np.zeros(len(completion), np.int32),
            sampling=SamplingParams(),
            stop_reason=StopReason.STOP,
        )
        group, attempt = divmod(number, size)
        reward = first["rewards"][number]
        return Trajectory(f"{group}-{attempt}", f"task-{group}", attempt, (step,), reward, Status.DONE)

    return [
        Group(
            f"group-{g}",
            g,
            0,
            g,
            Task(f"task-{g}", ({"role": "user", "content": "?"},)),
            tuple(trajectory(g * size + i) for i in range(size)),
        )
        for g in range(len(first["rewards"]) // size)
    ]


def _line(number: int, update: Update) -> str:
    return (
        f"update {number}: sampling {update.sampling_seconds:.1f} s ({update.sampling_cpu:.1f} CPU s), training "
        f"{update.training_seconds:.1f} s ({update.training_cpu:.1f} CPU s), reward {update.reward:.3f}, "
        f"{update.tokens:.1f} tokens"
    )


def part(name: str, case: Case, model: Path, updates: int, folder: Path, threads: int, dtype: str) -> None:
    """Run one part in this process and write its figures into `folder`."""
    import torch

    torch.set_num_threads(threads)
    runs: Mapping[str, Callable[[], Any]] = {
        "trl": lambda: [asdict(update) for update in run_trl(case, model, updates, folder, dtype)],
        "treadle": lambda: [asdict(update) for update in run_treadle(case, model, updates, folder, threads)],
        "gradient": lambda: gradient_gap(case, model, folder, dtype),
    }
    result = runs[name]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"{name}.json").write_text(json.dumps({"result": result, "peak_bytes": peak}))


def summary(repetitions: Sequence[Mapping[str, Any]], completions: int) -> dict[str, Any]:
    """Return one side's medians, without the first update of each repetition, which warms up."""
    updates = [update for run in repetitions for update in run["result"][1:] or run["result"]]
    everything = [update for run in repetitions for update in run["result"]]
    medians = {key: median(update[key] for update in updates) for key in updates[0]}
    return {
        **{key: medians[key] for key in medians if key not in ("reward", "tokens")},
        "cpu": median(update["sampling_cpu"] + update["training_cpu"] for update in updates),
        "cpu_per_token": median(
            (update["sampling_cpu"] + update["training_cpu"]) / update["tokens"] / completions for update in updates
        ),
        "seconds": median(update["sampling_seconds"] + update["training_seconds"] for update in updates),
        "peak_bytes": median(run["peak_bytes"] for run in repetitions),
        "rewards": [update["reward"] for update in everything],
        "tokens": [update["tokens"] for update in everything],
    }


def main() -> None:
    """Run both sides and the gradient, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description="Single-turn GRPO on SmolLM2, beside TRL.")
    parser.add_argument("--model", type=Path, help="directory of the model (default: smollm2 of the cache)")
    parser.add_argument("--case", choices=tuple(CASES), default="short")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: against_trl.json or against_trl_long.json")
    parser.add_argument("--parts", type=Path, help="where the parts' figures lie (default: a temporary directory)")
    parser.add_argument("--part", choices=("trl", "treadle", "gradient"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case, model, threads = CASES[options.case], options.model or _smollm2(), options.threads
    if options.part:
        part(options.part, case, model, options.updates, options.folder, threads, options.dtype)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def run(name: str, updates: int, dtype: str, repetition: int = 0) -> dict[str, Any]:
        folder = parts / f"{dtype}-{repetition}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / f"{name}.json").is_file():
            print(f"--- {name}, {dtype}, repetition {repetition}", flush=True)
            arguments = ["--case", options.case, "--model", model, "--updates", updates]
            arguments += ["--threads", threads, "--dtype", dtype]
            command = [sys.executable, "-m", "benchmarks.against_trl", "--part", name, "--folder", folder, *arguments]
            subprocess.run(list(map(str, command)), check=True, env=environment, cwd=ROOT)
        result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return result

    with tempfile.TemporaryDirectory() as temporary:
        parts = options.parts or Path(temporary)
        runs: dict[str, list[dict[str, Any]]] = {"trl": [], "treadle": []}
        for repetition in range(options.repetitions):
            for name, side in runs.items():
                side.append(run(name, options.updates, "float32", repetition))
        gradients = {"float32": run("gradient", 1, "float32")["result"]}
        if options.case == "short":
            run("trl", 1, "float64")  # with an optimizer's moments, a second update would need more than 24 GB
            gradients["float64"] = run("gradient", 1, "float64")["result"]
        first = json.loads((parts / "float32-0" / "first.json").read_text())
        prompts_of_updates = json.loads((parts / "float32-0" / "ours.json").read_text())
    from benchmarks.measure import machine

    sides = {name: summary(side, case.tasks * case.group) for name, side in runs.items()}
    result = {
        "machine": machine(),
        "threads": threads,
        "same": {**SAME, **asdict(case)},
        **sides,
        "treadle / trl": {
            key: sides["treadle"][key] / sides["trl"][key]
            for key in ("cpu", "cpu_per_token", "seconds", "sampling_cpu", "training_cpu", "peak_bytes")
        },
        "prompts are the same ids": first["prompts"] == prompts_of_updates[first["update"]],
        "gap of gradients": gradients,
    }
    name = "against_trl.json" if options.case == "short" else f"against_trl_{options.case}.json"
    (options.output or RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _smollm2() -> Path:
    from treadle.models.model_cache import converted_directory

    return converted_directory("smollm2")


if __name__ == "__main__":
    main()
