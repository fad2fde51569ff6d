"""Runs of a tiny mixture of experts whose routing is told, recorded and replayed."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from tests.runs import Interrupting, check_finished, query, recorded, resume, start, updates
from tests.worlds import tiny
from treadle.core.engine import Completion
from treadle.core.errors import ConfigError, EngineError
from treadle.core.types import Routing
from treadle.engines.compute import Compute
from treadle.engines.weight_sync import EmbeddedSync
from treadle.loop.engines import EngineSpec, check_engine, embedded_engine
from treadle.models.chat import load_chat
from treadle.models.model_files import tokenizer_directory
from treadle.training.learner import Learner
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedTrainer

MOE = (
    "model.build={model_type: qwen3_moe, hidden_size: 32, intermediate_size: 64, moe_intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, num_local_experts: 4, "
    "num_experts_per_tok: 2, max_position_embeddings: 128, norm_topk_prob: true}",
    "training.routing_replay=true",
    "data.held_out=null",
    "orchestration.checkpoint_every=1",
)


def test_a_run_replays_what_it_recorded_and_repeats(tmp_path: Path) -> None:
    """Two updates; then again, stopped after the first."""
    summary = start(tmp_path / "run", *MOE, "orchestration.updates=2")
    check_finished(tmp_path / "run")
    rows = updates(tmp_path / "run")
    assert len(rows) == 2 and all(row["trainable_tokens"] > 0 for row in rows)
    assert max(row["logprob_gap_max"] for row in rows) < 1e-5
    steps = [step for _, own in recorded(tmp_path / "run") for step in own]
    assert len(steps) == len(query(tmp_path / "run", "SELECT 1 FROM steps")) > 12
    for step in steps:
        assert step.routing is not None and step.routing.shape == (len(step.completion_ids), 2, 2)
    assert len(np.unique(np.concatenate([s.routing for s in steps if s.routing is not None]))) > 2
    table = pandas.read_parquet(tmp_path / "run" / "rollouts")
    row = table.iloc[0]
    assert np.frombuffer(row.routing, "<i2").reshape(row.routing_shape).shape == (len(row.completion_ids), 2, 2)

    start(tmp_path / "half", *MOE, "orchestration.updates=2", progress=Interrupting(signal.SIGTERM, 1))
    assert len(updates(tmp_path / "half")) == 1
    assert resume(tmp_path / "half")["weights_sha256"] == summary["weights_sha256"]


def test_a_model_without_experts_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no experts to replay; set training\.routing_replay"):
        start(tmp_path / "run", "training.routing_replay=true")
    assert not (tmp_path / "run").exists()


LIES: dict[str, tuple[Callable[[Routing], Routing | None], str]] = {
    "none": (lambda told: None, "TorchEngine does not report the experts it chose; use an engine that does"),
    "the next token's": (lambda told: np.roll(told, -1, 0), "reports experts, "),
    "layers mixed up": (lambda told: told[:, ::-1], "reports experts, "),
    "too few layers": (lambda told: told[:, :1], r"shape \(8, 1, 1\), the learner chooses \(8, 2, 1\)"),
    "too few tokens": (lambda told: told[1:], r"shape \(7, 2, 1\), the learner chooses \(8, 2, 1\)"),
    "nothing": (lambda told: told, ""),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_experts_of_a_first_call_are_compared_with_the_learners(lie: str) -> None:
    falsify, message = LIES[lie]
    config = tiny(*MOE, "model.build.num_experts_per_tok=1", "model.build.num_local_experts=16")
    renderer, model = load_chat(config.model, None)[1], load_model(config.model, 0)
    tokenizer = tokenizer_directory(config.model)
    trainer = EmbeddedTrainer(Learner(model, config.training, config.algorithm, 4), tokenizer, Compute(None))

    async def check() -> None:
        engine = embedded_engine(EngineSpec(config.engine, renderer, trainer, lambda: model, routing=True), model)
        generate = engine.generate

        async def falsified(*arguments: Any, **options: Any) -> Completion:
            answer = await generate(*arguments, **options)
            assert answer.routing is not None
            return replace(answer, routing=falsify(answer.routing))

        engine.generate = falsified  # type: ignore[method-assign]
        try:
            await check_engine(engine, EmbeddedSync(trainer, engine), trainer, renderer)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=message) if message else nullcontext():
        asyncio.run(check())


def test_routing_is_not_recorded_unless_it_is_replayed(tmp_path: Path) -> None:
    start(tmp_path / "run", *MOE, "training.routing_replay=false", "orchestration.updates=1")
    assert all(step.routing is None for _, own in recorded(tmp_path / "run") for step in own)
