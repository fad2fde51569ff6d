"""Loss, gradient and metrics are defined on (trajectory, step, token): no packing, budget or number of ranks changes
them.

In float64, with the norms in float64: what is left is the rounding of sums in another order.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.models import (
    distance,
    exact,
    gradients,
    in_float64,
    make_group,
    make_step,
    norm,
    ragged_groups,
    random_groups,
    same_bits,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training.reference import (
    ADVANTAGES,
    COUPLED,
    LAYOUTS,
    LOSSES,
    REDUCTIONS,
    SCOPES,
    accumulated,
    algorithm_with,
    earlier_policy,
    forked_groups,
    literal_loss,
    make_learner,
    over_ranks,
    scale,
    separate,
    separate_gradient,
)
from treadle.algorithms import losses
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig, ValueConfig
from treadle.algorithms.estimators import advantages
from treadle.core.types import Group, Trajectory
from treadle.packing.flat import flatten
from treadle.training.config import OptimizerConfig
from treadle.training.optimizer import learning_rate, make_optimizer, step

GENERATE = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking would take minutes
BUDGETS = (1, 2, 3, 7, 20, 60, 8192)
LITERAL = {
    "token_mean": AlgorithmConfig(),
    "no std, entropy": AlgorithmConfig(advantage_options={"norm_by_std": False}, entropy_coef=0.05),
    "per trajectory": AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=10.0, entropy_coef=0.01),
    "per step": AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=3.0, scope="step"),
}


def assert_same_metrics(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Where nothing was trained the references say 0 of what has no value."""
    assert {name for name in found if not name.startswith("packed_")} == set(wanted)
    for name, value in wanted.items():
        assert (0.0 if found[name] is None else found[name]) == pytest.approx(value, rel=1e-11, abs=1e-11), name


# Each step alone is the definition


@pytest.mark.parametrize("algorithm", LITERAL.values(), ids=list(LITERAL))
@settings(max_examples=5, phases=GENERATE)
@given(groups=ragged_groups(max_groups=2, max_size=3, max_steps=4), with_old=st.booleans())
def test_the_reference_of_these_tests_is_the_literal_definition(
    algorithm: AlgorithmConfig, groups: list[Group], with_old: bool
) -> None:
    model = exact()
    old = earlier_policy(model, groups) if with_old else None
    found, metrics = separate_gradient(model, groups, algorithm, old)
    literal = literal_loss(model, groups, algorithm, old)
    if literal.loss.requires_grad:
        literal.loss.backward()
    limit = 1e-12 * max(norm(found), 1e-2 * scale(flatten(groups), algorithm))
    assert distance(found, gradients(model)) <= limit
    assert_same_metrics(metrics, literal.metrics)


# Every layout is each step alone


BOUNDS = (0.4, 2.5)
CORRECTIONS = {
    "none": CorrectionConfig(),
    "token": CorrectionConfig(token_mask=BOUNDS),
    "token, renormalized": CorrectionConfig(token_mask=BOUNDS, renormalize=True),
    "weighed": CorrectionConfig(token_tis=2.0, outlier_mask=(0.05, 20.0)),
    "step": CorrectionConfig(sequence_tis=2.0, geometric_mask=BOUNDS, scope="step"),
    "trajectory": CorrectionConfig(product_mask=(0.1, 10.0), geometric_mask=BOUNDS, renormalize=True),
}


def corrections_of(loss: str) -> list[CorrectionConfig]:
    return [c for c in CORRECTIONS.values() if not (c.weighs and losses.by_name(loss).anchor == "rollout")]


def check_against_each_step_alone(
    data: st.DataObject, loss: str, layout: dict[str, Any], size: int, family: str = "qwen3", **fields: Any
) -> None:
    vocabulary = data.draw(st.sampled_from([3, 32]))
    groups = data.draw(ragged_groups(max_groups=2, max_size=3, max_steps=size, vocabulary=vocabulary))
    fields = {
        "advantage": data.draw(st.sampled_from([name for name in ADVANTAGES if name != "maxrl"])),
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
        "correction": data.draw(st.sampled_from(corrections_of(loss))),
        "kl": data.draw(st.sampled_from([None, KlConfig(coef=0.1)])),
        **fields,
    }
    if fields["advantage"] == "maxrl":
        groups = without_negative_rewards(groups)
    algorithm = algorithm_with(
        policy_loss=loss,
        scope=data.draw(st.sampled_from(SCOPES)),
        entropy_coef=data.draw(st.sampled_from([0.0, 0.05])),
        **fields,
    )
    model = exact(family)
    old = earlier_policy(model, groups) if data.draw(st.booleans()) else None
    reference = None if algorithm.kl is None else earlier_policy(model, groups, seed=1)
    wanted, metrics = separate_gradient(model, groups, algorithm, old, reference)
    learner = make_learner(
        model,
        algorithm,
        max_tokens_per_microbatch=data.draw(st.sampled_from(BUDGETS)),
        gradient_checkpointing=data.draw(st.booleans()),
        **layout,
    )
    ranks = data.draw(st.integers(1, 4))
    limit = 1e-12 * max(norm(wanted), 1e-2 * scale(flatten(groups), algorithm))
    for found, totals in (
        accumulated(learner, groups, old, reference),
        over_ranks(learner, groups, old, ranks, reference),
    ):
        assert distance(found, wanted) <= limit
        assert_same_metrics(totals, metrics)


