"""Losses of the protocol against their written definitions, through the learner's trees."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import distance, exact, in_float64, norm, tiny
from tests.tinker.kit import Formula, conversations, datum_of, drawn, gradients_of, one_by_one, own_logp, trained_model
from treadle.core.errors import DataError
from treadle.tinker.data import AdamParams, Datum, Sparse
from treadle.tinker.losses import LOSSES

POLICY = ("logprobs", "advantages")
CLIPS = ("clip_low_threshold", "clip_high_threshold")


def cross_entropy(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (-logp * inputs["weights"]).sum()


def importance_sampling(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return -(torch.exp(logp - inputs["logprobs"]) * inputs["advantages"]).sum()


def ppo(low: float, high: float) -> Formula:
    def loss(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        ratio = torch.exp(logp - inputs["logprobs"])
        lowest, highest = (
            inputs.get(n, torch.tensor(x, dtype=torch.float64)) for n, x in zip(CLIPS, (low, high), strict=True)
        )
        clipped = torch.clamp(ratio, lowest, highest)
        return -torch.min(ratio * inputs["advantages"], clipped * inputs["advantages"]).sum()

    return loss


def cispo(low: float, high: float) -> Formula:
    def loss(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        clipped = torch.clamp(torch.exp(logp - inputs["logprobs"]), low, high)
        return -(clipped.detach() * logp * inputs["advantages"]).sum()

    return loss


def dro(beta: float) -> Formula:
    def loss(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        quadratic = (logp - inputs["logprobs"]) ** 2
        return -(logp * inputs["advantages"] - 0.5 * beta * quadratic).sum()

    return loss


def gspo(low: float, high: float) -> Formula:
    def loss(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        among = inputs["sequence_ratio_mask"] != 0
        mean = (logp.detach() - inputs["logprobs"])[among].mean() if among.any() else torch.zeros(())
        ratio = torch.exp(mean + logp - logp.detach())
        advantages = inputs["advantages"]
        return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()

    return loss


CASES: list[tuple[str, Sequence[str], dict[str, float], Formula]] = [
    ("cross_entropy", ("weights",), {}, cross_entropy),
    ("importance_sampling", POLICY, {}, importance_sampling),
    ("ppo", POLICY, {}, ppo(0.8, 1.2)),
    ("ppo", POLICY, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.05}, ppo(0.6, 1.05)),
    ("ppo", (*POLICY, *CLIPS), {}, ppo(0.8, 1.2)),
    ("cispo", POLICY, {}, cispo(0.8, 1.2)),
    ("cispo", POLICY, {"clip_high_threshold": 3.0}, cispo(0.8, 3.0)),
    ("stable_reinforce", POLICY, {}, cispo(0.8, 1.2)),
    ("dro", POLICY, {}, dro(0.05)),
    ("dro", POLICY, {"beta": 0.7}, dro(0.7)),
    ("gspo", (*POLICY, "sequence_ratio_mask"), {}, gspo(0.8, 1.2)),
    ("gspo", (*POLICY, "sequence_ratio_mask"), {"clip_low_threshold": 0.9}, gspo(0.9, 1.2)),
]


def test_every_loss_has_a_case() -> None:
    assert {name for name, *_ in CASES} == LOSSES.keys()


@pytest.mark.parametrize("budget", [12, 20, 30, 8192])
@pytest.mark.parametrize(("name", "inputs", "options", "formula"), CASES)
def test_loss_and_gradient_are_those_of_each_datum_alone(
    name: str, inputs: Sequence[str], options: dict[str, float], formula: Formula, budget: int
) -> None:
    """With prefixes shared within one tree, and over trees that are cut, or computed in chunks."""
    model, data = trained_model(budget=budget), conversations(inputs)
    total, wanted = one_by_one(model.model, data, formula)
    outputs = model.forward(data, name, options, backward=True)
    assert outputs.metrics["loss:sum"] == pytest.approx(total, rel=1e-12)
    assert norm(wanted) > 0 and distance(gradients_of(model.model), wanted) <= 1e-12 * norm(wanted)
    for datum, arrays in zip(data, outputs.arrays, strict=True):
        assert arrays["logprobs"].dtype == np.float32
        np.testing.assert_allclose(arrays["logprobs"], own_logp(model.model, datum).detach(), rtol=1e-6)


@pytest.mark.parametrize("family", ["gemma3-half-sliding", "qwen3-moe", "qwen3-next", "mamba"])
@pytest.mark.filterwarnings("ignore:.*cannot share prefixes")
def test_in_other_families(family: str) -> None:
    """Of which some share no prefixes: each datum is then a row, with the pairs that no other has."""
    model, data = trained_model(exact(family)), conversations((*POLICY, "sequence_ratio_mask"))
    total, wanted = one_by_one(model.model, data, gspo(0.8, 1.2))
    outputs = model.forward(data, "gspo", {}, backward=True)
    assert outputs.metrics["loss:sum"] == pytest.approx(total, rel=1e-11)
    assert distance(gradients_of(model.model), wanted) <= 1e-11 * norm(wanted)


def test_in_float32() -> None:
    model, data = trained_model(tiny()), conversations(POLICY)
    total, wanted = one_by_one(in_float64(copy.deepcopy(model.model)), data, ppo(0.8, 1.2))
    outputs = model.forward(data, "ppo", {}, backward=True)
    assert outputs.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    assert distance(gradients_of(model.model), wanted) <= 1e-4 * norm(wanted)


def test_the_shortest_datum() -> None:
    model = trained_model()
    datum = Datum(np.array([5], np.int32), {"target_tokens": np.array([7]), "weights": np.array([2.0], np.float32)})
    total, wanted = one_by_one(model.model, [datum], cross_entropy)
    assert model.forward([datum], "cross_entropy", {}, backward=True).metrics["loss:sum"] == pytest.approx(total)
    assert distance(gradients_of(model.model), wanted) <= 1e-12 * norm(wanted)


def test_targets_without_weights_all_count() -> None:
    model = trained_model()
    [datum, *_] = conversations(())
    outputs = model.forward([datum], "cross_entropy", {}, backward=False)
    assert outputs.metrics["loss:sum"] == pytest.approx(-outputs.arrays[0]["logprobs"].sum(), rel=1e-6)


def test_a_call_without_datums_is_refused() -> None:
    with pytest.raises(DataError, match="no datum"):
        trained_model().forward([], "cross_entropy", {}, backward=True)


def test_gradients_of_several_calls_add_up_until_the_step() -> None:
    model = trained_model()
    one, other = conversations(("weights",), seed=1), conversations(POLICY, seed=2)
    _, first = one_by_one(model.model, one, cross_entropy)
    _, second = one_by_one(model.model, other, dro(0.05))
    model.forward(one, "cross_entropy", {}, backward=True)
    model.forward(one, "cross_entropy", {}, backward=False)
    model.forward(other, "dro", {}, backward=True)
    wanted = {name: gradient + second[name] for name, gradient in first.items()}
    assert distance(gradients_of(model.model), wanted) <= 1e-12 * norm(wanted)
    model.optim_step(AdamParams())
    assert not gradients_of(model.model)


@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_at_each_position(sparse: bool) -> None:
    """Mixed in one call with datums whose targets are the next tokens, or any one token."""
    model, random = trained_model(), np.random.default_rng(5)
    [plain, *more] = conversations(("weights",), samples=2)
    tables = []
    for n, datum in enumerate(more[:3]):
        shape = (len(datum.ids), 2 + n)
        targets = random.integers(0, 32, shape)
        weights = np.where(random.random(shape) < 0.4, drawn(("weights",), shape, random)["weights"], 0)
        tables.append(Datum(datum.ids, {"target_tokens": targets, "weights": weights.astype(np.float32)}))
    other = replace(more[3], inputs={**more[3].inputs, "target_tokens": random.integers(0, 32, len(more[3].ids))})
    dense = [tables[0], plain, tables[1], other, tables[2]]
    total, wanted = one_by_one(model.model, dense, cross_entropy)
    sent = [Datum(d.ids, {n: csr(a) for n, a in d.inputs.items()}) for d in dense] if sparse else dense
    outputs = model.forward(sent, "cross_entropy", {}, backward=True)
    assert outputs.metrics["loss:sum"] == pytest.approx(total, rel=1e-12)
    assert distance(gradients_of(model.model), wanted) <= 1e-12 * norm(wanted)
    for datum, arrays in zip(dense, outputs.arrays, strict=True):
        np.testing.assert_allclose(arrays["logprobs"], own_logp(model.model, datum).detach(), rtol=1e-6)


def csr(matrix: Any) -> Any:
    if matrix.ndim == 1:
        return matrix
    rows, columns = matrix.nonzero()
    starts = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return Sparse(matrix[rows, columns], starts, columns, matrix.shape)


def test_a_loss_of_the_client_is_a_forward_pass_and_a_cross_entropy_of_its_gradient() -> None:
    """As `forward_backward_custom` computes it: weights are minus the loss's gradient by log-probabilities."""
    model, data = trained_model(), conversations(())

    def squares(logp: Tensor, _: Mapping[str, Tensor]) -> Tensor:
        return (logp.square() * logp.exp()).sum()

    _, wanted = one_by_one(model.model, data, squares)
    outputs = model.forward(data, "cross_entropy", {}, backward=False)
    sent = []
    for datum, arrays in zip(data, outputs.arrays, strict=True):
        logp = torch.from_numpy(arrays["logprobs"]).requires_grad_()
        squares(logp, {}).backward()
        assert logp.grad is not None
        sent.append(replace(datum, inputs={**datum.inputs, "weights": -logp.grad.numpy()}))
    model.forward(sent, "cross_entropy", {}, backward=True)
    assert distance(gradients_of(model.model), wanted) <= 1e-5 * norm(wanted)  # log-probabilities came in float32


