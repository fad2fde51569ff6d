"""Ranks that share a model train what one process alone would: gradients, moments, metrics, digests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.models import each_step, make_group, make_step, random_groups, tiny
from tests.training.ranks.service import Case, Compared, Parity
from tests.training.reference import (
    COUPLED,
    LAYOUTS,
    LOSSES,
    cut,
    forked_groups,
    taught_advantages,
    with_experts,
    with_probabilities,
)
from treadle.algorithms.config import CorrectionConfig, DistillationConfig, KlConfig
from treadle.core.types import Group
from treadle.training.rank_processes import RankProcesses

pytestmark = pytest.mark.xdist_group("ranks")
MANY = random_groups(1, groups=5, size=3, steps=4)
FEW = random_groups(1, groups=3, size=2, steps=3)
FORKS = forked_groups(groups=2)
TREE = LAYOUTS["tree within group"]


def untrained(group: Group) -> Group:
    return each_step(lambda step: replace(step, mask=np.zeros(len(step.completion_ids), bool)), [group])[0]


def budget(nodes: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens_per_microbatch": nodes, **more}


CORRECTION = CorrectionConfig(product_mask=(0.1, 10.0), geometric_mask=(0.4, 2.5), renormalize=True)


LIMITS: dict[str, Any] = {
    "token_tis": 1.2,
    "sequence_tis": 1.2,
    "token_mask": (0.5, 2.0),
    "geometric_mask": (0.4, 2.5),
    "product_mask": (0.1, 10.0),
    "outlier_mask": (0.3, 3.0),
}
CASES = {
    **{f"{name}": Case(MANY, training=budget(60, **layout)) for name, layout in LAYOUTS.items()},
    **{f"{name}, streamed": Case(FEW, training=budget(9, **layout)) for name, layout in LAYOUTS.items()},
    "adapters": Case(MANY, training=budget(60, **TREE), lora=True),
    "adapters, streamed": Case(FEW, training=budget(9, **TREE), lora=True),
    "forks, streamed": Case(FORKS, training=budget(9, **TREE)),
    "one tree for all ranks": Case(random_groups(2, groups=1), training=TREE),
    "one tree in many chunks beside single ones": Case(
        random_groups(3, groups=1, size=2, steps=10) + random_groups(4, groups=3, steps=1), training=budget(25)
    ),
    "a rank without trainable tokens": Case(
        [random_groups(5, groups=1)[0], untrained(random_groups(6, groups=2)[1])], training=budget(40)
    ),
    "nothing to train": Case([untrained(group) for group in random_groups(7)], training=budget(40)),
    "nothing at all": Case([make_group([([make_step([1, 2], [])], 1.0)])]),
    **{
        f"policy loss {loss}": Case(FEW, old=True, training=budget(25), algorithm={"policy_loss": loss})
        for loss in LOSSES
        if loss not in ("gspo", COUPLED)
    },
    **{
        f"gspo by {scope}": Case(
            MANY,
            old=True,
            training=budget(25),
            algorithm={"policy_loss": "gspo", "policy_loss_options": {"scope": scope}},
        )
        for scope in ("step", "trajectory")
    },
    "coupled": Case(MANY, old=True, training=budget(25), algorithm={"policy_loss": COUPLED}),
    "correction of trajectories": Case(MANY, old=True, training=budget(25), algorithm={"correction": CORRECTION}),
    **{
        f"{name} by {scope}": Case(
            FEW,
            old=True,
            training=budget(25),
            algorithm={"correction": CorrectionConfig(**{name: limit, "scope": scope})},
        )
        for name, limit in LIMITS.items()
        for scope in (("trajectory",) if name.startswith("token") else ("step", "trajectory"))
    },
    "correction by the policy now": Case(MANY, training=budget(25), algorithm={"correction": CORRECTION}),
    "kl in the loss, entropy": Case(
        MANY, reference=True, training=budget(25), algorithm={"kl": KlConfig(coef=0.1), "entropy_coef": (0.05, 0.05)}
    ),
    "centered scores": Case(
        with_probabilities(cut(FEW), 5), training=budget(25), algorithm={"centered_scores": "top_k"}
    ),
    "centered scores, streamed": Case(
        with_probabilities(MANY, 99), old=True, training=budget(9), algorithm={"centered_scores": "vocabulary"}
    ),
    "value head": Case(MANY, training=budget(25), algorithm={"advantage": "gae"}),
    "routing replay": Case(with_experts(FEW, every=2), "qwen3-moe", training=budget(25, routing_replay=True)),
    "routing replay, streamed": Case(with_experts(FEW, every=2), "qwen3-moe", training=budget(9, routing_replay=True)),
    "gradient checkpointing": Case(MANY, training=budget(25, gradient_checkpointing=True)),
    "gradient checkpointing, streamed": Case(FEW, training=budget(9, gradient_checkpointing=True)),
}
FLOAT32 = {
    f"{name}{how}": replace(CASES[f"{name}{how}"], double=False)
    for name in ("step", "chain", "tree within group")
    for how in ("", ", streamed")
}
FAMILIES = {
    family: Case(MANY, family, double=False, training=budget(40))
    for family in (
        "qwen3",
        "qwen3-untied",
        "mistral-sliding",
        "gemma3-half-sliding",
        "qwen3-moe",
        "lfm2",
        "qwen3-5",
        "nemotron-h",
        "mamba",
        "deepseek-latent",
        "gpt-oss-half-sliding",
    )
}


def check(answers: list[Compared], limit: float) -> None:
    for each in answers:
        assert each.gradient <= limit
        assert each.metrics == answers[0].metrics  # on all ranks, to the bit
        assert each.metrics.keys() - each.alone.keys() <= {"slot_balance", "padded_passes"}
        for name, value in each.alone.items():
            assert each.metrics[name] == pytest.approx(value, rel=10 * limit, abs=10 * limit), name


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_gradient_is_that_of_one_process(pair: RankProcesses, case: Case) -> None:
    check(pair.call("gradient", case), 1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(3))
def test_any_trees_and_budgets_keep_ranks_in_step(pair: RankProcesses, seed: int) -> None:
    """Ranks that made other collectives than each other would fail or wait to the limit."""
    random = np.random.default_rng(seed)
    for number in range(5):
        count, size, steps = (int(random.integers(1, most + 1)) for most in (4, 3, 5))
        groups = random_groups(100 * seed + number, count, size, steps)
        layout = LAYOUTS[str(random.choice(list(LAYOUTS)))]
        case = Case(groups, training=budget(int(random.integers(4, 60)), **layout))
        check(pair.call("gradient", case), 1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FLOAT32)
def test_the_gradient_in_float32_is_that_of_one_process(pair: RankProcesses, name: str) -> None:
    check(pair.call("gradient", FLOAT32[name]), 1e-6)


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:.* cannot share prefixes")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_every_family_is_that_of_one_process(pair: RankProcesses, family: str) -> None:
    check(pair.call("gradient", FAMILIES[family]), 1e-6)


@pytest.mark.parametrize("name", ["step", "tree within group"])
def test_where_tokens_were_left_out_both_score_what_was_left(pair: RankProcesses, name: str) -> None:
    case = Case(cut(MANY), training=budget(25, **LAYOUTS[name]), algorithm={"entropy_coef": 0.01})
    check(pair.call("gradient", case), 1e-12)


def test_logits_in_chunks_are_made_again_in_the_backward_pass(pair: RankProcesses) -> None:
    check(pair.call("head_in_chunks", CASES["tree within group"]), 1e-12)


def test_bfloat16_by_autocast_rounds_as_one_process_does(pair: RankProcesses) -> None:
    case = Case(MANY, double=False, training=budget(40, precision="bfloat16"))
    for each in pair.call("gradient", case):
        assert each.gradient <= 1e-6


@pytest.mark.quick(1)
@pytest.mark.parametrize("nodes", [40, 9])
def test_pure_bfloat16_is_near_float32(pair: RankProcesses, nodes: int) -> None:
    """Rounding of the residual stream and of norms, too, is more than autocast's. Processors round bfloat16
    differently; the bounds are some 25 and 50 times its 2^-8."""
    found = {
        precision: pair.call("near", Case(FEW, double=False, training=budget(nodes, precision=precision)))
        for precision in ("float32", "bfloat16", "bfloat16_pure")
    }
    assert all(len(set(each)) == 1 for each in found.values())
    [float32, autocast, pure] = (each[0] for each in found.values())
    assert float32 <= 1e-6 < 1e-4 < autocast < 0.1 and 1e-4 < pure < 0.2


TRAINED = {
    "two updates a batch, twice": Case(MANY[:4], training=budget(25, updates_per_batch=2, epochs_per_batch=2)),
    "kl in the reward, reset": Case(
        MANY[:4],
        training=budget(25, updates_per_batch=2),
        algorithm={"kl": KlConfig(coef=0.1, where="reward", reset_every=1)},
    ),
    "kl by a controller": Case(MANY[:4], training=budget(25), algorithm={"kl": KlConfig(coef=0.1, target=0.01)}),
    "value head": Case(MANY[:4], training=budget(25, updates_per_batch=2), algorithm={"advantage": "gae"}),
    **{
        f"teacher, as {form}": Case(
            MANY[:4],
            teacher=True,
            training=budget(25, updates_per_batch=2),
            algorithm={"distillation": DistillationConfig(teacher="T", coef=0.5, form=form)},
        )
        for form in ("advantage", "loss", "reverse_top_k", "forward_top_k")
    },
    "credit for turns": Case(
        MANY[:4],
        teacher=True,
        training=budget(25, updates_per_batch=2),
        algorithm={
            "advantage": "step_return",
            "distillation": DistillationConfig(teacher="T", coef=0.5, form="turns"),
        },
    ),
    "its own teacher, by moving average": Case(
        MANY[:4],
        context=True,
        training=budget(25, updates_per_batch=2),
        algorithm={"distillation": DistillationConfig(context="tests:context", weights="ema", ema_decay=0.5)},
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", TRAINED.values(), ids=list(TRAINED))
def test_weights_moments_and_metrics_of_updates_are_those_of_one_process(pair: RankProcesses, case: Case) -> None:
    for found in pair.call("trained", case):
        assert max(found.values()) <= 1e-11, found


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["step", "chain", "tree within group"])
@pytest.mark.parametrize("family", ["qwen3-5", "lfm2"])
def test_two_updates_with_states_are_those_of_each_step_alone(pair: RankProcesses, family: str, layout: str) -> None:
    case = Case(FORKS, family, training=budget(9, **LAYOUTS[layout]))
    assert max(pair.call("by_hand", case)) <= 1e-12


@pytest.mark.parametrize("name", ["step", "chain", "tree within group"])
def test_each_token_is_taught_the_difference_to_the_teacher(pair: RankProcesses, name: str) -> None:
    section = DistillationConfig(teacher="T", coef=0.5)
    case = Case(FEW, teacher=True, training=budget(25, **LAYOUTS[name]))
    expected = taught_advantages(tiny(), tiny(seed=5), FEW, section)
    for found in pair.call("advantages", replace(case, algorithm={"distillation": section})):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_warm_start_is_that_of_one_process(pair: RankProcesses) -> None:
    for found in pair.call("supervised", 25):
        assert max(found.values()) <= 1e-12, found


def test_published_weights_have_the_digest_of_one_process(pair: RankProcesses) -> None:
    alone = {one for one, _ in pair.call("digests")}
    assert len(alone) == 1 and {shared for _, shared in pair.call("digests")} == alone


def test_the_same_seed_gives_the_same_bits(pair: RankProcesses) -> None:
    case = Case(FEW, double=False, training=budget(25))
    assert pair.call("same_seed_twice", case) == [True, True]


def test_training_goes_on_after_a_stay_in_the_hosts_memory(pair: RankProcesses) -> None:
    algorithm = {"advantage": "gae", "kl": {"coef": 0.1}}
    case = Case(FEW, double=False, training=budget(25), algorithm=algorithm)
    assert pair.call("same_when_moved", case) == [True, True]


def test_the_cases_are_what_they_say(pair: RankProcesses) -> None:
    """One tree in several passes beside one that needs a single one; a slot with fewer trees than ranks."""
    (slots, others) = pair.call("passes", CASES["one tree in many chunks beside single ones"])
    assert slots == others and max(passes for _, passes in slots) > 2 and min(passes for _, passes in slots) == 1
    assert pair.call("passes", CASES["one tree for all ranks"]) == [[(1, 1)]] * 2


# Where more than two ranks, or copies of their shards, could differ from two
MORE = (
    *LAYOUTS,
    "tree within group, streamed",
    "one tree for all ranks",
    "one tree in many chunks beside single ones",
    "a rank without trainable tokens",
    "nothing to train",
    "coupled",
    "correction of trajectories",
    "value head",
    "routing replay, streamed",
    "gradient checkpointing, streamed",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "replicas", "names", "trained"),
    [(3, 1, MORE, list(TRAINED)), (4, 2, MORE[-8:], list(TRAINED)[:1])],
    ids=["three ranks", "two copies of two shards"],
)
def test_more_ranks_and_copies_of_shards(size: int, replicas: int, names: list[str], trained: list[str]) -> None:
    ranks = RankProcesses(Parity, size, replicas=replicas, limit=300)
    try:
        for name in names:
            check(ranks.call("gradient", CASES[name]), 1e-12)
        for case in (FLOAT32["step"], FAMILIES["gemma3-half-sliding"]):
            check(ranks.call("gradient", case), 1e-6)
        for case in map(TRAINED.__getitem__, trained):
            for found in ranks.call("trained", case):
                assert max(found.values()) <= 1e-11, found
    finally:
        ranks.close()