def without_negative_rewards(groups: list[Group]) -> list[Group]:
    def of(t: Trajectory) -> Trajectory:
        return replace(t, reward=None if t.reward is None else abs(t.reward))

    return [replace(group, trajectories=tuple(of(t) for t in group.trajectories)) for group in groups]


@pytest.mark.quick(10)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=2, phases=GENERATE)
@given(data=st.data())
def test_any_layout_gives_the_gradient_and_metrics_of_each_step_alone(
    loss: str, layout: dict[str, Any], data: st.DataObject
) -> None:
    """For every registered policy loss: packing, budget, checkpointing and ranks are cost only."""
    check_against_each_step_alone(data, loss, layout, size=4)


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    "fields",
    [
        *({"advantage": name} for name in ADVANTAGES),
        *({"reduction": name} for name in REDUCTIONS),
        *({"correction": correction} for correction in CORRECTIONS.values()),
        *({"kl": KlConfig(coef=0.1, estimator=name)} for name in ("k2", "k3", "abs")),
        {"policy_loss": "gspo", "policy_loss_options": {"scope": "step", "eps_low": 0.1, "eps_high": 0.1}},
        {"policy_loss": "gspo", "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.1}},
        {"policy_loss": "dppo", "policy_loss_options": {"divergence": "kl", "delta": 0.05}},
        {"policy_loss_options": {"dual_clip": 1.5}},
        {
            "advantage": "gae",
            "advantage_options": {"gamma": 0.9, "gae_lambda": 0.8},
            "value": ValueConfig(coef=2.0, clip=0.5),
        },
    ],
    ids=lambda fields: " ".join(map(str, fields.items())),
)
@settings(max_examples=2, phases=GENERATE)  # of which the first is small
@given(data=st.data())
def test_so_does_every_advantage_reduction_correction_and_option(fields: dict[str, Any], data: st.DataObject) -> None:
    fields = dict(fields)
    loss = fields.pop("policy_loss", "ppo_clip")
    layout = data.draw(st.sampled_from(["chain", "tree within batch"]))
    check_against_each_step_alone(data, loss, LAYOUTS[layout], size=2, **fields)


