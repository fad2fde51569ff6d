"""What can be checked of a configuration by itself: names, files, settings that do not fit. Needs no torch."""

from __future__ import annotations

import importlib.util

from treadle.core.errors import ConfigError
from treadle.core.registry import check_name, how_to_install
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import check_reports_experts, find_python
from treadle.models.model_files import check_model_files, require_model
from treadle.orchestration.config import RunConfig
from treadle.rendering.replies import AUTO, reply_parser
from treadle.rollout.config import listen
from treadle.rollout.rewards import load_shaping
from treadle.training.validation import check_algorithm


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for a configuration with which no run could work."""
    check_settings(config)
    check_engine_config(config.engine, config.training.routing_replay)
    check_model_files(config.model)
    if config.algorithm.kl is not None and config.algorithm.kl.model is not None:
        require_model(config.algorithm.kl.model, "algorithm.kl.model")
    context = (config.model.build or {}).get("max_position_embeddings")
    if isinstance(context, int):
        check_context(config, context)


def check_settings(config: RunConfig) -> None:
    """Raise ConfigError for settings that do not fit together, unknown names, or an address that is not free."""
    _check_colocation(config)
    check_algorithm(config.algorithm, config.training, config.rollout.filters)
    if config.rewards.shaping is not None:
        load_shaping(config.rewards.shaping)
    _check_rollout(config)


def _check_colocation(config: RunConfig) -> None:
    if not config.placement.colocate:
        return
    if config.orchestration.max_staleness:
        raise ConfigError(
            f"orchestration.max_staleness is {config.orchestration.max_staleness}, and with placement.colocate nothing "
            "is sampled while the learner works; set it to 0, or give engines places of their own"
        )
    if config.engine.kind != "torch":
        raise ConfigError(
            f"engine.kind is {config.engine.kind!r}, and placement.colocate is for engines of kind torch; set one of "
            "them to another"
        )


def check_playing(config: RunConfig) -> None:
    """Raise ConfigError for an unknown reply parser, an engine that could not start, or an address that is not free."""
    _check_rollout(config)
    check_engine_config(config.engine)


def _check_rollout(config: RunConfig) -> None:
    if config.rollout.reply_parser != AUTO:
        reply_parser(config.rollout.reply_parser)
    listen(config.rollout.gateway).close()


def check_context(config: RunConfig, context: int) -> None:
    """Raise ConfigError if the longest prompt and completion together exceed the model's context, in tokens."""
    completion = max(config.rollout.max_completion_tokens, config.evaluation.max_completion_tokens or 0)
    longest = config.rollout.max_input_tokens + completion
    if longest > context:
        raise ConfigError(
            f"rollout.max_input_tokens {config.rollout.max_input_tokens} + max_completion_tokens "
            f"{completion} = {longest} exceeds the model's context of {context}; lower one of them"
        )


def check_engine_config(config: EngineConfig, routing: bool = False) -> None:
    """Raise ConfigError for a configuration with which no engine could be started.

    routing: it is to report the experts it chose.
    """
    check_name("engines", config.kind, "engine.kind")
    if config.kind != "vllm":
        return
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"engine.kind=vllm needs httpx; {how_to_install('httpx')}")
    if not config.vllm.urls:
        python = find_python(config.vllm.python)
        if routing:
            check_reports_experts(python)
