"""Small environments, a small tokenizer and a tiny recipe, shared by the tests of rollouts and of the loop."""

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.core.config import apply_overrides, build
from treadle.core.draws import Stream
from treadle.core.types import Group, Message, SamplingParams, Step, StopReason, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.plan.config import RunConfig
from treadle.rendering.chat import ChatRenderer
from treadle.report.progress import Progress
from treadle.rollout.attempt import Rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentDriver, EnvironmentFactory
from treadle.rollout.isolation.event_loop import run, watched_event_loop
from treadle.rollout.session import Address
from treadle.testing import FakeEngine

ROOT = Path(__file__).parents[1]  # where `tests.worlds` can be imported
END = 2  # the end-of-turn token of PlainTokenizer and of the shipped tokenizer


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


def chatml(messages: Sequence[Message], generation_prompt: bool = True) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + ("<|im_start|>assistant\n" if generation_prompt else "")


CHATML = (
    "{% macro calls(m) %}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endmacro %}"
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + calls(m) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class PlainTokenizer(PreTrainedTokenizerFast):
    """ChatML; one id a byte, but "ab" and "abc" have ids of their own: "a", "b" does not re-tokenize to itself.

    ids: 0, 1, 2 special tokens, 3 "ab", 4 "abc", 5 + byte.
    """

    def __init__(self, template: str = CHATML) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            tokenizer_object=_plain_backend(),
            eos_token="<|im_end|>",
            chat_template=template,
            clean_up_tokenization_spaces=False,
        )