@pytest.mark.quick(1)
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
@pytest.mark.parametrize("family", ["qwen3-5", "kimi-linear", "falcon-h1", "nemotron-h", "lfm2"])
@settings(max_examples=3, phases=GENERATE)
@given(data=st.data())
def test_so_do_layers_with_a_state(family: str, advantage: str, data: st.DataObject) -> None:
    """With a value head too; conversations that are summed up are fresh prompts here."""
    layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
    check_against_each_step_alone(data, "ppo_clip", layout, size=3, family=family, advantage=advantage)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("budget", "anchored"), [(12, True), (25, False), (8192, False)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("loss", LOSSES)
def test_forks_duplicates_and_prefixes_give_the_gradient_of_each_step_alone(
    loss: str, layout: dict[str, Any], budget: int, anchored: bool
) -> None:
    """On a batch that has some of every kind of sharing; the bound is on the gradient itself."""
    groups = forked_groups(groups=1)
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    old = None if anchored else earlier_policy(model, groups)
    wanted, metrics = separate_gradient(model, groups, algorithm, old)
    assert norm(wanted) > 1e-2
    found, totals = accumulated(make_learner(model, algorithm, max_tokens_per_microbatch=budget, **layout), groups, old)
    assert distance(found, wanted) <= 1e-12 * norm(wanted)
    assert_same_metrics(totals, metrics)


A, B, C = [1, 2], [3, 4, 5, 6], [7, 8]
CASES: dict[str, list[tuple[list[Any], float | None]]] = {
    "the same step twice, at different advantages": [([make_step(A, B)], 1.0), ([make_step(A, B)], 0.0)],
    "the same step twice in one trajectory": [([make_step(A, B), make_step(A, B)], 1.0), ([make_step(A, C)], 0.0)],
    "a step that is a prefix of another": [([make_step(A, B[:2]), make_step(A, B)], 1.0), ([make_step(A, C)], 0.0)],
    "a prompt that is a whole other step": [([make_step(A, B), make_step(A + B, C)], 1.0), ([make_step(A, C)], 0.0)],
    "a completion left inside": [([make_step(A, B), make_step(A, [3, 4, 9])], 1.0), ([make_step(A, C)], 0.0)],
    "a token that is prompt here and completion there": [
        ([make_step(A, B), make_step([*A, 3], [4, 5])], 1.0),
        ([make_step(A, C)], 0.0),
    ],
    "trained in one step, masked in the next": [
        ([make_step(A, B, mask=[True, False, True, False]), make_step(A, B, mask=[False, True, True, False])], 1.0),
        ([make_step(A, B, mask=[True, True, False, False])], 0.0),
    ],
    "shared at two temperatures": [([make_step(A, B, 0.5)], 1.0), ([make_step(A, B, 1.7)], 0.0)],
    "shared with a failed trajectory": [([make_step(A, B)], 1.0), ([make_step(A, B)], None), ([make_step(A, C)], 0.0)],
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_shared_nodes_train_every_step_that_shares_them(name: str, loss: str) -> None:
    groups = [make_group(CASES[name])]
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.02)
    old = earlier_policy(model, groups)
    wanted, metrics = separate_gradient(model, groups, algorithm, old)
    for layout in ("step", "chain", "tree within trajectory", "tree within batch"):
        for budget in (3, 8192):
            learner = make_learner(model, algorithm, max_tokens_per_microbatch=budget, **LAYOUTS[layout])
            found, totals = accumulated(learner, groups, old)
            assert distance(found, wanted) <= 1e-12 * norm(wanted)
            assert_same_metrics(totals, metrics)


@pytest.mark.quick(4)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("budget", [9, 8192])
def test_every_token_may_have_an_advantage_of_its_own(layout: dict[str, Any], budget: int) -> None:
    """Rewards of steps and of tokens reach the loss as advantages [N]; no layout loses one or moves it."""
    groups = forked_groups(5)
    batch, model = flatten(groups), exact()
    own = torch.from_numpy(np.random.default_rng(0).normal(size=len(batch)))
    learner = make_learner(model, max_tokens_per_microbatch=budget, **layout)
    objective = learner.objective(batch, np.zeros(len(batch)))
    objective = replace(objective, tokens=replace(objective.tokens, advantage=own))
    temperature = torch.from_numpy(np.where(batch.temperature > 0, batch.temperature, 1)).double()
    for tree in learner.trees(batch):
        learner.forward.backward(tree, temperature, objective.gradient)
    alone = torch.cat([step_logprobs(model, one)[0] for one in batch.steps])
    (-(objective.weight * own * alone).sum()).backward()  # at its anchor, the ratio's gradient is the logprob's
    wanted = gradients(model)
    assert distance(gradients(learner.model), wanted) <= 1e-12 * norm(wanted) and norm(wanted) > 1e-2


def test_the_coupled_loss_of_these_tests_is_no_sum_over_parts() -> None:
    """A guard: were it additive, nothing would test that coupled losses see the whole batch."""
    groups = forked_groups()
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=COUPLED)
    old = earlier_policy(model, groups)
    wanted, _ = separate_gradient(model, groups, algorithm, old)
    learner = make_learner(model, algorithm, max_tokens_per_microbatch=60)
    learner.policy_loss = replace(learner.policy_loss, couples=False)
    found, _ = accumulated(learner, groups, old)
    assert distance(found, wanted) > 1e-3 * norm(wanted)


# Order


@pytest.mark.quick(4)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("budget", [15, 60])
def test_the_order_of_groups_trajectories_and_steps_does_not_change_the_gradient(
    loss: str, layout: dict[str, Any], budget: int
) -> None:
    groups = forked_groups(groups=3, length=2)
    random = np.random.default_rng(0)
    shuffled = [
        replace(
            groups[g],
            trajectories=tuple(
                replace(t, steps=tuple(t.steps[i] for i in random.permutation(len(t.steps))))
                for t in (groups[g].trajectories[i] for i in random.permutation(len(groups[g].trajectories)))
            ),
        )
        for g in (2, 0, 1)
    ]
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    learner = make_learner(exact(), algorithm, max_tokens_per_microbatch=budget, **layout)
    (one, metrics), (other, others) = accumulated(learner, groups), accumulated(learner, shuffled)
    assert distance(one, other) <= 1e-12 * norm(one)
    assert_same_metrics(others, {name: value for name, value in metrics.items() if not name.startswith("packed_")})


