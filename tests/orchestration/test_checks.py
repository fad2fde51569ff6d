"""Fail at start: what is checked before the first rollout."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.models import random_groups
from tests.orchestration.runs import start
from tests.worlds import Ragged, Told, chatml, hang, plain_ids, plain_renderer, tiny, user
from treadle.core.errors import ConfigError, DataError, EngineError
from treadle.core.types import Task
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
from treadle.engines.weight_sync import EmbeddedSync
from treadle.models.chat import load_chat
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.setup.engines import check_engine, embedded_engine
from treadle.orchestration.setup.inputs import Inputs, check_first_prompts, make_inputs
from treadle.packing.flat import flatten
from treadle.rollout.attempt import Players
from treadle.training.learner import Learner
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedTrainer

TOKENIZER = tokenizer_directory(tiny().model)

# Tasks and environments


def test_a_task_without_an_environment_is_refused() -> None:
    task = Task("t", (user("?"),))
    with pytest.raises(ConfigError, match="name neither an environment nor an agent"):
        make_inputs([task], [], {})
    assert make_inputs([task], [], {"w": Ragged}).train[0].environment == "w"


def test_no_tasks_and_shared_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no training tasks"):
        make_inputs([], [Task("t", (user("?"),), "w")], {"w": Ragged})
    with pytest.raises(DataError, match="held-out tasks are training tasks too, for example 't'"):
        make_inputs([Task("t", (user("?"),), "w")], [Task("t", (user("?"),), "w")], {"w": Ragged})


# First prompts


def check(*worlds: Told, context: int = 128, **settings: Any) -> None:
    queue = list(worlds)
    tasks = [Task(f"t{i}", (user("?"),), "w") for i in range(4)]
    inputs = Inputs(tasks, [], Players({"w": lambda: queue.pop(0)}))
    overrides = [f"rollout.{key}={value}" for key, value in settings.items()]
    check_first_prompts(inputs, plain_renderer(), tiny(*overrides), context, print)


@pytest.mark.parametrize(
    ("opening", "message"),
    [
        (LookupError("gone"), "task t2: environment: reset raised LookupError: gone"),
        (hang, "task t0: timeout: reset took longer than 0.02 s"),
        ([], "task t1: environment: reset gave no messages"),
        ("hello", "must be a list of messages, got str"),
        ([{"role": "user"}], "message 0 needs 'role' and 'content'"),
    ],
)
def test_environments_that_cannot_be_reset_are_named_with_their_reasons(opening: Any, message: str) -> None:
    worlds = [Told(opening=opening) for _ in range(3)]
    with pytest.raises(ConfigError, match="no environment could be started") as caught:
        check(*worlds, environment_timeout=0.02 if opening is hang else 300.0)
    assert message in str(caught.value)
    assert all(world.calls.count("close") == 1 for world in worlds)


def test_an_environment_that_needs_more_calls_than_there_are_is_refused() -> None:
    class Long(Told):
        required_steps = 4

    def check(*overrides: str) -> None:
        inputs = make_inputs([Task("t", (user("?"),))], [], {"long": lambda: Long()})
        check_first_prompts(inputs, plain_renderer(), tiny(*overrides), 128, print)

    check("rollout.max_steps=4")
    message = r"task t: .* 'long' needs 4 calls .* rollout\.max_steps is 3; set rollout\.max_steps=4, or"
    with pytest.raises(ConfigError, match=message):
        check()
    Long.required_steps = "x"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="reset raised ValueError"):
        check()


def test_a_first_prompt_that_is_too_long_is_refused() -> None:
    tokens = len(plain_ids(chatml([user("hello")])))
    with pytest.raises(ConfigError, match=f"has {tokens} tokens, rollout.max_input_tokens is {tokens - 1}"):
        check(Told(), max_input_tokens=tokens - 1)
    check(Told(), max_input_tokens=tokens)


def test_limits_beyond_the_models_context_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_completion_tokens 5 = 69 exceeds .* context of 68"):
        check(Told(), context=68)
    check(Told(), context=69)


def test_nothing_is_left_behind_by_a_run_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceeds the model's context of 128"):
        start(tmp_path / "run", "rollout.max_input_tokens=200")
    with pytest.raises(ConfigError, match="qwen3 knows no"):
        start(tmp_path / "run", "model.build.hidden_sise=3")
    assert not (tmp_path / "run").exists()


# The engine


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    return [load_model(tiny().model, seed) for seed in (0, 1)]


def trainer_of(model: PreTrainedModel, *overrides: str) -> EmbeddedTrainer:
    config = tiny(*overrides)
    return EmbeddedTrainer(Learner(model, config.training, config.algorithm, 4), TOKENIZER, Compute(None))


def check_trainers(model: PreTrainedModel, *trainers: EmbeddedTrainer, ignoring: bool = False) -> None:
    """With an engine that has a copy of the model, until a trainer publishes to it."""
    renderer = load_chat(tiny().model)[1]

    async def ignored(weights: Any, version: int) -> None: ...

    async def go() -> None:
        engine = embedded_engine(EngineConfig(batch=4), renderer, model)
        if ignoring:
            engine.update_weights = ignored  # type: ignore[method-assign]
        try:
            for trainer in trainers:
                await check_engine(engine, EmbeddedSync(trainer, engine), trainer, renderer)
        finally:
            await engine.close()

    asyncio.run(go())


def test_an_engine_with_the_trainers_weights_passes(models: list[PreTrainedModel]) -> None:
    check_trainers(models[1], trainer_of(models[0]))  # publication brings the weights of the other model


def test_a_trainer_in_bfloat16_is_not_taken_for_another_policy() -> None:
    """Its rounding is no difference of weights."""
    model = load_model(tiny().model, 0)
    for parameter in model.parameters():
        parameter.data *= 5  # fresh weights make nearly uniform distributions, which hardly round
    trainers = [trainer_of(model, f"training.precision={precision}") for precision in ("float32", "bfloat16")]
    exact, rounded = (trainer._learner.logprobs(flatten(random_groups(0))) for trainer in trainers)
    assert np.abs(exact - rounded).max() > 1e-2
    check_trainers(model, *trainers)


def test_an_engine_that_ignores_a_publication_is_refused(models: list[PreTrainedModel]) -> None:
    with pytest.raises(EngineError, match=r"TorchEngine reports .* differ from those of the learner by up to"):
        check_trainers(models[1], trainer_of(models[0]), ignoring=True)
