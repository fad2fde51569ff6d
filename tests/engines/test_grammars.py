"""What follows a grammar: sampled with exact probabilities, and its masks are the same when they are derived again."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.engines.kit import as_groups, sampling, serving, step_of
from tests.models import exact, full, tiny
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion
from treadle.core.errors import DataError
from treadle.core.types import Form, SamplingParams, Step, StopReason
from treadle.packing.flat import flatten
from treadle.rendering.forms import Turn, turn_grammar
from treadle.rendering.grammars import Constraint, Grammars, with_supports
from treadle.rendering.replies import plain
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

PROMPT = np.array([3, 1, 4], np.int32)


def small() -> Path:
    return Path(str(files("treadle.recipes") / "tokenizer" / "tokenizer.json"))


def real() -> Path:
    return Path(os.environ["TREADLE_TEST_DATA"]) / "tokenizers" / "qwen" / "tokenizer.json"


@cache
def grammars_of(path: Path) -> Grammars:
    return Grammars(Tokenizer.from_file(str(path)))


def end_of(grammars: Grammars) -> int:
    [end] = grammars._backend.encode("<|im_end|>", add_special_tokens=False).ids
    return int(end)


def size_of(grammars: Grammars) -> int:
    return int(grammars._backend.get_vocab_size())


def random_schema(random: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """Of a value that even random weights end soon."""
    kinds = ["integer", "string", "boolean", "enum", "const", "null"] + ["object", "array", "anyOf"] * (depth > 0)
    match random.choice(kinds):
        case "integer":
            low = int(random.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + int(random.integers(0, 200))}
        case "string":
            return {"type": "string", "maxLength": int(random.integers(0, 6))}
        case "enum":
            return {"enum": [*random.choice(["a", "bc", "é", "x y", 'q"q'], 3, replace=False).tolist(), None, 7]}
        case "const":
            return {"const": {"k": [1, "z"]}}
        case "object":
            names = random.choice(["a", "b", "c d", "e"], int(random.integers(1, 4)), replace=False).tolist()
            required = [name for name in names if random.random() < 0.7]
            properties = {name: random_schema(random, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = int(random.integers(0, 2))
            return {"type": "array", "items": random_schema(random, depth - 1), "minItems": low, "maxItems": low + 1}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": str(kind)}


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def json_grammar(schema: dict[str, Any], grammars: Grammars) -> str:
    return turn_grammar(Turn(Form.json(compact(schema))), plain, grammars, [end_of(grammars)])


async def sampled(grammars: Grammars, params: Sequence[SamplingParams], **options: Any) -> list[Completion]:
    model = tiny(vocab_size=size_of(grammars) + 5)  # rows of the embedding beyond the tokenizer, as real models have
    async with serving(model, sessions="s", lock_step=False, grammars=grammars, **options) as engine:
        return list(await asyncio.gather(*(engine.generate(PROMPT, each, session="s") for each in params)))


def check_schemas(grammars: Grammars, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[tuple[int, bytes]]()
    mask = Constraint.mask

    def noted(constraint: Constraint) -> bytes:
        used.append((id(constraint), mask(constraint)))
        kept.append(constraint)
        return used[-1][1]

    kept = list[Constraint]()  # so that ids are not used twice
    monkeypatch.setattr(Constraint, "mask", noted)
    random = np.random.default_rng(0)
    schemas = [random_schema(random) for _ in range(count)]
    params = [
        SamplingParams(max_tokens=200, seed=n, grammar=json_grammar(schema, grammars), temperature=1.5)
        for n, schema in enumerate(schemas)
    ]
    stop = [end_of(grammars)]
    answers = asyncio.run(sampled(grammars, params, stop_token_ids=stop, max_batch=16))
    monkeypatch.setattr(Constraint, "mask", mask)
    by_call: dict[int, list[bytes]] = {}
    for call, bits in used:
        by_call.setdefault(call, []).append(bits)
    masks_of_tokens = {tuple(masks) for masks in by_call.values()}
    complete = 0
    for schema, each, answer in zip(schemas, params, answers, strict=True):
        support = grammars.support(each, answer.token_ids)
        possible = support.possible(size_of(grammars))
        assert tuple(np.packbits(row, bitorder="little").tobytes() for row in possible) in masks_of_tokens
        assert support.contains(answer.token_ids).all()
        assert (answer.logprobs[support.counts == 1] == 0).all()
        if answer.stop_reason is StopReason.STOP:
            complete += 1
            text = grammars._backend.decode(answer.token_ids[:-1].tolist(), skip_special_tokens=False)
            Draft202012Validator(schema).validate(json.loads(text))
    assert complete > 0.9 * count  # the others reached the limit


@pytest.mark.quick(2)
def test_replies_validate_and_masks_are_derived_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check_schemas(grammars_of(small()), 30, monkeypatch)


@pytest.mark.slow
def test_replies_validate_and_masks_are_derived_again_with_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    if "TREADLE_TEST_DATA" not in os.environ:
        pytest.skip("TREADLE_TEST_DATA is not set")
    check_schemas(grammars_of(real()), 300, monkeypatch)


def continuations(
    model: Any, grammars: Grammars, params: SamplingParams, tokens: tuple[int, ...] = (), p: float = 1.0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every completion of a grammar with its probability, by the model's full logits."""
    constraint = grammars.constraint(params)
    for token in tokens:
        constraint.take(token)
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    logits = full(model(torch.tensor([[*PROMPT.tolist(), *tokens]])).logits[0, -1].double())
    allowed = np.flatnonzero(bits)
    weights: NDArray[np.float64] = np.exp(logits[allowed] - logits[allowed].max())
    for token, share in zip(allowed.tolist(), (weights / weights.sum()).tolist(), strict=True):
        if token == end_of(grammars):
            yield (*tokens, token), p * share
        else:
            yield from continuations(model, grammars, params, (*tokens, token), p * share)


