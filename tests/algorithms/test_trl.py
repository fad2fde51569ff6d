"""Agreement with TRL on single-turn data, to 1e-6, where it computes the same quantity.

TRL's own methods run on its own padded tensors, of a trainer that was never constructed: the model is replaced by
log-probabilities that are given.
"""

import importlib
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import full, make_group, make_step
from tests.training.reference import algorithm_with
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig
from treadle.algorithms.corrections import corrected
from treadle.algorithms.estimators import Signals, advantages
from treadle.algorithms.kl import ESTIMATORS
from treadle.algorithms.losses import Tokens, by_name, options_of
from treadle.algorithms.reductions import token_weights
from treadle.packing.flat import FlatBatch, flatten
from treadle.training.objective import Objective, TokenScores

pytestmark = pytest.mark.xdist_group("algorithms_trl")  # what its tests share is made once

LENGTHS = [5, 1, 3, 7, 2, 4]
GROUP = 3
REWARDS = [1.0, 0.0, 0.3, 2.0, -1.0, 0.5]
COMMON: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, "importance_sampling_level": "token"}


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports' own
        return importlib.import_module("trl")


def never_constructed(trainer: type, **fields: Any) -> Any:
    """A trainer with these fields alone; any other is None."""

    def missing(self: object, name: str) -> None:
        return None

    made = type("NeverConstructed", (trainer,), {"__init__": lambda self: None, "__getattr__": missing})()
    made.__dict__.update(fields)
    return made


class Accelerator(SimpleNamespace):
    """Of one process."""

    num_processes, process_index, device, sync_gradients = 1, 0, torch.device("cpu"), False

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def noise(seed: int, scale: float) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, sum(LENGTHS)))


LOGP = -torch.from_numpy(np.random.default_rng(0).exponential(1.5, sum(LENGTHS)))
OLD, ROLLOUT, REFERENCE = LOGP + noise(1, 0.4), LOGP + noise(2, 0.4), LOGP + noise(3, 0.4)
ENTROPY = noise(4, 1.0).abs()


def padded(flat: Tensor) -> Tensor:
    """[N] -> [B, T], padded with something that would be noticed."""
    rows = flat.split(LENGTHS)
    return torch.stack([torch.cat([row, row.new_full((max(LENGTHS) - len(row),), 7)]) for row in rows])


MASK = padded(torch.ones(sum(LENGTHS)).double()) == 1


def batch() -> FlatBatch:
    parts = (full(part.clamp(max=0)) for part in ROLLOUT.split(LENGTHS))
    steps = [make_step([1, 2], range(n), logprobs=part) for n, part in zip(LENGTHS, parts, strict=True)]
    of = [([step], reward) for step, reward in zip(steps, REWARDS, strict=True)]
    return flatten([make_group(of[:GROUP]), make_group(of[GROUP:], 1)])


ADVANTAGE = advantages(batch(), AlgorithmConfig(advantage_options={"norm_by_std": False}))


def ours(config: AlgorithmConfig) -> tuple[float, Tensor]:
    """Loss and gradient [N] as the learner takes them."""
    b = batch()
    tokens = Tokens(
        OLD,
        ROLLOUT,
        torch.from_numpy(ADVANTAGE),
        torch.from_numpy(b.mask),
        torch.from_numpy(b.step_id),
        torch.from_numpy(b.trajectory_id),
        REFERENCE,
    )

    def reduction(mask: Tensor) -> Tensor:
        return torch.from_numpy(token_weights(b, config, mask.numpy()))

    weight = reduction(tokens.mask)
    objective = Objective(
        config,
        by_name(config.policy_loss),
        options_of(config),
        tokens,
        weight,
        config.entropy_bonus[0],
        anchored=False,
        reduction=reduction,
        corrected=corrected(tokens, weight, config.correction, reduction),
        kl_coef=config.kl.coef if config.kl else 0.0,
    )
    scores = TokenScores(np.arange(len(b)), LOGP, ENTROPY)
    return float(objective.loss(scores)), objective.gradient(scores)[0]


def theirs(trl: Any, ratio: Tensor | None = None, args: dict[str, Any] | None = None, **fields: Any) -> Any:
    logp = padded(LOGP).requires_grad_()
    trainer = never_constructed(
        trl.GRPOTrainer,
        **{**COMMON, **fields},
        args=SimpleNamespace(**{"delta": None, "steps_per_generation": 1, **(args or {})}),
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=max(LENGTHS),
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=ratio is not None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, padded(ENTROPY), None),
    )
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 2).long(),
        "prompt_mask": torch.ones(len(LENGTHS), 2).long(),
        "completion_ids": torch.ones(MASK.shape).long(),
        "completion_mask": MASK.long(),
        "advantages": torch.from_numpy(ADVANTAGE)[torch.tensor(LENGTHS).cumsum(0) - 1],
        "old_per_token_logps": padded(OLD),
        "ref_per_token_logps": padded(REFERENCE),
        "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": ratio,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert not gradient[~MASK].any()
    return float(loss.detach()), gradient[MASK]


def assert_agree(mine: tuple[float, Tensor], its: tuple[float, Tensor]) -> None:
    assert mine[0] == pytest.approx(its[0], rel=1e-6, abs=1e-9)
    torch.testing.assert_close(mine[1], its[1], rtol=1e-6, atol=1e-9)
    assert its[1].any()


SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo_clip, token_mean": ({}, {"loss_type": "dapo"}),
    "ppo_clip, token_mean of a batch": ({}, {"loss_type": "bnpo"}),
    "ppo_clip, trajectory_mean": ({"reduction": "trajectory_mean"}, {"loss_type": "grpo"}),
    "ppo_clip, step_mean": ({"reduction": "step_mean"}, {"loss_type": "grpo"}),
    "ppo_clip, seq_mean_token_sum_norm": (
        {"reduction": "seq_mean_token_sum_norm", "length_norm": 7.0},
        {"loss_type": "dr_grpo"},
    ),
    "dual clip": ({"policy_loss_options": {"dual_clip": 1.4}}, {"loss_type": "dapo", "args": {"delta": 1.4}}),
    "gspo": (
        {
            "policy_loss": "gspo",
            "reduction": "trajectory_mean",
            "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.15},
        },
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": (
        {"policy_loss": "cispo", "policy_loss_options": {"eps_high": 0.5}},
        {"loss_type": "cispo", "epsilon_high": 1.5},  # TRL's is the bound itself
    ),
    "sapo": (
        {"policy_loss": "sapo", "reduction": "trajectory_mean", "policy_loss_options": {"tau_negative": 1.3}},
        {"loss_type": "sapo", "args": SAPO},
    ),
    "k3 in the loss": ({"kl": KlConfig(coef=0.3)}, {"loss_type": "dapo", "beta": 0.3}),
    "k3 in the loss, trajectory_mean": (
        {"kl": KlConfig(coef=0.3), "reduction": "trajectory_mean"},
        {"loss_type": "grpo", "beta": 0.3, "args": {"use_bias_correction_kl": False}},
    ),
    "entropy bonus": (
        {"entropy_coef": 0.2},
        {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.2},
    ),
}


@pytest.mark.parametrize(("mine", "its"), CASES.values(), ids=list(CASES))
def test_losses_agree(trl: Any, mine: dict[str, Any], its: dict[str, Any]) -> None:
    its = {**its, "args": {"use_bias_correction_kl": False, **its.get("args", {})}}
    assert_agree(ours(AlgorithmConfig(**mine)), theirs(trl, **its))


def scored(trl: Any, trainer: str, **fields: Any) -> dict[str, Any]:
    """What TRL's trainer makes of the completions: advantages and ratios."""
    logs: Any = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    completions = [list(range(n)) for n in LENGTHS]
    prompts = [[1, 2]] * len(LENGTHS)
    generated: tuple[Any, ...] = (prompts, completions, completions)
    if trainer == "GRPOTrainer":
        sampled = [part.tolist() for part in ROLLOUT.split(LENGTHS)]
        generated = (prompts, completions, None, completions, sampled, {}, None, None)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)[:, None]
    made = never_constructed(
        getattr(trl, trainer),
        **fields,
        args=SimpleNamespace(
            per_device_train_batch_size=2,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model="reference",
        accelerator=Accelerator(),
        num_generations=GROUP,
        num_iterations=1,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["reward"],
        multi_objective_aggregation="sum_then_normalize",
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (
            padded(REFERENCE if model == "reference" else OLD),
            None,
            None,
        ),
    )
    found: dict[str, Any] = made._generate_and_score_completions([{"prompt": "?"}] * len(LENGTHS))
    return found


def by_trajectory(per_token: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    return [float(part[0]) for part in torch.from_numpy(per_token).split(LENGTHS)]


@pytest.mark.parametrize("penalised", [False, True])
def test_rloo_agrees_also_with_kl_in_the_reward(trl: Any, penalised: bool) -> None:
    found = scored(trl, "RLOOTrainer", beta=0.3 if penalised else 0.0)
    penalty = 0.3 * ESTIMATORS["k1"](OLD, REFERENCE).numpy()
    mine = advantages(batch(), AlgorithmConfig(advantage="rloo"), Signals(penalty if penalised else None))
    assert by_trajectory(mine) == pytest.approx(found["advantages"].tolist(), rel=1e-6)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_grpo_agrees_up_to_the_constant_beside_the_standard_deviation(trl: Any, scale: str) -> None:
    found = scored(trl, "GRPOTrainer", beta=0.0, scale_rewards=scale)["advantages"]
    mine = torch.tensor(
        by_trajectory(advantages(batch(), AlgorithmConfig(advantage_options={"norm_by_std": scale == "group"})))
    )
    if scale == "group":  # 1e-4 there, 1e-6 here
        std = torch.tensor(REWARDS, dtype=torch.float64).view(-1, GROUP).std(1).repeat_interleave(GROUP)
        found, mine = found * (std + 1e-4), mine * (std + 1e-6)
    torch.testing.assert_close(mine, found, rtol=1e-6, atol=0.0, check_dtype=False)


CORRECTIONS: dict[str, CorrectionConfig] = {
    "token_truncate": CorrectionConfig(token_tis=1.5),
    "sequence_truncate": CorrectionConfig(sequence_tis=1.5),
    # TRL's masks keep the ratio as a weight: here that is a truncation which never acts
    "token_mask": CorrectionConfig(token_mask=(0.7, 1.5), token_tis=1.5),
    "sequence_mask": CorrectionConfig(product_mask=(0.7, 1.5), sequence_tis=1.5),
}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_corrections_agree(trl: Any, mode: str) -> None:
    found = scored(
        trl,
        "GRPOTrainer",
        beta=0.0,
        scale_rewards="none",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.7 if "mask" in mode else None,
        vllm_importance_sampling_clip_max=1.5,
    )["importance_sampling_ratio"]
    config = algorithm_with(correction=CORRECTIONS[mode])
    assert_agree(ours(config), theirs(trl, ratio=found, loss_type="dapo"))
