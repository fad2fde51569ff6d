"""What a layer may ask of tree attention, what it gets, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import tiny
from tests.training.attention.trees import chain
from treadle.core.errors import ConfigError
from treadle.training.attention.interface import ATTENTION, Shape, Tree, tree_attention
from treadle.training.attention.select import Dense


class Layer(nn.Module):
    """All that tree attention reads of a layer."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = 1, is_causal


def rows(nodes: int, heads: int) -> Tensor:
    return torch.randn(1, heads, nodes, 4, generator=torch.Generator().manual_seed(nodes), dtype=torch.float64)


def attend(module: nn.Module, **options: Any) -> Tensor:
    return tree_attention(module, rows(5, 4), rows(5, 2), rows(5, 2), None, **options)[0]


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (Layer(), {"tree": None}, "Layer drops keyword arguments on the way to attention; it cannot be packed"),
        (Layer(), {"softcap": 30.0}, "Layer uses soft-capped or sink attention"),
        (Layer(), {"s_aux": torch.zeros(4)}, "Layer uses soft-capped or sink attention"),
        (Layer(), {"dropout": 0.1}, r"Layer has attention dropout 0.1; packing needs 0 \(set attention_dropout: 0\)"),
        (Layer(is_causal=False), {}, "Layer is not causal; it cannot be packed"),
    ],
)
def test_what_it_cannot_express_is_refused(layer: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attend(layer, **{"tree": Tree(Dense(chain(5))), **options})


@pytest.mark.parametrize(("scaling", "scale"), [(None, 0.5), (0.3, 0.3)])
def test_the_kernel_gets_the_contexts_keys_before_the_layers_own(scaling: float | None, scale: float) -> None:
    shape = chain(5, context=3)
    earlier = rows(3, 2), rows(3, 2) + 1
    tree = Tree(Dense(shape), {0: (rows(3, 2) + 7,) * 2, 1: earlier}, fresh={})
    found = attend(Layer(), tree=tree, scaling=scaling, sliding_window=4)
    query, key, value = (x[0].transpose(0, 1) for x in (rows(5, 4), rows(5, 2), rows(5, 2)))
    keys, values = (
        torch.cat([before[0].transpose(0, 1), own]) for before, own in zip(earlier, (key, value), strict=True)
    )
    wanted = Dense(shape)(query, keys, values, scale, 4)
    assert torch.equal(found[0], wanted)
    assert tree.attended == {1: 4}
    assert tree.fresh is not None
    assert all(torch.equal(x[0].transpose(0, 1), own) for x, own in zip(tree.fresh[1], (key, value), strict=True))


# --- half precision ---


class Spy:
    """Notes the precisions that a kernel is called with."""

    def __init__(self, shape: Shape) -> None:
        self.kernel, self.seen = Dense(shape), set[torch.dtype]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.seen |= {query.dtype, key.dtype, value.dtype}
        return self.kernel(query, key, value, scale, window)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3-half-sliding"])
@pytest.mark.parametrize("half", [False, True])
def test_kernels_get_one_precision_though_layers_mix_them(family: str, half: bool) -> None:
    """Under autocast rotary embeddings make queries and keys float32, beside values in bfloat16."""
    model, kernel = tiny(family), Spy(chain(5))
    model.set_attn_implementation(ATTENTION)
    fresh: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.get_decoder()(input_ids=torch.arange(5)[None], use_cache=False, tree=Tree(kernel, fresh=fresh))
    wanted = {torch.bfloat16 if half else torch.float32}
    assert kernel.seen == wanted
    assert {x.dtype for pair in fresh.values() for x in pair} == wanted
