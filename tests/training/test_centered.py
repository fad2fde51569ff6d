"""Centered scores: the score that the sampler expects is subtracted from each token's, exactly, in every packing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import VOCABULARY, distance, each_step, exact, gradients, make_group, make_step, norm
from tests.training.reference import (
    LAYOUTS,
    accumulated,
    advantage_of,
    cut,
    forked_groups,
    make_learner,
    possible,
    with_probabilities,
)
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig
from treadle.core.errors import ConfigError
from treadle.core.support import Probabilities
from treadle.core.types import Group, Step
from treadle.packing.flat import flatten
from treadle.training import lm_head
from treadle.training.objective import TokenScores

BUDGETS = [("step", 8192), ("chain", 60), ("tree within group", 8192), ("tree within batch", 9)]
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "clip": AlgorithmConfig(entropy_coef=0.01, kl=KlConfig(coef=0.1, estimator="k2")),
    "cispo, masked": AlgorithmConfig(policy_loss="cispo", correction=CorrectionConfig(token_mask=(0.05, 20.0))),
    "clip, weighed": AlgorithmConfig(correction=CorrectionConfig(token_tis=1.5)),
    "gspo, masked": AlgorithmConfig(
        policy_loss="gspo",
        policy_loss_options={"eps_low": 0.9, "eps_high": 9.0},
        correction=CorrectionConfig(geometric_mask=(0.05, 20.0)),
    ),
}
MODES = ["support", "top_k", "vocabulary"]
K = 5


def groups_of(mode: str, count: int = 2) -> list[Group]:
    groups: Any = forked_groups(groups=count)
    return with_probabilities(cut(groups) if mode == "support" else groups, K if mode == "top_k" else VOCABULARY)


def by_hand(
    model: Any, groups: Sequence[Group], algorithm: AlgorithmConfig, old: Any, reference: Any
) -> dict[str, Any]:
    """The uncentered gradient, less each token's slope of the policy loss times the expected score, densely.

    A truncated ratio weighs the slope of the token as it weighs each alternative in the expectation.
    """
    batch, cap = flatten(groups), algorithm.correction.token_tis
    logp, entropy, expected = [], [], []
    for step in batch.steps:
        ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(step.prompt_ids) - 1 : -1]
        for token, sampled in enumerate(step.completion_ids.tolist()):
            mask = torch.full((VOCABULARY,), -torch.inf, dtype=logits.dtype)
            mask[possible(step, token).tolist()] = 0.0
            p = (logits[token] / float(np.float32(step.sampling.temperature or 1.0)) + mask).softmax(-1)
            logp.append(p[sampled].log())
            entropy.append(-p[p > 0].log().mul(p[p > 0]).sum())
            assert step.probabilities is not None
            q = step.probabilities[token : token + 1]
            named, values = q.of.ids.tolist(), torch.from_numpy(q.values.copy()).to(p)
            others = [v for v in possible(step, token).tolist() if v not in named]
            weights = [*values, 1 - values.sum()]
            outcomes = [*p[named], *([p[others].sum()] if others else [])]
            weighed = [q if cap is None else min(p.detach(), cap * q) for q, p in zip(weights, outcomes, strict=False)]
            expected.append(sum(w * p.log() for w, p in zip(weighed, outcomes, strict=True) if w > 0))
    scores = TokenScores(np.arange(len(batch)), torch.stack(logp), torch.stack(entropy))

    def slopes(config: AlgorithmConfig) -> Any:
        learner = make_learner(model, config, reference=exact(seed=5) if config.kl else None)
        objective = learner.objective(batch, advantage_of(batch, config), old, reference if config.kl else None)
        return objective.gradient(scores.detached())

    unweighed: dict[str, Any] = {} if cap is None else {"correction": CorrectionConfig()}
    whole, policy = (
        slopes(algorithm),
        slopes(algorithm.model_copy(update={"kl": None, "entropy_coef": 0.0, **unweighed})),
    )
    surrogate = (whole.logp * scores.logp).sum() - (policy.logp * torch.stack(expected)).sum()
    if whole.entropy is not None:
        surrogate = surrogate + (whole.entropy * scores.entropy).sum()
    model.zero_grad()
    surrogate.backward()
    return gradients(model)


@pytest.mark.quick(12)
@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layout", "budget"), BUDGETS)
def test_gradients_are_those_of_a_dense_computation(
    layout: str, budget: int, mode: Any, name: str, anchored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "FEW", 0.3)  # small supports by single logits, large ones by all
    model, groups, algorithm = exact(), groups_of(mode), ALGORITHMS[name]
    random = np.random.default_rng(1)
    size = len(flatten(groups))
    old = None if anchored else -random.exponential(2.0, size)
    reference = -random.exponential(2.0, size) if algorithm.kl else None
    wanted = by_hand(model, groups, algorithm, old, reference)
    results = []
    for scores in (mode, "off"):
        centered = algorithm.model_copy(update={"centered_scores": scores})
        layouts = {"max_tokens_per_microbatch": budget, **LAYOUTS[layout]}
        learner = make_learner(model, centered, reference=exact(seed=5) if algorithm.kl else None, **layouts)
        results.append(accumulated(learner, groups, old, reference))
    (found, metrics), (plain, same) = results
    assert distance(found, wanted) <= 1e-12 * norm(wanted)
    assert distance(plain, wanted) > 1e-3 * norm(wanted)
    assert metrics == same


@pytest.mark.parametrize("few", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_small_chunks_change_nothing(mode: Any, few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "FEW", few)
    groups, algorithm = groups_of(mode), AlgorithmConfig(centered_scores=mode)
    wanted, _ = accumulated(make_learner(exact(), algorithm), groups)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 5000)  # less than ten rows of logits, or of embeddings
    found, _ = accumulated(make_learner(exact(), algorithm, **LAYOUTS["tree within batch"]), groups)
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


def test_on_policy_nothing_changes() -> None:
    """Where the sampler has the learner's probabilities, the expected score is 0."""

    def gradient(mode: Any, groups: Sequence[Group]) -> dict[str, Any]:
        learner = make_learner(exact(tie_word_embeddings=False), AlgorithmConfig(centered_scores=mode))
        with torch.no_grad():  # all of 1 / 32, which float32 holds exactly
            learner.model.get_output_embeddings().weight.zero_()
        return accumulated(learner, groups)[0]

    def equal(step: Step) -> Step:
        ids, values = np.arange(VOCABULARY, dtype=np.int32), np.full(VOCABULARY, 1 / VOCABULARY, np.float32)
        tokens = [(ids[:count], values[:count])] * len(step.completion_ids)
        return replace(step, probabilities=Probabilities.of_tokens(tokens))

    for mode, count in (("vocabulary", VOCABULARY), ("top_k", K)):
        groups = each_step(equal, forked_groups(groups=2))
        wanted = gradient("off", groups)
        assert distance(gradient(mode, groups), wanted) <= 1e-12 * norm(wanted)
        assert distance(gradient(mode, with_probabilities(groups, count)), wanted) > 1e-2 * norm(wanted)


