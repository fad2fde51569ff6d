"""Drawing tokens, against a float64 reference and the distribution itself; stop strings end where they complete."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.models import drawn_token, full
from treadle.core.draws import Stream, Words, call_seed, token_uniforms
from treadle.core.types import SamplingParams
from treadle.engines.sampling import processed_logprobs, rules, sample
from treadle.engines.torch.batch import Decode, StopStrings


def draw(logits: Tensor, temperatures: Sequence[float], seeds: Words, token: int) -> tuple[Tensor, Tensor]:
    how = rules([SamplingParams(temperature=t) for t in temperatures])
    return sample(logits, how, torch.from_numpy(token_uniforms(seeds, token)))[:2]


SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6)


@given(SEEDS, st.integers(0, 1000), st.data())
def test_sampling_is_the_inverse_cdf_of_the_tempered_softmax(seeds: list[int], token: int, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = torch.from_numpy(random.normal(0, 3, (len(seeds), 17)).astype(np.float32))
    temperature = data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=len(seeds), max_size=len(seeds)))
    draws = token_uniforms(np.array(seeds, np.uint64), token)
    ids, logprobs = draw(logits, temperature, np.array(seeds, np.uint64), token)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    for row in range(len(seeds)):
        wanted, logprob, margin = drawn_token(full(logits[row]), temperature[row], float(draws[row]))
        if margin > 1e-5:
            assert ids[row] == wanted
            assert logprobs[row].item() == pytest.approx(logprob, abs=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_are_the_distribution(temperature: float) -> None:
    """Chi-square over 5000 calls that differ in their keyed seed only; one that fails by chance once in 10^5."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.2])
    seeds = np.array([call_seed(7, Stream.TRAIN, 0, n, n % 8, n % 3) for n in range(5_000)], np.uint64)
    ids, _ = draw(logits.expand(len(seeds), -1), [temperature] * len(seeds), seeds, token=3)
    expected = full((logits.double() / temperature).softmax(-1)) * len(seeds)
    observed = np.bincount(ids.numpy(), minlength=len(logits))
    assert ((observed - expected) ** 2 / expected).sum() < 34.4  # 7 degrees of freedom


def test_successive_tokens_of_a_call_are_independent_draws() -> None:
    logits = torch.zeros(1, 4)
    drawn = [int(draw(logits, [1.0], np.array([11], np.uint64), token)[0]) for token in range(1600)]
    expected = len(drawn) / 16
    pairs = np.bincount([4 * a + b for a, b in pairwise(drawn)], minlength=16)
    assert ((pairs - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom, 10^-4


def test_greedy_is_argmax_and_certain() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    ids, logprobs = draw(logits, [0.0] * 50, np.arange(50, dtype=np.uint64), 0)
    assert torch.equal(ids, logits.argmax(-1)) and (logprobs == 0).all()


def test_a_draw_depends_on_nothing_else_in_the_batch() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    temperature, seeds = [1.0, 0.5, 0.0, 2.0, 1.0, 1.0], np.arange(6, dtype=np.uint64)
    ids, logprobs = draw(logits, temperature, seeds, 2)
    for row in range(6):
        alone = draw(logits[row : row + 1], temperature[row : row + 1], seeds[row : row + 1], 2)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], logprobs[row])


@pytest.mark.parametrize("seed", range(50))
def test_a_token_without_probability_is_never_drawn(seed: int) -> None:
    logits = torch.tensor([[-2000.0, 0.0, -2000.0, 0.0, -2000.0]])
    ids, logprobs = draw(logits, [1.0], np.array([seed], np.uint64), 0)
    assert int(ids) in (1, 3) and logprobs.item() == pytest.approx(np.log(0.5))


