"""Replayed experts: the learner computes what the engine computed, whatever its own routers would choose by now, and
the same in every layout."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.engines.kit import Script, as_groups, ids, recorded
from tests.engines.test_routing import choices
from tests.models import VOCABULARY, distance, exact, full, gradients, norm, ragged_groups, routed, step_logprobs, tiny
from tests.training.reference import LAYOUTS, accumulated, forked_groups, make_learner, over_ranks, scale, with_experts
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.algorithms.reductions import token_weights
from treadle.core.errors import ConfigError
from treadle.core.types import Group, Ids, Step
from treadle.models.routing import Routers
from treadle.packing.flat import distinct, flatten, replayed
from treadle.packing.layout import Packing
from treadle.training.forward import Forward

GENERATE = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking would take minutes
BUDGETS = (1, 2, 3, 7, 20, 60, 8192)
REINFORCE = AlgorithmConfig(policy_loss="reinforce")


@pytest.mark.filterwarnings("ignore:.*cannot share prefixes")
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "minimax"])  # the last one's steps are rows of their own
def test_a_forward_pass_tells_the_experts_of_every_token(family: str) -> None:
    model = tiny(family)
    ids = np.arange(1, 12, dtype=np.int32)
    chosen = Forward(model, 64, routing=True).experts(ids)
    assert chosen.dtype == np.int16 and chosen.shape == (11, 2, 2)
    assert np.array_equal(np.sort(chosen, -1), choices(model, ids).numpy())


# Each step alone, with its experts, is the definition


class ToldRouter(Qwen3MoeTopKRouter):
    """Takes the experts `told` int64[T, k] where they are not -1."""

    told: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        probabilities = logits.softmax(-1)
        own = probabilities.topk(self.top_k, -1).indices
        chosen = torch.stack([told if told[0] >= 0 else mine for told, mine in zip(self.told, own, strict=True)])
        weights = torch.stack([p[c] for p, c in zip(probabilities, chosen, strict=True)])
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def told_logprobs(model: PreTrainedModel, trajectory: Sequence[Step]) -> list[Tensor]:
    """Of each step's completion, by a plain forward pass of the step alone through the recorded experts."""
    table, recorded = distinct(trajectory)
    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    own = type(routers[0])
    found = []
    for step, keys in zip(trajectory, replayed(trajectory, recorded), strict=True):
        for layer, router in enumerate(routers):
            told = [[-1, -1] if key < 0 or table is None else table[key, layer].tolist() for key in keys]
            router.__class__ = ToldRouter
            cast(ToldRouter, router).told = torch.tensor(told)
        found.append(step_logprobs(model, step)[0])
    for router in routers:
        router.__class__ = own
    return found


def told_gradient(model: PreTrainedModel, groups: Sequence[Group]) -> tuple[dict[str, Tensor], Tensor]:
    """Of `reinforce` over each step alone; and the log-probabilities [N]."""
    batch = flatten(groups)
    model.zero_grad()
    logp = torch.cat(
        [torch.zeros(0).double(), *(own for t in batch.trajectories for own in told_logprobs(model, t.steps))]
    )
    weight = torch.from_numpy(token_weights(batch, REINFORCE) * advantages(batch, REINFORCE))
    if logp.requires_grad:
        (-(weight * logp).sum()).backward()
    found = gradients(model)
    model.zero_grad()
    return found, logp.detach()


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@settings(max_examples=4, phases=GENERATE)
@given(data=st.data())
def test_any_layout_replays_what_each_step_alone_would(layout: dict[str, Any], data: st.DataObject) -> None:
    """Absent, empty, short and whole routing; packing, budget, checkpointing and ranks are cost only."""
    vocabulary = data.draw(st.sampled_from([3, VOCABULARY]))
    groups = data.draw(routed(data.draw(ragged_groups(max_groups=2, max_size=3, max_steps=4, vocabulary=vocabulary))))
    model = exact("qwen3-moe")
    wanted, logp = told_gradient(model, groups)
    learner = make_learner(
        model,
        REINFORCE,
        routing_replay=True,
        max_tokens_per_microbatch=data.draw(st.sampled_from(BUDGETS)),
        gradient_checkpointing=data.draw(st.booleans()),
        **layout,
    )
    limit = 1e-12 * max(norm(wanted), 1e-2 * scale(flatten(groups), REINFORCE))
    ranks = data.draw(st.integers(1, 3))
    for found, _ in (accumulated(learner, groups), over_ranks(learner, groups, None, ranks)):
        assert distance(found, wanted) <= limit
    assert np.allclose(learner.logprobs(flatten(groups)), full(logp), rtol=0, atol=1e-11)


QWEN3_5_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3-next", {}), ("qwen3-5", QWEN3_5_MOE), ("lfm2-moe", {}), ("granite-hybrid", {})],
    ids=["qwen3-next", "qwen3-5-moe", "lfm2-moe", "granite-hybrid"],
)
def test_experts_beside_layers_with_a_state_are_replayed(
    family: str, fields: dict[str, Any], layout: dict[str, Any]
) -> None:
    """In chunks, as each step alone whose routers are told."""
    model, groups = exact(family, **fields), with_experts(forked_groups(groups=1))
    routers, batch, logp = Routers.of(model), flatten(groups), []
    for trajectory in batch.trajectories:
        table, recorded = distinct(trajectory.steps)
        assert table is not None
        for step, keys in zip(trajectory.steps, replayed(trajectory.steps, recorded), strict=True):
            told = np.where(keys[:, None, None] < 0, -1, table[keys])
            with routers.choosing(torch.from_numpy(told).long()):
                logp.append(step_logprobs(model, step)[0])
    weight = torch.from_numpy(token_weights(batch, REINFORCE) * advantages(batch, REINFORCE))
    (-(weight * torch.cat(logp)).sum()).backward()
    wanted = gradients(model)
    for checkpointing in (False, True):
        learner = make_learner(
            model,
            REINFORCE,
            routing_replay=True,
            max_tokens_per_microbatch=9,
            gradient_checkpointing=checkpointing,
            **layout,
        )
        found, _ = accumulated(learner, groups)
        assert distance(found, wanted) <= 1e-12 * norm(wanted) and norm(wanted) > 1e-2


