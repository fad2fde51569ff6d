"""A call of one vLLM server, wherever it is made: by the run's process, or on a cluster by the server's own actor."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Ids, Routing, SamplingParams, StopReason
from treadle.engines.vllm.admission import Admission
from treadle.engines.vllm.launch import VERSION
from treadle.engines.vllm.server import Server

COLDEST = 0.01
"""The lowest temperature above 0 at which vLLM samples."""


def check_call(prompt: int, sampling: SamplingParams, context: int) -> None:
    """Raise EngineError for a call that does not fit the context, or whose sampling vLLM would change silently."""
    if prompt + sampling.max_tokens > context:  # vLLM would silently cut the completion short
        raise EngineError(
            f"prompt of {prompt} + max_tokens {sampling.max_tokens} exceeds the servers' context of {context}"
        )
    if 0 < sampling.temperature < COLDEST:
        told = sampling.temperature
        raise EngineError(f"told temperature {told}, vLLM samples at {COLDEST}; use 0 or at least that")


async def sample(
    server: Server,
    admission: Admission,
    prompt_ids: Ids,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    cache_salt: str | None,
    expert_layers: Sequence[int] | None = None,
) -> Completion:
    """Sample one completion of admitted weights. Cancelling aborts it on the server.

    expert_layers: the hidden layers whose experts the completion reports, by number; None: it reports none.
    Raises EngineError for a request that the server refuses, for weights that were not admitted, and for experts that
    the server does not report; ServerLost.
    """
    await admission.settled()  # a completion that begins now is of the new weights
    body: dict[str, Any] = {
        "token_ids": np.asarray(prompt_ids).tolist(),
        "sampling_params": _sampling_body(sampling, stop_token_ids),
        "cache_salt": admission.now.salt(cache_salt),
    }
    if expert_layers is not None:  # of the token that the first one is predicted from, and of all that follow
        body["sampling_params"]["routed_experts_prompt_start"] = len(prompt_ids) - 1
    answer = await server.post("/inference/v1/generate", body)
    await admission.settled()  # one that ends now may hold tokens of weights that are not admitted yet
    [choice] = answer["choices"][:1]
    logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
    return Completion(
        token_ids=np.array(choice["token_ids"], np.int32),
        logprobs=np.zeros_like(logprobs) if sampling.temperature == 0 else np.minimum(logprobs, 0.0),
        stop_reason=StopReason(choice["finish_reason"]),
        policy_versions=admission.now.spans(choice["weight_versions"] or []),
        routing=None if expert_layers is None else decode_routing(server, choice, expert_layers),
    )


def decode_routing(server: Server, choice: Mapping[str, Any], expert_layers: Sequence[int]) -> Routing | None:
    """Return the experts that a choice of an answer reports for its C sampled tokens: int16[C, M, k]; None without any.

    vLLM reports all hidden layers, with zeros for those without experts; only `expert_layers` are kept.
    Raises EngineError if there is not a row for each sampled token.
    """
    tokens, encoded = len(choice["token_ids"]), choice.get("routed_experts")
    if not tokens:  # aborted before its first one
        return None
    if encoded is None:
        raise EngineError(
            f"{server} does not report the experts it chose; start it with --enable-return-routed-experts, or set "
            "training.routing_replay to false"
        )
    try:
        reported = np.load(io.BytesIO(b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EngineError(f"{server} reports experts that are no .npy file in base64: {error}") from error
    if reported.ndim != 3 or len(reported) != tokens or reported.shape[1] <= max(expert_layers):
        raise EngineError(
            f"{server} reports experts of shape {reported.shape} for {tokens} sampled tokens and hidden layers up to "
            f"{max(expert_layers)}; use vLLM {VERSION}, or set training.routing_replay to false"
        )
    return np.asarray(reported[:, list(expert_layers)], np.int16)


def _sampling_body(sampling: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's sampling parameters. Everything that could have a default on the server is set."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # which would be the server's idea of it
        "stop_token_ids": list(stop_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