@pytest.mark.parametrize("cap", [None, 1.1, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_advantages_have_no_gradient_in_expectation(temperature: float, cap: float | None) -> None:
    """Over all tokens that a sampler other than the policy may draw: without centering, the policy drifts from it.

    Also where a truncated ratio corrects for the sampler.
    """
    random = np.random.default_rng(0)
    q = random.dirichlet(np.full(VOCABULARY, 0.5)).astype(np.float32)
    recorded_q = Probabilities.of_tokens([(np.arange(VOCABULARY, dtype=np.int32), q)])
    steps = [
        replace(make_step([1, 2, 3], [y], temperature), logprobs=np.log(q[[y]]), probabilities=recorded_q)
        for y in range(VOCABULARY)
    ]
    batch = flatten([make_group([([step], 0.0) for step in steps])])
    found, tis = {}, CorrectionConfig(token_tis=cap)
    for mode in ("off", "vocabulary"):
        learner = make_learner(exact(), AlgorithmConfig(policy_loss="reinforce", centered_scores=mode, correction=tis))
        learner.accumulate(batch, q.astype(np.float64))  # each token weighs as often as it is sampled
        found[mode] = norm(gradients(learner.model))
    assert found["vocabulary"] <= 1e-6 * found["off"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy_loss": "importance_sampling"},
            "policy_loss 'importance_sampling' weighs by the ratio to the sampler",
        ),
        ({"policy_loss": "dppo"}, "policy_loss 'dppo' weighs"),
        ({"correction": CorrectionConfig(sequence_tis=2.0)}, "correction.sequence_tis weighs by tokens that no"),
    ],
)
def test_what_weighs_by_the_ratio_to_the_sampler_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(exact(), AlgorithmConfig(centered_scores="top_k", **settings))


def test_attempts_without_recorded_probabilities_are_refused_by_name() -> None:
    groups = groups_of("top_k")
    first, *others = groups[0].trajectories
    bare = replace(first, steps=(replace(first.steps[0], probabilities=None), *first.steps[1:]))
    groups[0] = replace(groups[0], trajectories=(bare, *others))
    [result] = make_learner(exact(), AlgorithmConfig(centered_scores="top_k"), min_group_size=1).train_batch(groups)
    assert list(result.refused) == [first.trajectory_id]
    assert "step 0: the sampler's probabilities of token 2 were not recorded; sample with" in str(result.refused)
    [result] = make_learner(exact()).train_batch(groups)
    assert not result.refused
