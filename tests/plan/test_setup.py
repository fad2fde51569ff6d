"""Fail at start: what is checked before the first rollout, how many threads compute, and the warm start."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import random_groups
from tests.models import tiny as tiny_model
from tests.runs import check_finished, resume, start
from tests.worlds import Quiet, Ragged, Told, chatml, hang, plain_ids, plain_renderer, tiny, user
from treadle.core.errors import ConfigError, DataError, EngineError, RunError, TrainingStopped
from treadle.core.types import Task
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
from treadle.engines.weight_sync import EmbeddedSync
from treadle.loop.engines import EngineSpec, check_engine, embedded_engine
from treadle.loop.thread_count import SMALL, default_threads
from treadle.models.chat import load_chat
from treadle.models.model_files import tokenizer_directory
from treadle.packing.flat import flatten
from treadle.plan.config import config_of
from treadle.plan.inputs import Inputs, make_inputs
from treadle.plan.plan import make
from treadle.plan.start import check_first_prompts
from treadle.plan.validation import check_context
from treadle.record.run_directory import RunDirectory
from treadle.rollout.attempt import Players
from treadle.training.learner import Learner
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedTrainer

TOKENIZER = tokenizer_directory(tiny().model)

# Tasks and environments


def test_a_task_without_an_environment_is_refused() -> None:
    task = Task("t", (user("?"),))
    with pytest.raises(ConfigError, match="name neither an environment nor an agent"):
        make_inputs([task], [])
    assert make_inputs([task], [], Players({"w": Ragged})).train[0].environment == "w"


def test_no_tasks_and_shared_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no training tasks"):
        make_inputs([], [Task("t", (user("?"),), "w")], Players({"w": Ragged}))
    with pytest.raises(DataError, match="held-out tasks are training tasks too, for example 't'"):
        make_inputs([Task("t", (user("?"),), "w")], [Task("t", (user("?"),), "w")], Players({"w": Ragged}))


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
        inputs = make_inputs([Task("t", (user("?"),))], [], Players({"long": lambda: Long()}))
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


@pytest.mark.parametrize(
    ("overrides", "fitting"),
    [
        ([], "rollout.max_input_tokens=96 and rollout.max_completion_tokens=32"),
        (["rollout.max_completion_tokens=8"], "rollout.max_input_tokens=120 and rollout.max_completion_tokens=8"),
        (
            ["evaluation.max_completion_tokens=64", "rollout.compaction={}"],
            "rollout.max_input_tokens=96 and rollout.max_completion_tokens=32 and evaluation.max_completion_tokens=32 "
            "and rollout.compaction.max_tokens=32",
        ),
    ],
)
def test_limits_that_fit_are_proposed(overrides: list[str], fitting: str) -> None:
    limits = ("rollout.max_input_tokens=1024", "rollout.max_completion_tokens=256", *overrides)
    with pytest.raises(ConfigError, match=f"exceeds the model's context of 128; set {re.escape(fitting)}$"):
        check_context(tiny(*limits), 128)
    check_context(tiny(*limits, *fitting.split(" and ")), 128)


# The engine


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    return [load_model(tiny().model, seed) for seed in (0, 1)]


def trainer_of(model: PreTrainedModel, *overrides: str) -> EmbeddedTrainer:
    config = tiny(*overrides)
    return EmbeddedTrainer(Learner(model, config.training, config.algorithm, 4), TOKENIZER, Compute(None))


def check_trainers(model: PreTrainedModel, *trainers: EmbeddedTrainer, ignoring: bool = False) -> None:
    """With an engine that has a copy of the model, until a trainer publishes to it."""
    renderer = load_chat(tiny().model, None)[1]

    async def ignored(weights: Any, version: int) -> None: ...

    async def go() -> None:
        engine = embedded_engine(EngineSpec(EngineConfig(batch=4), renderer, trainers[0], lambda: model), model)
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


def test_layers_that_sample_otherwise_than_they_score_have_a_wider_bound() -> None:
    """Nemotron-H limits time steps only where it computes several tokens."""
    model = tiny_model("nemotron-h", vocab_size=726, time_step_min=0.03)
    trainer = trainer_of(model)
    assert trainer.model.decoding_gap is not None and trainer_of(tiny_model()).model.decoding_gap is None
    check_trainers(model, trainer)
    trainer.model = replace(trainer.model, decoding_gap=None)
    with pytest.raises(EngineError, match="differ from"):
        check_trainers(model, trainer)


def test_the_bound_of_such_layers_is_named_with_its_reason() -> None:
    first, second = (tiny_model("qwen3-5", seed, vocab_size=726) for seed in (0, 1))
    with pytest.raises(EngineError, match=r"up to .* \(0\.01 is allowed, as its recurrent layers go token by token in"):
        check_trainers(second, trainer_of(first), ignoring=True)


WAITING = "from treadle.loop.thread_count import wait_passively; print(wait_passively()); import os; "
WAITING += "print(os.environ.get('OMP_WAIT_POLICY'))"


@pytest.mark.parametrize(
    ("parameters", "cores", "environment", "threads"),
    [
        (SMALL - 1, 64, {}, 1),
        (SMALL, 64, {}, 64),
        (SMALL, 64, {"OMP_NUM_THREADS": "7"}, 7),
        (400_000, 2, {"OMP_NUM_THREADS": "3,1"}, 3),
        (SMALL, 2, {"OMP_NUM_THREADS": ""}, 2),
    ],
)
def test_the_default_is_a_rule_of_parameters_and_cores(
    parameters: int, cores: int, environment: dict[str, str], threads: int
) -> None:
    assert default_threads(parameters, cores, environment) == threads


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{value}'; give the number"):
        default_threads(1, 2, {"OMP_NUM_THREADS": value})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "before", "printed"),
    [
        ({}, "", "True PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "", "True ACTIVE"),
        ({"GOMP_SPINCOUNT": "1000"}, "", "True None"),
        ({}, "import torch; ", "False PASSIVE"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "import torch; ", "True PASSIVE"),
    ],
)
def test_threads_wait_passively_unless_the_environment_says_otherwise_or_torch_is_loaded(
    given: dict[str, str], before: str, printed: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", before + WAITING], env={**inherited, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == printed.split()


def test_a_run_stores_its_threads_says_them_first_and_takes_them_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    path, said = tmp_path / "run", Quiet()
    given = ("training.threads=null", "orchestration.updates=1", "warm_start=null")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    start(path, *given, progress=said)
    assert said.lines[0].startswith(f"run directory: {path} (cpu, 2 threads")  # a note follows where there is one core
    stored = config_of(RunDirectory.open(path))
    assert (stored.training.threads, stored.device) == (2, "cpu")
    assert (stored.training.precision, stored.engine.dtype) == ("float32", "float32")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        summary = resume(path, config=tiny("training.threads=null", "orchestration.updates=2", "warm_start=null"))
    finally:
        torch.set_num_threads(threads)  # of the tests that follow
    assert summary["threads"] == 2 and config_of(RunDirectory.open(path)).training.threads == 2


WARM = (
    "warm_start.demonstrations='tests.worlds:vowel_demonstration'",
    "warm_start.steps=6",
    "warm_start.batch_size=4",
    "warm_start.learning_rate=3e-3",
    "orchestration.updates=2",
    "data.held_out=null",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm_start"


def test_the_second_run_reads_the_first_ones_warm_start(tmp_path: Path, cache: Path) -> None:
    first = start(tmp_path / "first", *WARM)
    progress = Quiet()
    second = start(tmp_path / "second", *WARM, progress=progress)
    assert (first["warm_start"]["cached"], second["warm_start"]["cached"]) == (False, True)
    assert (first["warm_start"]["loss"], first["warm_start"]["steps"]) == (
        second["warm_start"]["loss"],
        second["warm_start"]["steps"],
    )
    assert first["warm_start"]["steps"] == 6
    assert any("read from the cache" in line for line in progress.lines)
    assert first["weights_sha256"] == second["weights_sha256"]
    check_finished(tmp_path / "second")
    assert len(list(cache.iterdir())) == 1
    cold = start(tmp_path / "cold", *WARM[-2:])
    assert cold["warm_start"] is None
    for name, phases in (("first", ["warm start"]), ("second", ["warm start"]), ("cold", [])):
        rows = RunDirectory.open(tmp_path / name).intervals()
        assert [row["phase"] for row in rows if (row["phase"], row["update"]) == ("warm start", 0)] == phases
        assert rows == sorted(rows, key=lambda row: float(row["started"]))
    assert cold["weights_sha256"] != first["weights_sha256"]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "override", ["seed=1", "warm_start.steps=5", "warm_start.learning_rate=1e-3", "model.build.hidden_size=64"]
)
def test_another_warm_start_is_not_taken_for_this_one(override: str, tmp_path: Path, cache: Path) -> None:
    start(tmp_path / "first", *WARM)
    assert not start(tmp_path / "second", *WARM, override)["warm_start"]["cached"]
    assert len(list(cache.iterdir())) == 2


def test_a_warm_start_that_did_not_learn_stops_the_run_and_caches_nothing(tmp_path: Path, cache: Path) -> None:
    for name in ("first", "second"):
        with pytest.raises(TrainingStopped, match="did not learn its demonstrations"):
            start(tmp_path / name, *WARM, "warm_start.max_loss=0.01")
    with pytest.raises(TrainingStopped, match="did not learn its demonstrations"):
        resume(tmp_path / "first")  # which has recorded nothing, and is begun anew
    assert not cache.exists()


def test_a_damaged_entry_is_made_again(tmp_path: Path, cache: Path) -> None:
    start(tmp_path / "first", *WARM)
    [entry] = cache.iterdir()
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert not start(tmp_path / "second", *WARM)["warm_start"]["cached"]
    assert start(tmp_path / "third", *WARM)["warm_start"]["cached"]


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "file"))
    progress = Quiet()
    start(tmp_path / "run", *WARM, progress=progress)
    check_finished(tmp_path / "run")
    assert any("the warm start was not cached: could not write" in line for line in progress.lines)


def test_demonstrations_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "demonstrations.jsonl"
    line = {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "aa"}]}
    file.write_text(json.dumps(line) + "\n")
    options = (*WARM, f"warm_start.demonstrations='{file}'")
    assert not start(tmp_path / "first", *options)["warm_start"]["cached"]
    assert start(tmp_path / "second", *options)["warm_start"]["cached"]
    file.write_text(json.dumps(line).replace("aa", "ee") + "\n")
    assert not start(tmp_path / "third", *options)["warm_start"]["cached"]


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("warm_start.demonstrations=missing.jsonl", ConfigError, "warm_start.demonstrations: .*'missing.jsonl'"),
        ("warm_start.demonstrations=nobody", ConfigError, "'nobody' is not registered"),
        ("warm_start.demonstrations='tests.worlds:nothing'", ConfigError, "has no 'nothing'"),
        ("warm_start.options={colour: red}", ConfigError, "do not fit"),
        (
            "warm_start={demonstrations: arithmetic, options: {expert: 2}}",
            ConfigError,
            "expert is a share and must lie between 0 and 1, got 2",
        ),
        ("warm_start.demonstrations='{}/empty.jsonl'", DataError, "has no demonstrations"),
    ],
)
def test_demonstrations_that_cannot_work_are_refused_before_the_run_exists(
    override: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(error, match=message):
        start(tmp_path / "run", *WARM, override.replace("{}", str(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_too_little_space_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 29_000_000))
    plan = make(tiny("orchestration.keep_last=2"), Inputs([], []))
    assert plan.require_space(tmp_path, 9_000_000).startswith("3 checkpoints of 9.0 MB each, 29.0 MB free at ")
    with pytest.raises(RunError, match=r"3 checkpoints of 10\.0 MB each, 29\.0 MB free at .*; free some space"):
        plan.require_space(tmp_path, 10_000_000)
