"""From the `engine` section to an engine that serves a policy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from treadle.core.engine import Engine
from treadle.engines.config import EngineConfig
from treadle.engines.engine_process import start_engine
from treadle.engines.staging import new_name
from treadle.engines.weights import unique_weights
from treadle.orchestration.policy import Policy, exact_logprobs
from treadle.training.checkpoint import write_model

_PROOF = 64  # tokens that new weights are proven with


async def open_engine(
    config: EngineConfig,
    policy: Policy,
    logs: Path | None = None,
    routing: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Engine:
    """An engine with the policy's present weights, or with any if its servers run already: publish before it samples.

    logs: where other processes write theirs; default: a temporary directory, which stays. routing: kind torch tells
    which experts are chosen; with others, a run refuses it. say: told of an own process that was started again.
    Raises ConfigError or EngineError.
    """
    if config.kind == "torch" and not config.own_process:
        return policy.engine(config, routing)
    logs = logs or Path(tempfile.mkdtemp(prefix="treadle-logs-"))
    return await (
        _own_process(config, policy, logs, routing, say) if config.kind == "torch" else _vllm(config, policy, logs)
    )


async def _own_process(
    config: EngineConfig, policy: Policy, logs: Path, routing: bool, say: Callable[[str], None]
) -> Engine:
    with ExitStack() as cleanup:
        model = new_name(Path(tempfile.gettempdir()))
        model.mkdir(mode=0o700)
        cleanup.callback(shutil.rmtree, model, ignore_errors=True)
        write_model(model, policy.model, policy.tokenizer_path)
        return await start_engine(
            model,
            stop_token_ids=policy.stop_token_ids,
            log=logs / "engine.log",
            max_batch=config.batch,
            dtype=config.dtype,
            lock_step=config.lock_step is not False,
            in_flight=config.in_flight,
            routing=routing,
            say=say,
            on_close=cleanup.pop_all().close,
        )


async def _vllm(config: EngineConfig, policy: Policy, logs: Path) -> Engine:
    from treadle.engines.vllm.publication import Proof  # httpx, which only this needs
    from treadle.engines.vllm.start import open_engine as start

    vocabulary = policy.model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, min(_PROOF, policy.context - 1)).astype(np.int32)

    def proof() -> Proof:
        return Proof(ids, exact_logprobs(policy.model, ids), config.tolerance)

    connected = partial(
        start,
        config,
        stop_token_ids=policy.stop_token_ids,
        logs=logs,
        shapes={name: tuple(tensor.shape) for name, tensor in unique_weights(policy.model).items()},
        proof=proof,
    )
    if config.vllm.urls:  # servers that have a model
        return await connected(model=None)
    model = Path(tempfile.mkdtemp(prefix="treadle-model-"))
    write_model(model, policy.model, policy.tokenizer_path)
    return await connected(model=model, on_close=partial(shutil.rmtree, model))
