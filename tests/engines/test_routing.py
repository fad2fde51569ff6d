"""The engine tells the experts it chose, and routers choose the experts they are given."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.engines.kit import Script, logprobs, random_ids, recorded, texts
from tests.models import tiny
from tests.sources import make_engine
from treadle.core.errors import ConfigError
from treadle.core.types import Ids
from treadle.models.routing import Routers

MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3-moe", {}),
    "mixtral": ("qwen3-moe", MIXTRAL),
    "olmoe": ("qwen3-moe", {"model_type": "olmoe"}),
    "a dense layer first": ("qwen3-moe", {"mlp_only_layers": [0]}),
    "deepseek-latent": ("deepseek-latent", {"n_group": 2, "topk_group": 1}),
    "qwen3-next": ("qwen3-next", {}),
    "lfm2-moe": ("lfm2-moe", {}),  # their routers are handed a bias
    "minimax-m2": ("qwen3-moe", {"model_type": "minimax_m2", "num_local_experts": 4}),
}
ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def made(name: str) -> PreTrainedModel:
    family, fields = MODELS[name]
    return tiny(family, **fields)


def routers_of(model: PreTrainedModel) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def choices(model: PreTrainedModel, tokens: Ids) -> Tensor:
    """int64[T, M, k], sorted, of a plain forward pass."""
    found: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda m, a, answer: found.append(answer[2])) for r in routers_of(model)]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


@pytest.mark.parametrize("name", MODELS)
def test_routers_do_as_they_are_told_and_choose_for_themselves_otherwise(name: str) -> None:
    model = made(name)
    routers = Routers.of(model)
    assert routers.layers == len(routers_of(model)) > 0 and (routers.top_k, routers.experts) == (2, 4)
    assert routers.numbers == {1: (1,), 2: (0, 1)}[routers.layers]  # where one has none, it is the first
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with routers.choosing() as own:
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        chosen = torch.stack(own, 1)
        with routers.choosing(chosen):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        told = (chosen + 1) % 4
        told[4:] = -1
        with routers.choosing(told) as found:
            others = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(found[0], torch.where(told < 0, chosen, told)[:, 0])  # the same input as without
        for layer in range(routers.layers):
            assert torch.equal(found[layer][:4], told[:4, layer])
        assert (others[0, 0] - plain[0, 0]).abs().max() > 1e-4
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)  # nothing is left behind
    assert all("forward" not in vars(module) for module in model.modules())


def test_given_experts_weigh_what_the_router_would_have_given_them() -> None:
    """By hand, from the router's weights."""
    model = made("qwen3-moe")
    router = routers_of(model)[0]
    assert isinstance(router.weight, Tensor)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    told = torch.tensor([[[0, 1]], [[3, 2]], [[-1, -1]], [[2, 0]], [[1, 3]]]).expand(5, 2, 2)
    with Routers.of(model).choosing(told):
        _, weights, chosen = router(x)
    probabilities = (x @ router.weight.T).softmax(-1)
    expected = torch.stack([probabilities[i, chosen[i]] for i in range(5)])
    expected = expected / expected.sum(-1, keepdim=True)
    assert chosen[[0, 1, 3, 4]].tolist() == told[[0, 1, 3, 4], 0].tolist()
    assert chosen[2].tolist() == probabilities[2].topk(2).indices.tolist()
    assert torch.allclose(weights, expected, atol=1e-6)
    wanted = torch.autograd.grad(expected[:, 0].sum(), router.weight, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(weights[:, 0].sum(), router.weight)[0], wanted, atol=1e-6)
    assert wanted.abs().max() > 1e-3


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = made("qwen3-moe")
    with pytest.raises(RuntimeError, match="size"), Routers.of(model).choosing(torch.zeros(3, 2, 2).long()):
        model(input_ids=ids, use_cache=False)
    model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3", {}, "Qwen3ForCausalLM has no experts to replay; set training.routing_replay to false"),
        (
            "qwen3-moe",
            {"model_type": "phimoe", "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "num_local_experts": 4},
            r"PhimoeForCausalLM chooses experts in a way that Treadle cannot replay \(PhimoeTopKRouter\)",
        ),
    ],
)
def test_models_that_cannot_be_told_are_refused(family: str, fields: dict[str, Any], message: str) -> None:
    model = tiny(family, **fields)
    with pytest.raises(ConfigError, match=message):
        Routers.of(model)
    with pytest.raises(ConfigError, match=message):
        make_engine(model, stop_token_ids=[], routing=True)


# The engine


def some_scripts() -> list[Script]:
    random = np.random.default_rng(0)
    opening, *turns = (random_ids(random, low, high) for low, high in [(4, 5), *[(1, 3)] * 3, (1, 8), (2, 2), (1, 1)])
    first, second, third, alone, short, shorter = turns
    return [
        Script(opening, seed=0, observations=[first, second]),
        Script(opening, seed=1, observations=[third]),
        Script(alone, seed=2, max_tokens=3),
        Script(short, seed=3, observations=[shorter]),
    ]


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "olmoe", "a dense layer first"])
@pytest.mark.parametrize(
    "options", [{"lock_step": True}, {"lock_step": False}, {"lock_step": True, "max_batch": 2}], ids=str
)
def test_completions_tell_the_experts_of_the_tokens_they_were_predicted_from(
    name: str, options: dict[str, Any]
) -> None:
    """Of padded, shared and continued prompts, and of every sampled token but the last."""
    model = made(name)
    played, _ = recorded(model, some_scripts(), routing=True, **options)
    for step in chain.from_iterable(played):
        assert step.routing is not None and step.routing.dtype == np.int16
        wanted = choices(model, step.full_ids)[len(step.prompt_ids) - 1 : -1]
        assert step.routing.shape == tuple(wanted.shape) == (len(step.completion_ids), len(routers_of(model)), 2)
        assert np.array_equal(np.sort(step.routing, -1), wanted.numpy())


def test_telling_changes_nothing_and_is_not_done_unasked() -> None:
    model = made("qwen3-moe")
    (told, _), (plain, _) = (recorded(model, some_scripts(), routing=routing) for routing in (True, False))
    assert texts(told) == texts(plain) and logprobs(told).tobytes() == logprobs(plain).tobytes()
    assert all(step.routing is not None for step in chain.from_iterable(told))
    assert all(step.routing is None for step in chain.from_iterable(plain))
