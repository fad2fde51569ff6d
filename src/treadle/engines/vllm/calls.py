"""A completion from one vLLM server, called by the run's process, or on a cluster by the server's own actor."""

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
    """Raise EngineError for a call that does not fit the context, or whose sampling vLLM would silently change."""
    if prompt + sampling.max_tokens > context:  # vLLM would silently cut the completion short
        raise EngineError(
            f"prompt of {prompt} + max_tokens {sampling.max_tokens} exceeds the servers' context of {context}"
        )
    if 0 < sampling.temperature < COLDEST:
        raise EngineError(
            f"vLLM clamps temperatures below {COLDEST} (got {sampling.temperature}); use 0 or >= {COLDEST}"
        )


async def sample(
    server: Server,
    admission: Admission,
    prompt_ids: Ids,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    cache_salt: str | None,
    expert_layers: Sequence[int] | None = None,
) -> Completion:
    """Sample one completion from admitted weights. Cancelling aborts it on the server.

    expert_layers: hidden layers whose experts the completion reports; None: no routing.
    Raises EngineError for a refused request, weights that were not admitted, or missing experts; ServerLost.
    """
    await admission.settled()  # a completion that begins now is of the new weights
    params: dict[str, Any] = {  # every parameter that could have a default on the server
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "logprobs": 0,  # of the sampled token only
        "ignore_eos": True,  # the server's idea of it; stop_token_ids has ours
        "stop_token_ids": list(stop_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    if expert_layers is not None:  # from the prompt's last token on, which predicts the first sampled one
        params["routed_experts_prompt_start"] = len(prompt_ids) - 1
    ids, salt = np.asarray(prompt_ids).tolist(), admission.now.salt(cache_salt)
    body = {"token_ids": ids, "sampling_params": params, "cache_salt": salt}
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
    """Return the experts chosen for C sampled tokens in these M layers: int16[C, M, k]; None if no token was sampled.

    vLLM reports all hidden layers, with zeros for those without experts.
    Raises EngineError unless there is one row for each sampled token.
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