def test_a_shared_pair_is_computed_once() -> None:
    """The same datum many times costs what one costs."""
    model = trained_model()
    [datum, *_] = conversations(("weights",))
    computed: list[int] = []
    model._forward.scorer.register_forward_pre_hook(lambda _, args: computed.append(len(args[0].part.flat)))
    model.forward([datum] * 5, "cross_entropy", {}, backward=True)
    assert computed == [len(datum.ids)]


WRONG = [
    ("custom", {}, {}, "forward_backward_custom"),
    ("grpo", {}, {}, "unknown loss 'grpo'"),
    ("ppo", {}, {"beta": 1.0}, "no option 'beta'"),
    ("dro", {}, {"beta": float("nan")}, "finite"),
    ("cross_entropy", {}, {"beta": 1.0}, "it has none"),
    ("cross_entropy", {"mask": np.ones(4, np.float32)}, {}, "no input 'mask'"),
    ("ppo", {}, {}, "needs the input 'advantages'"),
    ("cross_entropy", {"weights": np.ones(3, np.float32)}, {}, r"weights has the shape \(3,\)"),
    ("cross_entropy", {"weights": np.full(4, np.inf, np.float32)}, {}, "not finite"),
    ("cross_entropy", {"target_tokens": np.array([1, 2, 3, 32])}, {}, r"in \[0, 32\)"),
    ("cross_entropy", {"target_tokens": np.array([1.0, 2, 3, 4])}, {}, "integers"),
    ("cross_entropy", {"target_tokens": np.array([1, 2, 3])}, {}, "4 tokens"),
    (
        "importance_sampling",
        {"logprobs": np.full(4, -1e3, np.float32), "advantages": np.ones(4, np.float32)},
        {},
        "inf",
    ),
]


@pytest.mark.parametrize(("loss", "inputs", "options", "message"), WRONG)
def test_what_is_wrong_is_refused_and_changes_no_gradient(
    loss: str, inputs: dict[str, np.ndarray], options: dict[str, float], message: str
) -> None:
    model, random = trained_model(exact()), np.random.default_rng(0)
    good = datum_of(np.array([1, 2, 3, 4, 5]), ("weights",), random)
    model.forward([good], "cross_entropy", {}, backward=True)
    before = gradients_of(model.model)
    bad = Datum(good.ids, {"target_tokens": good.inputs["target_tokens"], **inputs})
    with pytest.raises(DataError, match=message):
        model.forward([bad], loss, options, backward=True)
    assert distance(gradients_of(model.model), before) == 0
