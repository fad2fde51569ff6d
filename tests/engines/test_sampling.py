"""Drawing tokens, against a float64 reference and against the distribution itself."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import drawn_token, full
from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.engines.sampling import sample

SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6)


@given(SEEDS, st.integers(0, 1000), st.data())
def test_sampling_is_the_inverse_cdf_of_the_tempered_softmax(seeds: list[int], token: int, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = torch.from_numpy(random.normal(0, 3, (len(seeds), 17)).astype(np.float32))
    temperature = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=len(seeds), max_size=len(seeds)))
    )
    draws = token_uniforms(np.array(seeds, np.uint64), token)
    ids, logprobs = sample(logits, temperature, np.array(seeds, np.uint64), token)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    for row in range(len(seeds)):
        wanted, logprob, margin = drawn_token(full(logits[row]), float(temperature[row]), float(draws[row]))
        if margin > 1e-5:
            assert ids[row] == wanted
            assert logprobs[row].item() == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_are_the_distribution(temperature: float) -> None:
    """Chi-square over 20000 calls that differ in their keyed seed only; one that fails by chance once in 10^5."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.2])
    seeds = np.array([call_seed(7, Stream.TRAIN, 0, n, n % 8, n % 3) for n in range(20_000)], np.uint64)
    ids, _ = sample(logits.expand(len(seeds), -1), torch.full((len(seeds),), temperature), seeds, token=3)
    expected = full((logits.double() / temperature).softmax(-1)) * len(seeds)
    observed = np.bincount(ids.numpy(), minlength=len(logits))
    assert ((observed - expected) ** 2 / expected).sum() < 34.4  # 7 degrees of freedom


def test_successive_tokens_of_a_call_are_independent_draws() -> None:
    logits = torch.zeros(1, 4)
    drawn = [int(sample(logits, torch.ones(1), np.array([11], np.uint64), token)[0]) for token in range(4000)]
    expected = len(drawn) / 16
    pairs = np.bincount([4 * a + b for a, b in pairwise(drawn)], minlength=16)
    assert ((pairs - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom, 10^-4


def test_greedy_is_argmax_and_certain() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample(logits, torch.zeros(50), np.arange(50, dtype=np.uint64), 0)
    assert torch.equal(ids, logits.argmax(-1)) and (logprobs == 0).all()


def test_a_draw_depends_on_nothing_else_in_the_batch() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    temperature, seeds = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0]), np.arange(6, dtype=np.uint64)
    ids, logprobs = sample(logits, temperature, seeds, 2)
    for row in range(6):
        alone = sample(logits[row : row + 1], temperature[row : row + 1], seeds[row : row + 1], 2)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], logprobs[row])


@pytest.mark.parametrize("seed", range(50))
def test_a_token_without_probability_is_never_drawn(seed: int) -> None:
    logits = torch.tensor([[-2000.0, 0.0, -2000.0, 0.0, -2000.0]])
    ids, logprobs = sample(logits, torch.ones(1), np.array([seed], np.uint64), 0)
    assert int(ids) in (1, 3) and logprobs.item() == pytest.approx(np.log(0.5))


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (0.5 - 1e-9, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_the_first_token_whose_bound_lies_above_the_draw_is_taken(
    draw: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws come from [0, 1): 0 must not choose a token of probability 0, nor one on a bound the token below it."""
    monkeypatch.setattr("treadle.engines.sampling.token_uniforms", lambda seeds, token: np.full(len(seeds), draw))
    logits = torch.tensor([[-2000.0, 0.0, -2000.0, 0.0]])
    ids, _ = sample(logits, torch.ones(1), np.zeros(1, np.uint64), 0)
    assert ids.tolist() == [token]