def test_experts_matter_in_these_tests_and_only_where_they_are_replayed() -> None:
    plain = forked_groups(groups=1)
    groups = with_experts(plain)
    own, ignored, told = (
        make_learner(exact("qwen3-moe"), REINFORCE, routing_replay=replay).logprobs(flatten(g))
        for g, replay in ((plain, True), (groups, False), (groups, True))
    )
    assert np.array_equal(own, ignored)  # bit for bit
    assert np.abs(told - own).max() > 1e-2


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3-moe", {"model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.0}),
        ("qwen3-moe", {"model_type": "olmoe"}),
    ],
)
def test_other_families_replay_the_same_in_every_layout(family: str, fields: dict[str, Any]) -> None:
    model, plain = tiny(family, **fields), forked_groups(groups=1)
    groups = with_experts(plain)
    found = [make_learner(model, routing_replay=True, packing=p).logprobs(flatten(groups)) for p in Packing]
    own = make_learner(model).logprobs(flatten(groups))
    for logp in found:
        assert np.abs(logp - found[0]).max() < 1e-4 and np.abs(logp - own).max() > 1e-2


@pytest.mark.filterwarnings("ignore:.*cannot share prefixes")
def test_experts_are_replayed_in_padded_rows_too() -> None:
    """In a model whose layers share no prefixes: as if each step stood in a row of its own."""
    model, plain = tiny("minimax"), forked_groups(groups=1)
    batch = flatten(with_experts(plain))
    longest = max(len(step.full_ids) for step in batch.steps)
    alone, padded, own = (
        make_learner(model, routing_replay=replay, max_tokens_per_microbatch=budget).logprobs(batch)
        for replay, budget in ((True, longest), (True, 8192), (False, 8192))
    )
    assert np.abs(padded - alone).max() < 1e-4 and np.abs(padded - own).max() > 1e-2


# What the engine computed


def played(model: PreTrainedModel, prompts: Sequence[Ids], turns: int) -> list[Group]:
    """Trajectories of `turns` steps, an observation after each."""
    observations = [ids(5, 6 + turn) for turn in range(turns - 1)]
    scripts = [Script(p, seed=n, observations=observations, max_tokens=8) for n, p in enumerate(prompts)]
    return as_groups(recorded(model, scripts, routing=True)[0])


def rerouted(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The same model, whose routers prefer other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in other.modules():
            if type(module).__name__ == "Qwen3MoeTopKRouter":
                weight = cast(Tensor, module.weight)
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return other


OPENINGS = [np.array(ids, np.int32) for ids in ([3, 1, 4], [3, 1, 4], [2, 7, 1, 8, 2])]


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "lfm2-moe"])
def test_the_learner_computes_what_the_engine_did(family: str, packing: Packing) -> None:
    model = exact(family)
    batch = flatten(played(model, OPENINGS, turns=3))
    logp = make_learner(model, routing_replay=True, packing=packing).logprobs(batch)
    assert np.abs(logp - batch.logp_rollout).max() < 1e-5


@pytest.mark.parametrize("packing", Packing)
def test_even_if_its_own_routers_would_choose_others(packing: Packing) -> None:
    """With one expert a token, whose weight is 1 whatever the router says: all that is left of it is the choice. Of a
    prompt, only the last token's is recorded: these have one."""
    model = tiny("qwen3-moe", num_experts_per_tok=1)
    groups = played(model, [np.array([start], np.int32) for start in (3, 9, 27)], turns=1)
    other, batch = rerouted(model), flatten(groups)
    logp = make_learner(other, routing_replay=True, packing=packing).logprobs(batch)
    assert np.abs(logp - batch.logp_rollout).max() < 1e-5
    own = make_learner(other, packing=packing).logprobs(batch)
    assert np.abs(own - batch.logp_rollout).max() > 1e-1


# Refusals


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts to replay"):
        make_learner(tiny(), routing_replay=True)


def test_experts_of_another_model_are_refused_by_name() -> None:
    groups = with_experts(forked_groups(groups=1))
    first = groups[0].trajectories[0]
    strange = replace(first.steps[0], routing=np.full((1, 2, 1), 3, np.int16))
    groups = [replace(groups[0], trajectories=(replace(first, steps=(strange,)), *groups[0].trajectories[1:]))]
    learner = make_learner(exact("qwen3-moe"), routing_replay=True, min_group_size=1)
    [result] = learner.train_batch(groups)
    assert list(result.refused) == [first.trajectory_id]
    assert "its routing has 2 layers and 1 experts up to 3" in result.refused[first.trajectory_id]
    [result] = make_learner(exact("qwen3-moe")).train_batch(groups)
    assert not result.refused
