"""`VLLMEngine` on real servers: what it samples, scores, refuses and survives."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.engines.vllm.conftest import END, NAMES, TOKENIZER, Connect, Servers, engine_core, metric, sized
from tests.sources import publish
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Form, Ids, SamplingParams, StopReason
from treadle.engines.vllm.engine import VLLMEngine
from treadle.models.weights import unique_weights
from treadle.rendering.forms import Turn, turn_grammar
from treadle.rendering.grammars import Grammars
from treadle.rendering.replies import plain

pytestmark = pytest.mark.xdist_group("vllm")

PROMPT = np.array([5, 6, 7, 8, 100, 200, 300], np.int32)


def logits(model: PreTrainedModel, prompt: Ids, completion: Ids) -> torch.Tensor:
    """[C, V], each from everything before it, without a cache."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].double()


def filtered(scaled: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities [C, V] after filters, written down as they are defined."""
    probabilities = scaled.softmax(-1)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.min_p:
        keep &= probabilities >= sampling.min_p * probabilities.max(-1, keepdim=True).values
    ranked, order = torch.where(keep, probabilities, 0.0).sort(-1, descending=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    if sampling.top_k:
        keep &= rank < sampling.top_k
    if sampling.top_p < 1:
        kept = torch.where(keep, probabilities, 0.0)
        ranked = (kept / kept.sum(-1, keepdim=True)).gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        keep &= torch.zeros_like(keep).scatter_(-1, order, before < sampling.top_p)
    return scaled.masked_fill(~keep, -torch.inf).log_softmax(-1)


def expected(model: PreTrainedModel, answer: Completion, sampling: SamplingParams) -> torch.Tensor:
    """[C, V] log-probabilities."""
    return filtered(logits(model, PROMPT, answer.token_ids) / sampling.temperature, sampling)


async def sampled(engine: VLLMEngine, sampling: SamplingParams, session: str, prompt: Ids = PROMPT) -> Completion:
    engine.open_session(session)
    try:
        return await engine.generate(prompt, sampling, session=session)
    finally:
        engine.close_session(session)


@pytest.mark.parametrize("name", NAMES)
async def test_what_follows_a_grammar_has_the_masks_that_are_derived_here(
    name: str, servers: Servers, connect: Connect
) -> None:
    """Each alternative of every token is scored: a mask that differed in one of them would show."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    grammars, model = Grammars(tokenizer.backend_tokenizer), sized(servers[name].family, 0)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}, "k": {"enum": ["x", None]}},
        "required": ["a", "n", "k"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # otherwise random weights write a lot of it
    }
    forms = [Form.json(schema), Form("regex", "[a-f]{3,9}(!|[?])"), Form.choice(["yes", "no"])]
    stop = [END, 0]
    written = [turn_grammar(Turn(form), plain, grammars, stop) for form in forms]
    kinds = [SamplingParams(max_tokens=60, grammar=each, seed=n, temperature=1.3) for n, each in enumerate(written)]
    async with connect(name, stop_token_ids=stop) as engine:
        answers = await asyncio.gather(*[sampled(engine, kind, f"s{n}") for n, kind in enumerate(kinds)])
        with pytest.raises(EngineError, match="unknown name"):
            await sampled(engine, SamplingParams(grammar="start: nothing"), "wrong")
        with pytest.raises(EngineError, match="vLLM cannot forbid ids"):
            await sampled(engine, SamplingParams(forbidden=(5,)), "forbidden")
    for kind, answer in zip(kinds, answers, strict=True):
        support = grammars.support(kind, answer.token_ids)
        assert answer.stop_reason is StopReason.STOP
        scaled = logits(model, PROMPT, answer.token_ids) / kind.temperature
        possible = torch.from_numpy(support.possible(scaled.shape[1]))
        logprobs = scaled.masked_fill(~possible, -torch.inf).log_softmax(-1)
        chosen = torch.from_numpy(answer.token_ids.astype(np.int64))[:, None]
        np.testing.assert_allclose(answer.logprobs, logprobs.gather(1, chosen)[:, 0], atol=1e-4)
        assert (answer.logprobs[support.counts == 1] == 0).all()


@pytest.mark.parametrize("name", NAMES)
async def test_probabilities_are_of_the_most_probable(name: str, servers: Servers, connect: Connect) -> None:
    model = sized(servers[name].family, 0)
    kinds = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, temperature=1.7, seed=1),
        SamplingParams(max_tokens=12, temperature=0.8, seed=2, top_k=5),
        SamplingParams(max_tokens=12, temperature=0.0),
    ]
    async with connect(name, stop_token_ids=[], probabilities=20) as engine:
        answers = await asyncio.gather(*[sampled(engine, kind, f"s{n}") for n, kind in enumerate(kinds)])
    assert answers[-1].probabilities is None  # certain, and never trained
    for kind, answer in zip(kinds[:-1], answers[:-1], strict=True):
        q = answer.probabilities
        assert q is not None and (q.of.counts == (kind.top_k or 19)).all()
        wanted = filtered(logits(model, PROMPT, answer.token_ids) / kind.temperature, kind).exp()
        for token, p in enumerate(wanted.numpy()):
            own = q[token : token + 1]
            np.testing.assert_allclose(own.values, p[own.of.ids], atol=1e-4)
            assert own.values.min() > np.delete(p, own.of.ids).max() - 1e-4


