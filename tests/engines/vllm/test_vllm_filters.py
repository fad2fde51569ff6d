"""Which tokens filters left, read from what servers list. Needs no vLLM."""

from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.test_vllm_routing import Scripted, config
from tests.http_servers import answering, serving
from tests.sources import FixedWeights
from treadle.core.errors import EngineError
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.launch import alternatives
from treadle.engines.vllm.server import Server, decode_probabilities, decode_support

REMOVED = -9999.0


def token(sampled: int, listed: dict[int, float]) -> dict[str, Any]:
    top = [{"token_id": ident, "logprob": logprob} for ident, logprob in listed.items()]
    return {"token_id": sampled, "logprob": listed[sampled], "top_logprobs": top}


async def test_what_is_listed_with_a_probability_was_left() -> None:
    choice = {"logprobs": {"content": [token(7, {7: -0.7, 3: -0.7, 5: REMOVED}), token(2, {2: 0.0, 9: REMOVED})]}}
    support = decode_support(Server("http://nowhere"), choice)
    assert (support.counts.tolist(), support.ids.tolist()) == ([2, 1], [3, 7, 2])


async def test_a_list_that_may_lack_tokens_is_refused() -> None:
    choice = {"logprobs": {"content": [token(7, {7: -1.1, 3: -1.1, 5: -1.1})]}}
    with pytest.raises(EngineError, match=r"kept 3 tokens or more, .* set engine\.dtype=float32"):
        decode_support(Server("http://nowhere"), choice)


async def test_probabilities_are_of_the_most_probable_whatever_was_sampled() -> None:
    first = token(8, {8: -5.0, 3: -1.0, 7: -0.5, 5: REMOVED})
    choice = {"logprobs": {"content": [first, token(2, {2: 0.0, 9: REMOVED})]}}
    found = decode_probabilities(choice, 2)
    assert (found.of.counts.tolist(), found.of.ids.tolist()) == ([2, 1], [3, 7, 2])
    np.testing.assert_allclose(found.values, np.exp([-1.0, -0.5, 0.0]), rtol=1e-6)


class Short(Scripted):
    """As vLLM started with --max-logprobs 20, its default."""

    def __call__(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        asked = body.get("sampling_params", {}).get("logprobs", 0)
        return (400, f"{asked}, greater than max allowed: 20") if asked > 20 else super().__call__(path, headers, body)


async def test_a_running_server_that_lists_too_few_is_refused_at_the_start() -> None:
    with serving(answering(Short())) as url:
        with pytest.raises(EngineError, match=r"max allowed: 20.*; rollout\.top_k=20 needs --max-logprobs 33$"):
            await open_engine(config(url), FixedWeights(), serve=None, stop_token_ids=[], top_k=20)
        for top_k in (0, 9):
            engine, _ = await open_engine(config(url), FixedWeights(), serve=None, stop_token_ids=[], top_k=top_k)
            await engine.close()


def test_more_than_top_k_are_listed_so_that_ties_show() -> None:
    assert [alternatives(k) for k in (0, 1, 20, 256, 257)] == [0, 9, 33, 328, 0]