def chi_square(draws: int) -> tuple[float, int]:
    """Of the completions of an enumerable grammar, and the degrees of freedom."""
    grammars = grammars_of(small())
    params = SamplingParams(
        max_tokens=8, grammar=turn_grammar(Turn(Form("regex", "(a|b){1,2}!?")), plain, grammars, [end_of(grammars)])
    )
    model = tiny(vocab_size=size_of(grammars), initializer_range=0.5)
    with torch.no_grad():
        wanted = dict(continuations(model, grammars, params))
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-12)
    counts = dict.fromkeys(wanted, 0)

    async def run() -> None:
        options: Any = {"stop_token_ids": [end_of(grammars)], "max_batch": 256, "lock_step": False}
        async with serving(model, grammars=grammars, **options) as engine:

            async def draw(number: int) -> None:
                engine.open_session(str(number))
                one = replace(params, seed=call_seed(7, Stream.TRAIN, 0, number, 0, 0))
                answer = await engine.generate(PROMPT, one, session=str(number))
                engine.close_session(str(number))
                counts[tuple(answer.token_ids.tolist())] += 1

            for start in range(0, draws, 256):
                await asyncio.gather(*map(draw, range(start, min(start + 256, draws))))

    asyncio.run(run())
    rare = sum(p for p in wanted.values() if p * draws < 5)
    cells = [(counts[tokens], p * draws) for tokens, p in wanted.items() if p * draws >= 5]
    if rare * draws >= 5:
        cells.append((draws - sum(seen for seen, _ in cells), rare * draws))
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


@pytest.mark.quick(3)
def test_frequencies_are_those_of_the_masked_model() -> None:
    found, freedom = chi_square(2_000)
    assert found < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.slow
def test_frequencies_are_those_of_the_masked_model_over_many_draws() -> None:
    found, freedom = chi_square(100_000)
    assert found < freedom + 5 * (2 * freedom) ** 0.5


def test_a_wrong_grammar_fails_its_own_call_alone() -> None:
    grammars = grammars_of(small())

    async def run() -> list[Any]:
        model = tiny(vocab_size=size_of(grammars))
        async with serving(model, sessions="s", grammars=grammars, lock_step=False) as engine:
            calls = [sampling(grammar="start: x"), sampling(), sampling(grammar='start: "a"', forbidden=every)]
            made = [engine.generate(PROMPT, params, session="s") for params in calls]
            return list(await asyncio.gather(*made, return_exceptions=True))

    every = tuple(range(size_of(grammars)))
    wrong, free, stuck = asyncio.run(run())
    assert isinstance(wrong, DataError) and "unknown name" in str(wrong)
    assert isinstance(stuck, DataError) and "all that the grammar allows are forbidden" in str(stuck)
    assert len(free.token_ids) == 6


def test_forbidden_ids_are_not_sampled_and_their_support_is_derived() -> None:
    grammars = grammars_of(small())
    size = size_of(grammars)
    params = sampling(forbidden=tuple(range(5, size)), max_tokens=20)
    [answer] = asyncio.run(sampled(grammars, [params]))
    assert answer.token_ids.max() < 5 and answer.support is None
    support = grammars.support(params, answer.token_ids)
    assert support.counts.tolist() == [5] * len(answer.token_ids)
    with pytest.raises(DataError, match="token 0 is the forbidden id 7"):
        grammars.check(params, np.array([7], np.int32))


def test_filters_choose_among_what_a_grammar_leaves() -> None:
    """Then the support is recorded, and is part of what the grammar left."""
    grammars = grammars_of(small())
    grammar = json_grammar({"type": "string", "maxLength": 3}, grammars)
    params = sampling(grammar=grammar, top_k=3, max_tokens=20)
    [answer] = asyncio.run(sampled(grammars, [params], stop_token_ids=[end_of(grammars)]))
    assert answer.support is not None and answer.support.counts.max() == 3
    size = size_of(grammars)
    left = grammars.support(params, answer.token_ids).possible(size)
    assert (answer.support.possible(size) <= left).all()


def test_ratios_of_what_followed_a_grammar_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = grammars_of(small())
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
    model = exact(vocab_size=size_of(grammars) + 5)
    params = SamplingParams(max_tokens=60, grammar=json_grammar({**schema, "additionalProperties": False}, grammars))

    async def run() -> list[Step]:
        options: Any = {"stop_token_ids": [end_of(grammars)], "dtype": "float64"}
        async with serving(model, sessions="s", grammars=grammars, **options) as engine:
            return [step_of(PROMPT, await engine.generate(PROMPT, params, session="s"), params)]

    steps = asyncio.run(run())
    monkeypatch.setattr("treadle.rendering.grammars._LISTED", 8)
    [group] = with_supports(as_groups([steps]), grammars)
    batch = flatten([group])
    assert batch.support is not None and batch.support.masks and (batch.support.counts == 1).any()
    assert not batch.truncated.any() and flatten(as_groups([steps])).truncated.all()
    learned = Learner(model, TrainingConfig(), AlgorithmConfig(), 1).logprobs(batch)
    np.testing.assert_allclose(learned, batch.logp_rollout, atol=1e-6)
    assert (learned[batch.support.counts == 1] == 0).all()
    unmasked = Learner(model, TrainingConfig(), AlgorithmConfig(), 1).logprobs(flatten(as_groups([steps])))
    assert np.abs(unmasked - batch.logp_rollout).max() > 1