def _plain_backend() -> Tokenizer:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    words = [*special, "ab", "abc", *map(BYTES.__getitem__, range(256))]
    vocabulary = {word: ident for ident, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def _bytes() -> list[str]:
    """How byte-level vocabularies write each byte: a printable character as itself, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = _bytes()


def plain_ids(text: str) -> list[int]:
    """What PlainTokenizer makes of a text; a special token's name is that token."""
    found: list[int] = PLAIN.encode(text, add_special_tokens=False)
    return found


PLAIN = PlainTokenizer()


@cache
def plain_renderer() -> ChatRenderer:
    """Of PLAIN and END; conversations share it."""
    return ChatRenderer(PLAIN, [END])


def saying(text: str, end: bool = True) -> FakeEngine:
    """An engine that always answers `text`."""
    return FakeEngine(lambda prompt, sampling: plain_ids(text) + [END] * end)


def addresses(count: int = 1, stream: Stream = Stream.TRAIN) -> list[Address]:
    """Addresses of the attempts of one group."""
    return [Address(1, stream, 0, 0, attempt) for attempt in range(count)]


# Environments


HELLO = (user("hello"),)
DONE, MORE = EnvStep(reward=1.0, done=True), EnvStep([tool("more")], 0.25)


class Told(Environment):
    """Answers what it was told to, in order; an exception or a coroutine function among the answers plays itself.

    calls: what was called, in order.
    """

    def __init__(self, *answers: Any, opening: Any = HELLO, closing: Any = None) -> None:
        self.answers, self.opening, self.closing = list(answers), opening, closing
        self.calls: list[str] = []

    async def reset(self, task: Task) -> Sequence[Message]:
        self.calls.append("reset")
        return await _act(self.opening)  # type: ignore[no-any-return]

    async def step(self, text: str) -> EnvStep:
        self.calls.append("step")
        return await _act(self.answers.pop(0))  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.calls.append("close")
        await _act(self.closing)


async def _act(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return await answer() if callable(answer) else answer


class ToldPlain(Told):
    """The same with plain methods; a function among the answers plays itself, on the attempt's thread."""

    def reset(self, task: Task) -> Sequence[Message]:  # type: ignore[override]
        self.calls.append("reset")
        return _act_plainly(self.opening)  # type: ignore[no-any-return]

    def step(self, text: str) -> EnvStep:  # type: ignore[override]
        self.calls.append("step")
        return _act_plainly(self.answers.pop(0))  # type: ignore[no-any-return]

    def close(self) -> None:  # type: ignore[override]
        self.calls.append("close")
        _act_plainly(self.closing)


def _act_plainly(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer() if callable(answer) else answer


async def hang() -> None:
    await asyncio.Event().wait()


class Ragged(Environment):
    """Takes `turns` replies and gives `rewards[n]` for reply n, whatever they say. Attempts of a task may differ.

    extras: turns, rewards, observations (texts), all optional; seconds: how long a step takes.
    """

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.done = task, 0
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        extras, number = self.task.extras, self.done
        self.done += 1
        await asyncio.sleep(extras.get("seconds", 0))
        reward = [*extras.get("rewards", []), *[0.0] * self.done][number]
        if self.done == extras.get("turns", 1):
            return EnvStep(reward=reward, done=True)
        observations = extras.get("observations") or ["go on"]
        return EnvStep([tool(observations[number % len(observations)])], reward)


class Vowels(Environment):
    """A dense reward for two replies: the share of vowels among the letters of each. Nothing to understand."""

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.replies = task, 0
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        self.replies += 1
        await asyncio.sleep(self.task.extras.get("seconds", 0))
        letters = [c for c in text.lower() if c.isalpha()]
        reward = sum(c in "aeiou" for c in letters) / max(len(letters), 1) / 2
        return EnvStep(() if self.replies == 2 else [tool("more")], reward, self.replies == 2)


def vowel_tasks(split: str, count: int, seconds: float = 0.0) -> list[Task]:
    """Tasks for `Vowels`, as a recipe finds them: `tests.worlds:vowel_tasks`."""
    return [Task(f"{split}-{i}", (user(f"say {i}"),), extras={"seconds": seconds}) for i in range(count)]


def vowel_demonstration(index: int, seed: int) -> tuple[Message, ...]:
    """For warm starts: `tests.worlds:vowel_demonstration`."""
    return (user(f"say {index % 6}"), Message(role="assistant", content="ae"[(index + seed) % 2] * 2))


# Playing without a model


def play(
    factories: EnvironmentFactory | Sequence[EnvironmentFactory],
    engine: FakeEngine,
    task: Task | None = None,
    tokenizer: PlainTokenizer | None = None,
    said: list[str] | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """One attempt for each factory, side by side, with PlainTokenizer; every session must be closed afterwards.

    said: gets what user code does to the event loop. loop: a new one, for a clock of its own.
    """
    queue = list(factories) if isinstance(factories, Sequence) else [factories]
    count = len(queue)

    def make() -> Environment:
        return queue.pop(0)()

    async def attempts() -> list[Trajectory]:
        rollouts = plain_rollouts(engine, make, tokenizer, **settings)
        with watched_event_loop(say):
            running = rollouts.start("g000000", task or Task("t", environment="world"), addresses(count))
            return list(await asyncio.gather(*running))

    say = (said if said is not None else list[str]()).append
    trajectories = run(attempts(), say, new_event_loop=(lambda: loop) if loop else None)
    assert not engine.open
    return trajectories


def one(environment: Environment, engine: FakeEngine | None = None, **settings: Any) -> Trajectory:
    [trajectory] = play(lambda: environment, engine or saying("a"), **settings)
    return trajectory


def plain_rollouts(
    engine: FakeEngine, make: EnvironmentFactory, tokenizer: PlainTokenizer | None = None, **settings: Any
) -> Rollouts:
    settings = {"max_completion_tokens": 16, "environment_timeout": 300.0, **settings}
    config = RolloutConfig(**settings)
    drivers = {("environment", "world"): EnvironmentDriver({"world": make}, config)}
    renderer = plain_renderer() if tokenizer is None else ChatRenderer(tokenizer, [END])
    return Rollouts(engine, renderer, drivers, config)


# Records without playing


def make_step(prompt: Sequence[int] = (1, 2), completion: Sequence[int] = (3, 4), reward: float = 0.0) -> Step:
    return Step(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -0.5, np.float32),
        policy_versions=np.zeros(len(completion), np.int32),
        sampling=SamplingParams(seed=7),
        stop_reason=StopReason.STOP,
        reward=reward,
    )


def make_group(index: int, *trajectories: Trajectory, name: str = "") -> Group:
    return Group(name or f"g{index:06d}", index, 0, index, Task(f"t{index}", (user("?"),)), trajectories)


# A tiny recipe

_TINY: dict[str, Any] = {
    "recipe": "tiny",
    "environment": "tests.worlds:Vowels",
    "data": {
        "train": {"source": "tests.worlds:vowel_tasks", "options": {"count": 6}},
        "held_out": {"source": "tests.worlds:vowel_tasks", "options": {"count": 3}},
    },
    "model": {
        "tokenizer": "demo",
        "build": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "rollout": {"max_steps": 3, "max_input_tokens": 64, "max_completion_tokens": 5},
    "training": {
        "tasks_per_update": 2,
        "group_size": 3,
        "threads": 1,
        "optimizer": {"learning_rate": 3e-3, "warmup": 2, "decay_from": 0.5},  # so that a resumed run must know where
    },
    "algorithm": {"entropy_coef": 0.01},
    "evaluation": {"every": 0, "greedy_too": False},
    "orchestration": {"updates": 4, "checkpoint_every": 2, "traced_groups": 0.5},
}


def tiny(*overrides: str) -> RunConfig:
    """A run of about a second: one layer, two tasks of three attempts an update, two replies an attempt."""
    return build(RunConfig, apply_overrides(_TINY, overrides))


class Quiet(Progress):
    """Keeps the lines and the rows of a run. began: called when a phase begins."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows: list[Any] = []

    def log(self, line: str) -> None:
        self.lines.append(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done == 0:
            self.began(name)

    def began(self, name: str) -> None: ...

    def update(self, row: Any) -> None:
        self.rows.append(row)