@pytest.mark.parametrize("name", NAMES)
async def test_log_probabilities_are_those_of_the_distribution_sampled_from(
    name: str, servers: Servers, connect: Connect
) -> None:
    model = sized(servers[name].family, 0)
    kinds = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.6),
        SamplingParams(max_tokens=24, temperature=1.7, top_k=20),
        SamplingParams(max_tokens=24, temperature=0.8, top_k=50, top_p=0.9),
        SamplingParams(max_tokens=24, temperature=1.2, min_p=0.05),
        SamplingParams(max_tokens=24, temperature=1.2, min_p=0.05, top_k=40, top_p=0.8),
    ]
    async with connect(name, stop_token_ids=[]) as engine:
        await publish(engine, unique_weights(model), 0)
        wanted = [replace(kind, seed=seed) for kind in kinds for seed in range(4)]
        answers = await asyncio.gather(*(sampled(engine, s, f"s{i}") for i, s in enumerate(wanted)))
        ids = np.concatenate([PROMPT, answers[0].token_ids])
        scored, tempered = await engine.score(ids), await engine.score(ids, temperature=0.7)
    for sampling, answer in zip(wanted, answers, strict=True):
        wanted_logprobs = expected(model, answer, sampling).numpy()
        np.testing.assert_allclose(answer.logprobs, wanted_logprobs[np.arange(24), answer.token_ids], atol=1e-4)
        kept = None if answer.support is None else answer.support.possible(len(wanted_logprobs[0])).tolist()
        assert kept == (np.isfinite(wanted_logprobs).tolist() if sampling.top_k else None)
        assert (len(answer.token_ids), answer.stop_reason) == (24, StopReason.LENGTH)
        assert answer.versions_per_token().tolist() == [0] * 24
    for scores, temperature in ((scored, 1.0), (tempered, 0.7)):
        reference = (logits(model, ids[:1], ids[1:]) / temperature).log_softmax(-1)
        np.testing.assert_allclose(scores, reference[np.arange(len(ids) - 1), ids[1:]].numpy(), atol=1e-4)


