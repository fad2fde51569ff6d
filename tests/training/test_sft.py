"""Demonstrations are learned as a session would have recorded them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import distance, exact, tiny, weights_of
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError, DataError, TrainingStopped
from treadle.core.trainer import Conversation
from treadle.core.types import Message, SamplingParams
from treadle.engines.compute import Compute
from treadle.envs.lookup import demonstration
from treadle.models.chat import load_tokenizer
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine
from treadle.training.config import TrainingConfig, WarmStartConfig
from treadle.training.demonstrations import Demonstration, Demonstrations, demonstrated_calls, load_demonstrations
from treadle.training.learner import Learner
from treadle.training.sft import WarmStartResult, warm_start
from treadle.training.trainer import EmbeddedTrainer

TOKENIZER_DIRECTORY = Path(str(files("treadle.recipes") / "tokenizer"))
TOKENIZER = load_tokenizer(TOKENIZER_DIRECTORY)
END = int(TOKENIZER.eos_token_id)


def renderer() -> ChatRenderer:
    return ChatRenderer(TOKENIZER, [END])


def say(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def replies(messages: Sequence[Message]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("index", range(12))
async def test_calls_are_what_a_session_would_have_recorded(index: int) -> None:
    """An engine that answers with the demonstrated replies makes a session record the same calls."""
    messages = demonstration(index, seed=3)
    calls = demonstrated_calls(messages, renderer())
    answers = iter([completion for _, completion, *_ in calls])
    engine = FakeEngine(lambda prompt, sampling: next(answers).tolist())
    address = Address(0, Stream.TRAIN, 0, 0, 0)
    session = Session(SessionSpec("s", engine, renderer(), SamplingParams(max_tokens=99), 9999, address))
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            assert (await session.chat(messages[:at])).message == message
    assert len(session.steps) == len(calls) == len(replies(messages))
    for step, (prompt, completion, *_) in zip(session.steps, calls, strict=True):
        assert step.prompt_ids.tolist() == prompt.tolist()
        assert step.completion_ids.tolist() == completion.tolist()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([say("user", "a")], "no assistant turn"),
        ([], "no assistant turn"),
        ([say("assistant", "a")], "needs a message of another role before it"),
        ([say("user", "a"), say("assistant", "b"), say("assistant", "c")], "needs a message of another role"),
    ],
)
def test_what_no_session_could_have_recorded_is_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(DataError, match=message):
        demonstrated_calls(messages, renderer())


# Learning


def greeting(index: int) -> Demonstration:
    return Demonstration(
        [say("user", f"chess {'tennis' if index % 2 else 'yoga'}"), say("assistant", "soup" if index % 2 else "rice")]
    )


def config(**fields: Any) -> WarmStartConfig:
    return WarmStartConfig(
        **{"demonstrations": "unused", "steps": 40, "batch_size": 4, "learning_rate": 1e-2, **fields}
    )


def warm(
    model: PreTrainedModel,
    demonstrations: Demonstrations,
    section: WarmStartConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    budget: int = 8192,
) -> WarmStartResult:
    """Warm-start the model in place."""
    learner = Learner(model, TrainingConfig(max_tokens_per_microbatch=budget), AlgorithmConfig(), 1)
    trainer = EmbeddedTrainer(learner, TOKENIZER_DIRECTORY, Compute(None), section)

    def conversation(index: int) -> Conversation:
        row = demonstrations(index)
        return demonstrated_calls(row.messages, renderer(), row.tools)

    return asyncio.run(warm_start(trainer, conversation, section, on_step))


def small() -> Any:
    return tiny(vocab_size=len(TOKENIZER))


def test_it_learns_and_reports_each_step() -> None:
    model = small()
    before = weights_of(model)
    seen: list[tuple[int, float]] = []
    result = warm(model, greeting, config(), lambda step, loss: seen.append((step, loss)))
    losses = [loss for _, loss in seen]
    assert [step for step, _ in seen] == list(range(1, 41)) and result.steps == 40
    assert losses[0] > 3 and result.loss < 0.2
    assert result.loss == pytest.approx(np.mean(losses[-4:]))  # the last 10%
    assert distance(before, weights_of(model)) > 0.1


def test_the_loss_is_the_mean_over_assistant_tokens_in_any_micro_batches() -> None:
    """Against a plain forward pass of each call; nothing but the replies is learned."""
    rows = [Demonstration(demonstration(index, seed=1)) for index in range(3)]
    total, count = 0.0, 0
    model = small()
    with torch.no_grad():
        for prompt, completion, *_ in (call for row in rows for call in demonstrated_calls(row.messages, renderer())):
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
            total -= float(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None]).sum())
            count += len(completion)
    for budget in (1, 100, 8192):
        losses: list[float] = []
        start = small()
        warm(
            start,
            rows.__getitem__,
            config(steps=1, batch_size=3),
            lambda _, loss: losses.append(loss),  # noqa: B023
            budget,
        )
        assert losses == [pytest.approx(total / count, rel=1e-5)]


def test_a_warm_start_that_does_not_learn_stops() -> None:
    """RL would have nothing to amplify."""
    slow = config(steps=3, max_loss=0.5, learning_rate=1e-9)
    with pytest.raises(TrainingStopped, match=r"loss .* after 3 steps, warm_start.max_loss is 0.5"):
        warm(small(), greeting, slow)
    assert warm(small(), greeting, slow.model_copy(update={"max_loss": None})).loss > 0.5


def test_a_warm_start_that_diverges_stops() -> None:
    wild = config(steps=3, max_loss=None, learning_rate=1e30)
    with pytest.raises(TrainingStopped, match="norm is nan at learning rate"):
        warm(small(), greeting, wild)


# Files and generators


def row(*contents: str) -> str:
    return json.dumps({"messages": [say("user", "q"), *(say("assistant", c) for c in contents)]}, ensure_ascii=False)


def written(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(lines).encode())
    return str(path)


def test_a_files_rows_come_once_a_pass_each_pass_in_its_own_order(tmp_path: Path) -> None:
    source = written(tmp_path, *(row(str(n)) for n in range(20)), "")
    rows = load_demonstrations(source, {}, seed=4)
    passes = [[int(rows(20 * p + i).messages[1]["content"]) for i in range(20)] for p in range(3)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    again, other = (load_demonstrations(source, {}, seed=seed) for seed in (4, 5))
    assert [int(again(i).messages[1]["content"]) for i in range(20)] == passes[0]
    assert [int(other(i).messages[1]["content"]) for i in range(20)] != passes[0]


def test_characters_that_look_like_line_ends_and_blank_lines_are_fine(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    rows = load_demonstrations(written(tmp_path, "", row(text) + "\r", "  ", ""), {}, seed=0)
    assert rows(0).messages[1]["content"] == rows(1).messages[1]["content"] == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows\.jsonl:2: not JSON"),
        ("\udcff", r"rows\.jsonl:2: not JSON"),
        ("[]", r"rows\.jsonl:2: needs a 'messages' list"),
        ('{"messages": "hello"}', r"rows\.jsonl:2: needs a 'messages' list"),
        ('{"messages": [{"role": "user"}]}', r"rows\.jsonl:2: message 0 needs 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": "q"}]}', r"rows\.jsonl:2: there is no assistant turn"),
        (row("a", "b"), r"rows\.jsonl:2: an assistant turn needs a message of another role before it"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join([row("fine"), line]).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        load_demonstrations(str(path), {}, seed=0)


def test_no_file_and_no_rows_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warm_start.demonstrations: .*nowhere\.jsonl"):
        load_demonstrations(str(tmp_path / "nowhere.jsonl"), {}, seed=0)
    with pytest.raises(DataError, match=r"rows\.jsonl has no demonstrations"):
        load_demonstrations(written(tmp_path, "", " "), {}, seed=0)


def test_a_generator_takes_its_options_and_no_others() -> None:
    plain = load_demonstrations("lookup", {}, seed=3)
    assert plain(5).messages == demonstration(5, 3)
    expert = load_demonstrations("treadle.envs.lookup:demonstration", {"expert": 1.0, "drill": 0.0}, seed=3)
    assert expert(5).messages == demonstration(5, 3, expert=1.0, drill=0.0)
    with pytest.raises(ConfigError, match=r"warm_start.options {'experts': 1} do not fit 'lookup'"):
        load_demonstrations("lookup", {"experts": 1}, seed=3)
    with pytest.raises(ConfigError, match="nobody"):
        load_demonstrations("nobody", {}, seed=3)


def test_no_micro_batches_change_what_is_learned() -> None:
    """Each token weighs the same, whichever trees the calls come in."""
    rows = [Demonstration(demonstration(index, seed=1)) for index in range(2)]
    models = [exact(vocab_size=len(TOKENIZER)) for _ in range(2)]
    for model, budget in zip(models, (100, 8192), strict=True):
        warm(model, rows.__getitem__, config(steps=1, batch_size=2), budget=budget)
    assert distance(*map(weights_of, models)) < 1e-6
