"""The reference model of KL: the policy as it was, frozen, scored as the learner scores itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import exact, full, random_groups, same_bits, tiny, weights_of
from tests.training.reference import LAYOUTS, forked_groups, make_learner
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.core.errors import ConfigError
from treadle.models.loading import load_reference
from treadle.packing.flat import flatten
from treadle.training.checkpoint import export_model
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner

FAST = OptimizerConfig(learning_rate=1e-2)
TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


def learner_of(seed: int = 0, reference_seed: int | None = None, precise: bool = False, **kl: Any) -> Learner:
    make, algorithm = exact if precise else tiny, AlgorithmConfig(kl=KlConfig(coef=0.3, **kl))
    reference = None if reference_seed is None else make(seed=reference_seed)
    return Learner(make(seed=seed), TrainingConfig(optimizer=FAST), algorithm, 10, reference)


def reference_weights(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.reference is not None
    return weights_of(learner.reference.model)


def kls(learner: Learner, updates: int) -> list[float]:
    return [learner.train_batch(random_groups(seed))[0].metrics["kl"] for seed in range(updates)]


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_it_is_the_policy_before_the_first_update_and_stays_so(where: Any) -> None:
    learner = learner_of(precise=True, where=where)
    start = weights_of(learner.model)
    first, *later = kls(learner, 3)
    assert abs(first) < 1e-20 and min(later) > 1e-4
    assert same_bits(start, reference_weights(learner))
    assert not same_bits(start, weights_of(learner.model))


def test_it_may_become_the_policy_from_time_to_time() -> None:
    learner = learner_of(precise=True, reset_every=2)
    found = kls(learner, 6)
    assert max(found[::2]) < 1e-20 and min(found[1::2]) > 1e-4  # updates 1, 3, 5 begin at a fresh reference
    assert same_bits(weights_of(learner.model), reference_weights(learner))


def test_without_kl_there_is_none() -> None:
    assert Learner(tiny(), TrainingConfig(), AlgorithmConfig(), 1, tiny()).reference is None


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("budget", [7, 8192])
def test_no_layout_changes_the_kl_of_an_update(layout: dict[str, Any], budget: int) -> None:
    groups = forked_groups(groups=1)
    found = []
    for fields in (LAYOUTS["step"], {**layout, "max_tokens_per_microbatch": budget}):
        training = TrainingConfig(optimizer=FAST, **fields)
        learner = Learner(exact(), training, AlgorithmConfig(kl=KlConfig(coef=0.3)), 10, exact(seed=5))
        found.append(learner.train_batch(groups)[0].metrics["kl"])
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] > 0.1


def test_kl_compares_with_the_reference_at_each_tokens_recorded_temperature() -> None:
    batch = flatten(forked_groups(groups=1))
    learner = learner_of(precise=True, reference_seed=5)
    policy, reference = (full(make_learner(exact(seed=seed)).logprobs(batch)) for seed in (0, 5))
    d = (policy - reference)[batch.mask]
    assert learner.update(batch).metrics["kl"] == pytest.approx(float((np.exp(-d) - 1 + d).mean()), rel=1e-9)


def test_another_model_cannot_become_the_policy() -> None:
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.3, reset_every=2))
    with pytest.raises(ConfigError, match=r"kl\.reset_every is 2, but algorithm\.kl\.model has other weights"):
        Learner(tiny(), TrainingConfig(), algorithm, 1, tiny(num_hidden_layers=1))


def test_a_reference_is_loaded_from_a_directory_and_must_cover_the_policy(tmp_path: Path) -> None:
    model = tiny(seed=5)
    export_model(tmp_path / "model", model, TOKENIZER)
    path = str(tmp_path / "model")
    assert same_bits(weights_of(load_reference(path, tiny())), weights_of(model))
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.model: vocab_size of .* is 32, smaller than the model's 40"):
        load_reference(path, tiny(vocab_size=40))
    with pytest.raises(ConfigError, match=r"max_position_embeddings of .* is 256, smaller than the model's 300"):
        load_reference(path, tiny(max_position_embeddings=300))
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.model: no config\.json in"):
        load_reference(str(tmp_path), tiny())
