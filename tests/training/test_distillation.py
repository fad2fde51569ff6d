"""A teacher scores each sampled token: in the advantage or in the loss, beside rewards or alone."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.models import VOCABULARY, distance, exact, full, gradients, norm, random_groups, step_logprobs, tiny
from tests.training.reference import (
    LAYOUTS,
    accumulated,
    adapted,
    advantage_of,
    forked_groups,
    learner_gradients,
    make_learner,
    step_distributions,
    taught_advantages,
)
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, KlConfig
from treadle.algorithms.distillation import top_k_divergence
from treadle.algorithms.reductions import token_weights
from treadle.core.errors import ConfigError
from treadle.models.config import ModelConfig
from treadle.models.loading import load_teacher
from treadle.packing.flat import flatten
from treadle.training import lm_head
from treadle.training.config import OptimizerConfig, TrainingConfig, check_algorithm
from treadle.training.objective import TracedGroups

ALL = TracedGroups(share=1.0)
FLOAT32 = 2.0**-24  # how far, relatively, rounding to float32 moves a number: traces are float32
TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


def section(**fields: Any) -> DistillationConfig:
    return DistillationConfig(teacher="T", **{"coef": 0.5, **fields})


@pytest.mark.parametrize("rewards", [0.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("policy", [exact, lambda: adapted(exact())], ids=["all weights", "adapters"])
def test_each_token_is_taught_the_difference_to_the_teacher(
    policy: Callable[[], PreTrainedModel], layout: dict[str, Any], rewards: float
) -> None:
    groups, distillation = forked_groups(groups=2), section(rewards=rewards)
    algorithm = AlgorithmConfig(distillation=distillation)
    training = {"max_tokens_per_microbatch": 40, **layout}
    learner = make_learner(policy(), algorithm, traced=ALL, teacher=exact(seed=5), **training)
    (result,) = learner.train_batch(groups)
    batch, expected = flatten(groups), taught_advantages(policy(), exact(seed=5), groups, distillation)
    traced = np.concatenate([trace.advantage for trace in result.traces])
    np.testing.assert_allclose(traced[batch.mask], expected[batch.mask], rtol=FLOAT32, atol=0)
    ours = expected[batch.mask & (batch.trajectory_id == 0)].mean()
    assert result.advantage[batch.trajectories[0].trajectory_id] == pytest.approx(ours, rel=1e-12)
    alone = taught_advantages(policy(), exact(seed=5), groups, section(coef=1.0, rewards=0.0))
    assert result.metrics["teacher_kl"] == pytest.approx(-alone[batch.mask].mean(), rel=1e-12)


@pytest.mark.parametrize("budget", [9, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_the_gradient_is_that_of_each_step_alone(
    form: Literal["advantage", "loss"], layout: dict[str, Any], budget: int
) -> None:
    groups, model, teacher = forked_groups(groups=1), exact(), exact(seed=5)
    distillation, batch = section(form=form, rewards=0.7), flatten(groups)
    algorithm = AlgorithmConfig(distillation=distillation, policy_loss="reinforce")
    learner = make_learner(model, algorithm, teacher=teacher, max_tokens_per_microbatch=budget, **layout)
    scores = learner.teacher_scores(batch)
    assert scores is not None
    theirs = full(scores.logp)
    learner.accumulate(batch, advantage_of(batch, algorithm), teacher=scores)

    logp = torch.cat([step_logprobs(model, step)[0] for step in batch.steps])
    difference = torch.from_numpy(theirs) - logp
    lesson = difference.square() / 2 if form == "loss" else -difference.detach() * logp
    rewarded = -0.7 * torch.from_numpy(advantage_of(batch, algorithm)) * logp
    (torch.from_numpy(token_weights(batch, algorithm)) * (rewarded + 0.5 * lesson)).sum().backward()
    expected = gradients(model)
    assert distance(learner_gradients(learner), expected) <= 1e-12 * norm(expected)
    assert norm(expected) > 1e-2


@pytest.mark.parametrize("budget", [9, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("form", ["reverse_top_k", "forward_top_k"])
def test_the_gradient_of_top_k_is_that_of_each_step_alone(
    form: Literal["reverse_top_k", "forward_top_k"], layout: dict[str, Any], budget: int
) -> None:
    groups, model, teacher = forked_groups(groups=1), exact(), exact(seed=5)
    batch = flatten(groups)
    algorithm = AlgorithmConfig(distillation=section(form=form, top_k=3, rewards=0.0))
    learner = make_learner(model, algorithm, teacher=teacher, max_tokens_per_microbatch=budget, **layout)
    learner.accumulate(batch, advantage_of(batch, algorithm), teacher=learner.teacher_scores(batch))

    lessons = []
    for step in batch.steps:
        mine, theirs = step_distributions(model, step), step_distributions(teacher, step).detach()
        logp, ids = theirs.topk(3)
        outcomes = [torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (mine.gather(1, ids), logp)]
        of, to = outcomes if form == "reverse_top_k" else reversed(outcomes)
        lessons.append((of.exp() * (of - to)).sum(-1))
    (torch.from_numpy(token_weights(batch, algorithm)) * 0.5 * torch.cat(lessons)).sum().backward()
    expected = gradients(model)
    assert distance(learner_gradients(learner), expected) <= 1e-11 * norm(expected)
    assert norm(expected) > 1e-2


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_of_the_top_k_grows_to_that_of_the_whole_distribution(reverse: bool) -> None:
    random = torch.Generator().manual_seed(0)
    policy, teacher = (torch.randn(5, 40, generator=random, dtype=torch.float64).mul(2).log_softmax(-1) for _ in "ab")
    of, to = (policy, teacher) if reverse else (teacher, policy)
    whole = (of.exp() * (of - to)).sum(-1)
    found = []
    for k in range(1, 41):
        logp, ids = teacher.topk(k)
        found.append(top_k_divergence(policy.gather(1, ids), logp, reverse))
    assert all(bool((b >= a - 1e-12).all()) for a, b in pairwise([torch.zeros(5), *found, whole]))
    assert found[0].sum() < 0.9 * whole.sum()
    torch.testing.assert_close(found[-1], whole, rtol=0, atol=1e-12)


def test_the_top_k_are_the_same_in_chunks_and_only_ids_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, algorithm = flatten(random_groups(0)), AlgorithmConfig(distillation=section(form="reverse_top_k", top_k=50))
    found = []
    for size in (lm_head.CHUNK_BYTES, 1):
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", size)
        learner = make_learner(exact(), algorithm, teacher=exact(seed=5, vocab_size=VOCABULARY + 9))
        scores = learner.teacher_scores(batch)
        assert scores is not None and scores.top_ids is not None
        assert scores.top_ids.shape == (len(batch), min(50, VOCABULARY)) and scores.top_ids.max() < VOCABULARY
        learner.accumulate(batch, advantage_of(batch, algorithm), teacher=scores)
        found.append(learner_gradients(learner))
    assert distance(*found) <= 1e-12 * norm(found[0])


def test_the_coefficient_moves_linearly_over_the_run() -> None:
    algorithm, batch = AlgorithmConfig(distillation=section(coef=(0.4, 0.0), form="loss")), flatten(random_groups(0))
    learner = make_learner(tiny(), algorithm, updates=4, teacher=tiny(seed=5))
    found = []
    for learner.updates_done in range(4):
        found.append(learner.objective(batch, advantage_of(batch, algorithm)).teacher_coef)
    assert found == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert DistillationConfig(teacher="T", coef=0.4).coefs == (0.4, 0.4)


def test_without_rewards_both_forms_begin_with_the_same_gradient() -> None:
    groups, theirs = random_groups(0), make_learner(exact(seed=5)).scores(flatten(random_groups(0)))
    found = []
    for form in ("advantage", "loss"):
        algorithm = AlgorithmConfig(distillation=section(form=form, rewards=0.0))
        learner, batch = make_learner(exact(), algorithm), flatten(groups)
        learner.accumulate(batch, advantage_of(batch, algorithm), teacher=theirs)
        found.append(learner_gradients(learner))
    assert distance(*found) <= 1e-12 * norm(found[0])


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "importance_sampling"])
def test_the_lesson_is_of_the_policy_at_the_start_of_the_batch(loss: str) -> None:
    algorithm = AlgorithmConfig(distillation=section(), policy_loss=loss)
    training: dict[str, Any] = {"epochs_per_batch": 2, "optimizer": OptimizerConfig(learning_rate=1e-2)}
    learner = make_learner(exact(), algorithm, traced=ALL, teacher=exact(seed=5), **training)
    first, second = learner.train_batch(random_groups(0))
    for one, other in zip(first.traces, second.traces, strict=True):
        assert np.abs(one.logprobs - other.logprobs).max() > 1e-3
        np.testing.assert_allclose(one.advantage, other.advantage, rtol=0, atol=1e-6)


def test_values_are_learned_from_rewards_alone() -> None:
    groups = random_groups(0)
    algorithms = (AlgorithmConfig(advantage="gae", distillation=d) for d in (None, section(rewards=0.5)))
    plain, taught = (accumulated(make_learner(exact(), a), groups)[1]["value_loss"] for a in algorithms)
    assert taught == plain


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"advantage": "gae"}, "advantage is 'gae', but distillation.rewards is 0"),
        ({"kl": KlConfig(coef=0.1, where="reward")}, "kl.where is 'reward', but distillation.rewards is 0"),
        ({"dynamic_sampling": "filter"}, "dynamic_sampling is 'filter', but distillation.rewards is 0"),
    ],
)
def test_what_is_about_rewards_is_refused_without_them(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_algorithm(AlgorithmConfig(distillation=section(rewards=0.0), **fields), TrainingConfig())
    check_algorithm(AlgorithmConfig(distillation=section(), **fields), TrainingConfig())


def test_a_group_of_one_learns_from_the_teacher_alone() -> None:
    algorithm = AlgorithmConfig(distillation=section(rewards=0.0))
    training: dict[str, Any] = {"group_size": 1}
    learner = make_learner(exact(), algorithm, teacher=exact(seed=5), **training)
    groups = [replace(group, trajectories=group.trajectories[:1]) for group in random_groups(0)]
    (result,) = learner.train_batch(groups)
    assert not result.refused and result.metrics["gradient_norm"] > 0
    with pytest.raises(ConfigError, match=r"group_size is 1, but .* 'grpo' compares"):
        check_algorithm(AlgorithmConfig(distillation=section()), TrainingConfig(**training))


# Vocabularies


def teacher_with(folder: Path, *tokens: str, renamed: int | None = None) -> str:
    """A directory whose tokenizer has more tokens than the shipped one, and another name for one of them."""
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    if renamed is not None:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace(f'"{tokenizer.convert_ids_to_tokens(renamed)}"', '"renamed"'))
    tiny(vocab_size=800, seed=5).save_pretrained(folder)
    return str(folder)


def test_a_teacher_has_the_ids_of_the_policys_tokens_and_may_have_more(tmp_path: Path) -> None:
    policy, config = tiny(vocab_size=760), ModelConfig(build={"model_type": "qwen3"}, tokenizer="demo")
    assert not load_teacher(teacher_with(tmp_path / "more", "<extra>"), config, policy).training
    own = ModelConfig(build={"model_type": "qwen3"}, tokenizer=str(tmp_path / "more"))
    size = len(AutoTokenizer.from_pretrained(str(TOKENIZER)))
    with pytest.raises(ConfigError, match=f"teacher: token {size} is '<extra>' for the trained model and none for "):
        load_teacher(teacher_with(tmp_path / "fewer"), own, policy)
    with pytest.raises(ConfigError, match=r"token 0 is '.*' for the trained model and 'renamed' for "):
        load_teacher(teacher_with(tmp_path / "other", renamed=0), config, policy)