@pytest.mark.parametrize(("place", "token"), [(0.0, 1), (0.5 - 1e-9, 1), (0.5, 3), (1 - 2**-53, 3)])
@pytest.mark.parametrize("behind", [[], [-2000.0]])
def test_the_first_token_whose_bound_lies_above_the_draw_is_taken(
    place: float, token: int, behind: list[float]
) -> None:
    """Draws come from [0, 1): 0 must not choose a token of probability 0, nor one on a bound the token below it."""
    logits = torch.tensor([[-2000.0, 0.0, -2000.0, 0.0, *behind]])
    ids, *_ = sample(logits, rules([SamplingParams()]), torch.tensor([place], dtype=torch.float64))
    assert ids.tolist() == [token]


# Filters


def slow_filters(logits: NDArray[Any], params: SamplingParams) -> NDArray[Any]:
    """Probabilities, token by token: temperature, then min_p, top_k, top_p, each on what is left, normalised."""

    def softmax(values: NDArray[Any]) -> NDArray[Any]:
        weights = np.exp(values - values.max())
        return np.asarray(weights / weights.sum())

    left = logits.astype(np.float64) / params.temperature
    p = softmax(left)
    left = np.where(p < params.min_p * p.max(), -np.inf, left)
    if params.top_k:
        left = np.where(left < sorted(left)[-min(params.top_k, len(left))], -np.inf, left)
    if params.top_p < 1:
        p, total, kept = softmax(left), 0.0, set[int]()
        for token in np.argsort(-p, kind="stable"):
            if total >= params.top_p:
                break
            kept.add(int(token))
            total += p[token]
        left = np.where([token in kept for token in range(len(left))], left, -np.inf)
    return softmax(left)


FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([0.05, 0.31, 0.7, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 1.0]),
)


@given(st.integers(0, 1000), st.lists(FILTERS, min_size=1, max_size=5))
def test_filters_are_those_of_a_slow_reference(seed: int, params: list[SamplingParams]) -> None:
    """Rows with and without filters side by side; logits are random, so that no bound is met exactly."""
    logits = np.random.default_rng(seed).normal(0, 2, (len(params), 23)).astype(np.float32)
    found = processed_logprobs(torch.from_numpy(logits), rules(params)).exp()
    for row, how in enumerate(params):
        np.testing.assert_allclose(full(found[row]), slow_filters(logits[row], how), atol=1e-5)


def test_tokens_as_probable_as_the_last_of_top_k_stay() -> None:
    """As in vLLM."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = processed_logprobs(logits, rules([SamplingParams(top_k=2)])).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("seed", range(20))
def test_a_filtered_token_is_never_drawn_and_the_logprob_is_of_what_is_left(seed: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])
    draws = torch.from_numpy(token_uniforms(np.array([seed], np.uint64), 0))
    ids, logprobs, among = sample(logits, rules([SamplingParams(top_k=2)]), draws)
    assert among.isfinite().tolist() == [[False, True, False, True, False]]
    assert int(ids) in (1, 3) and logprobs.item() == pytest.approx(np.log(0.5))


# Pieces of characters, as a byte-level vocabulary has them; a broken character decodes as U+FFFD.
PIECES = (b"a", b"b", b"ab", b"<", b"/", b"</a", b">", b" ", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"")


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def spaced(tokens: Sequence[int]) -> str:
    """Like SentencePiece: no space at the start of what is decoded."""
    return decode(tokens).removeprefix(" ")


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=25)
STOPS = st.lists(st.sampled_from(["</a>", "ab", "a", "é", "€<", "b a", " b"]), min_size=1, max_size=3)


@given(TOKENS, STOPS, st.sampled_from([decode, spaced]))
def test_it_finds_what_decoding_everything_after_each_token_finds(
    tokens: list[int], stop: list[str], read: Decode
) -> None:
    found = StopStrings(stop, read)
    for number, token in enumerate(tokens):
        wanted = any(s in read(tokens[: number + 1]) for s in stop)
        assert found.completes(token) == wanted
        if wanted:
            return


def test_a_long_completion_is_not_decoded_again() -> None:
    decoded = 0

    def counting(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    stops = StopStrings(["never"], counting)
    assert not any(stops.completes(number % 8) for number in range(1000))
    assert decoded < 5000