# Precision


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", [11, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_float32_is_as_close_to_float64_as_each_step_alone(layout: dict[str, Any], budget: int) -> None:
    """Within twice the error that separate training itself has."""
    algorithm = AlgorithmConfig(entropy_coef=0.05)
    for seed in range(3):
        groups = forked_groups(seed, groups=1)
        model = tiny(seed=seed)
        truth, _ = separate_gradient(in_float64(copy.deepcopy(model)), groups, algorithm)
        alone, _ = separate_gradient(model, groups, algorithm)
        found, _ = accumulated(make_learner(model, algorithm, max_tokens_per_microbatch=budget, **layout), groups)
        assert 0 < distance(found, truth) <= 2 * distance(alone, truth) < 1e-5 * norm(truth)


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_batch_twice_gives_the_same_bits(layout: dict[str, Any], dtype: str) -> None:
    groups = forked_groups(groups=1)
    model = tiny() if dtype == "float32" else exact()
    for budget in (11, 60):
        found = []
        for _ in range(2):
            learner = make_learner(model, AlgorithmConfig(entropy_coef=0.1), max_tokens_per_microbatch=budget, **layout)
            found.append(accumulated(learner, groups)[0])
        assert same_bits(*found, accumulated(learner, groups)[0])


# Many updates


@pytest.mark.quick(1)
@pytest.mark.parametrize("budget", [15, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_weights_agree_with_separate_training_after_ten_optimizer_steps(layout: dict[str, Any], budget: int) -> None:
    """Others' implementations diverged only from the second step on. Adam divides by the gradient's size, so that a
    parameter with next to none magnifies rounding."""
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, warmup=2)
    algorithm = AlgorithmConfig(advantage_options={"norm_by_std": False}, entropy_coef=(0.05, 0.05))
    model = exact()
    batches = [forked_groups(seed, groups=1, length=3) for seed in range(10)]
    alone = copy.deepcopy(model)
    adam = make_optimizer(alone, optimizer)
    results = []
    for update, groups in enumerate(batches):
        reference = separate(alone, groups, algorithm)
        reference.loss.backward()
        rate = learning_rate(optimizer, update, 10)
        results.append((reference.metrics, step(adam, alone, optimizer, rate)))
    wanted = weights_of(alone)
    assert distance(wanted, weights_of(model)) > 1e-2 * norm(wanted)  # they went somewhere
    learner = make_learner(model, algorithm, optimizer=optimizer, max_tokens_per_microbatch=budget, **layout)
    for groups, (metrics, size) in zip(batches, results, strict=True):
        (result,) = learner.train_batch(groups)
        assert result.metrics["gradient_norm"] == pytest.approx(size, rel=1e-9)
        for name, value in metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-10), name
    assert distance(wanted, weights_of(learner.model)) <= 1e-13 * norm(wanted)


@pytest.mark.quick(1)
@pytest.mark.parametrize("budget", [9, 30, 8192])
def test_several_updates_of_one_batch_agree_under_every_packing(budget: int) -> None:
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, warmup=2)
    batches = [random_groups(seed, groups=2, size=2, steps=2) for seed in range(2)]
    ends = []
    for layout, each in ((LAYOUTS["step"], 8192), *((layout, budget) for layout in LAYOUTS.values())):
        learner = make_learner(
            exact(),
            LITERAL["no std, entropy"],
            max_tokens_per_microbatch=each,
            optimizer=optimizer,
            updates_per_batch=2,
            **layout,
        )
        results = [result for groups in batches for result in learner.train_batch(groups)]
        ends.append((weights_of(learner.model), results))
    (one, results), *rest = ends
    for other, others in rest:
        assert distance(one, other) <= 1e-13 * norm(one)
        for mine, theirs in zip(results, others, strict=True):
            assert mine.advantage == theirs.advantage
            for name in mine.metrics:
                if not name.startswith("packed_"):
                    assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-8, abs=1e-10), name


# What packing is for


def test_more_sharing_computes_less_and_trains_the_same_tokens() -> None:
    groups = random_groups(0, steps=5)
    batch = flatten(groups)
    metrics = {}
    for name, layout in LAYOUTS.items():
        learner = make_learner(exact(), **layout)
        metrics[name] = learner.accumulate(batch, advantages(batch, learner.algorithm))
    assert metrics["chain"]["packed_sequences"] == 6 and metrics["step"]["packed_sequences"] == 30
    assert metrics["chain"]["packed_tokens"] == sum(len(t.steps[-1].full_ids) for t in batch.trajectories)
    assert metrics["step"]["packed_tokens"] == sum(len(step.full_ids) for step in batch.steps)
    openings = [group.trajectories[0].steps[0].prompt_ids for group in groups]
    within = metrics["tree within group"]["packed_tokens"]
    assert within <= metrics["chain"]["packed_tokens"] - sum(2 * len(ids) for ids in openings)
    assert metrics["tree within batch"]["packed_tokens"] <= within
    assert {m["trainable_tokens"] for m in metrics.values()} == {len(batch)}