async def test_a_seed_decides_whatever_else_runs_and_greedy_is_certain(connect: Connect) -> None:
    async with connect("tied") as engine:
        one = SamplingParams(max_tokens=16, seed=7)
        alone = await sampled(engine, one, "alone")
        again, other, *_ = await asyncio.gather(
            sampled(engine, one, "again"),
            sampled(engine, replace(one, seed=2**63 - 1), "other"),
            *(sampled(engine, replace(one, seed=i), f"s{i}") for i in range(8, 16)),
        )
        greedy = await asyncio.gather(*(sampled(engine, replace(one, temperature=0.0), f"g{i}") for i in range(2)))
    assert again.token_ids.tolist() == alone.token_ids.tolist()
    assert other.token_ids.tolist() != alone.token_ids.tolist()
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    assert greedy[0].logprobs.tolist() == [0.0] * len(greedy[0].token_ids)


async def test_only_the_given_tokens_and_strings_end_a_completion(connect: Connect) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    sampling = SamplingParams(max_tokens=200, seed=3)
    async with connect("tied", stop_token_ids=[]) as engine:
        free = await sampled(engine, sampling, "free")
        texts = [str(tokenizer.decode(free.token_ids[:n].tolist(), skip_special_tokens=False)) for n in range(201)]
        middle = next(
            a.removeprefix(b) for b, a in zip(texts[20:], texts[22:], strict=False) if "\ufffd" not in a[-40:]
        )
        cut = await sampled(engine, replace(sampling, stop=(middle,)), "cut")
    async with connect("tied", stop_token_ids=[int(free.token_ids[30])]) as engine:
        stopped = await sampled(engine, sampling, "stopped")
    assert (len(free.token_ids), free.stop_reason) == (200, StopReason.LENGTH)
    first = next(n for n, text in enumerate(texts) if middle in text)
    assert (cut.token_ids.tolist(), cut.stop_reason) == (free.token_ids[:first].tolist(), StopReason.STOP)
    first = free.token_ids.tolist().index(int(free.token_ids[30]))
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert stopped.stop_reason is StopReason.STOP


async def test_what_vllm_would_change_in_silence_is_refused(connect: Connect) -> None:
    async with connect("tied") as engine:
        with pytest.raises(EngineError, match="session 'x' is not open"):
            await engine.generate(PROMPT, SamplingParams(), session="x")
        with pytest.raises(EngineError, match=r"prompt of 7 \+ max_tokens 1018 exceeds the servers' context of 1024"):
            await sampled(engine, SamplingParams(max_tokens=1018), "long")
        with pytest.raises(EngineError, match=r"vLLM clamps temperatures below 0\.01 \(got 0\.001\)"):
            await sampled(engine, SamplingParams(temperature=0.001), "cold")
        with pytest.raises(EngineError, match=r"generate answered 400: .*out of vocabulary"):
            await sampled(engine, SamplingParams(max_tokens=4), "ids", np.array([5, 99999], np.int32))
        with pytest.raises(EngineError, match=r"scores at temperatures of at least 0\.01, not at 0"):
            await engine.score(PROMPT, temperature=0.0)
        with pytest.raises(EngineError, match="1024 tokens to score, and one that vLLM samples, exceed 1024"):
            await engine.score(np.ones(1024, np.int32))
        assert len((await sampled(engine, SamplingParams(max_tokens=1017), "fits")).token_ids) <= 1017


async def test_a_cancelled_call_is_aborted_on_the_server(connect: Connect, servers: Servers) -> None:
    async with connect("tied", stop_token_ids=[]) as engine:
        await sampled(engine, SamplingParams(max_tokens=1), "first")
        before, core = await metric(engine._servers[0], "generation_tokens_total"), engine_core(servers["tied"])
        os.kill(core, signal.SIGSTOP)  # so that the server hears of the end before it has sampled all
        try:
            calls = [asyncio.ensure_future(sampled(engine, SamplingParams(max_tokens=1000), f"s{i}")) for i in range(3)]
            await asyncio.sleep(1)
            for call in calls[:2]:
                call.cancel()
            await asyncio.sleep(1)
        finally:
            os.kill(core, signal.SIGCONT)
        assert len((await calls[2]).token_ids) == 1000
        assert all(call.cancelled() for call in calls[:2])
        assert await metric(engine._servers[0], "generation_tokens_total") - before < 2900  # of 3000
