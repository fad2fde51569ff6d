"""The loss of values, against its definition element by element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.algorithms.values import ValueTargets, explained_variance, value_clipped, value_loss

NUMBERS = st.floats(-3, 3)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6), st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss_element_by_element(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    value.requires_grad_()
    targets = ValueTargets(old, target)
    found = value_loss(value, targets, clip)
    found.sum().backward()
    assert value.grad is not None
    for i, (v, o, t) in enumerate(rows):
        plain = (v - t) ** 2 / 2
        held = plain if clip is None else (min(max(v, o - clip), o + clip) - t) ** 2 / 2
        assert float(found[i].detach()) == pytest.approx(max(plain, held))
        if clip is not None and held > plain + 1e-9:  # it has moved far enough: nothing pulls it on, or back
            assert value_clipped(value.detach(), targets, clip)[i] and value.grad[i] == 0
        elif plain > held + 1e-9 or clip is None:
            assert float(value.grad[i]) == pytest.approx(v - t)


def test_explained_variance_is_1_for_the_returns_themselves_and_0_for_any_constant() -> None:
    target = torch.tensor([0.0, 1.0, 3.0])
    assert explained_variance(target + 5, target) == pytest.approx(1.0)  # variance knows no offset
    assert explained_variance(torch.full((3,), 2.0), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0)


@pytest.mark.parametrize("target", [[], [0.7], [0.7] * 8])
def test_explained_variance_of_equal_returns_is_0(target: list[float]) -> None:
    assert explained_variance(torch.arange(len(target)).float(), torch.tensor(target)) == 0
