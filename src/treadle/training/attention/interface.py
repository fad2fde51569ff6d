"""The attention function that transformers calls instead of its own, and the tree it works on.

Shapes: see `treadle.training.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from treadle.core.errors import ConfigError
from treadle.core.images import BothWays, image_ends
from treadle.models.passing import handed
from treadle.models.states import State
from treadle.packing.flat import Indices
from treadle.packing.layout import MicroBatch
from treadle.packing.segments import Together

ATTENTION = "treadle_tree"


@dataclass(frozen=True, slots=True)
class Shape:
    """Visibility between nodes and keys of one micro-batch, as kernels need it.

    depth int64[C + T]: position of every key. subtree_end int64[C + T]: node i sees key j exactly if j <= context + i <
    subtree_end[j]; with a sliding window only if also depth_i - depth_j < window.
    ahead int64[T]: node i also sees keys up to ahead[i], those of its own image; None without images that are seen both
    ways. both_ways: in which layers.
    """

    depth: Tensor
    subtree_end: Tensor
    context: int
    ahead: Tensor | None = None
    both_ways: BothWays = "all"

    @classmethod
    def of(cls, batch: MicroBatch, both_ways: BothWays = "") -> Shape:
        """Return the shape of a micro-batch, on the CPU: kernels move what they need."""
        depth, context = torch.from_numpy(batch.position_ids), len(batch.context)
        ahead = None
        if both_ways and batch.table is not None:
            ahead = torch.from_numpy(image_ends(batch.token_ids, batch.position_ids)) + context
        keys = torch.cat([torch.arange(context), depth])
        return cls(keys, torch.from_numpy(batch.subtree_end), context, ahead, both_ways)

    def ahead_with(self, window: int | None) -> Tensor | None:
        """Return `ahead` in layers with this window."""
        return self.ahead if self.both_ways == "all" or window is not None else None

    def seen_ahead(self, window: int | None) -> list[tuple[int, int]]:
        """Return (start, end) as keys of each stretch of nodes that all see each other."""
        ahead = self.ahead_with(window)
        if ahead is None:
            return []
        nodes = torch.arange(self.nodes) + self.context
        ends = ahead[ahead > nodes + 1].unique()
        return [(int(nodes[ahead == end][0]), int(end)) for end in ends]

    @property
    def nodes(self) -> int:
        return len(self.depth) - self.context


class Kernel(Protocol):
    """Computes tree attention for all layers in one forward pass over one tree."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the attention output [T, H, D] of query [T, H, D] over key and value [C + T, K, D].

        scale: factor of the scores. window: size of the layer's sliding window in tokens, None without one.
        sinks [H]: score of an additional key without a value, visible to every node. softcap: c of c * tanh(score / c).
        """


KeysAndValues = tuple[Tensor, Tensor]  # [1, K, n, D] each, as produced by layers


@dataclass(frozen=True, slots=True)
class Past:
    """Layers' inputs from nodes outside a micro-batch, or outputs of nodes inside for later ones.

    keys: layer -> keys and values of the nodes. states: layer -> node of the whole tree -> state after it.
    """

    keys: dict[int, KeysAndValues] = field(default_factory=dict)
    states: dict[int, dict[int, State]] = field(default_factory=dict)


class Tree:
    """The tree of a forward pass, as seen by its layers.

    context: inputs from the C nodes outside; empty if C is 0. fresh: outputs for later micro-batches; None if there are
    none. calls: calls of layers with a state. attended: layer -> sliding window it used. walked: layers that computed
    segments.
    """

    __slots__ = ("attended", "calls", "context", "fresh", "kernel", "walked")

    def __init__(
        self, kernel: Kernel, context: Past | None = None, fresh: Past | None = None, calls: Sequence[Together] = ()
    ) -> None:
        self.kernel, self.context, self.fresh, self.calls = kernel, context or Past(), fresh, calls
        self.attended: dict[int, int | None] = {}
        self.walked: set[int] = set()


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention through the tree: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises ConfigError for a layer with features beyond tree attention.
    """
    name = type(module).__name__
    tree: Tree = handed(module)
    # transformers makes no mask for attention implementations unknown to it.
    if attention_mask is not None:
        raise ConfigError(f"{name} makes its own attention mask, which tree attention does not implement")
    if dropout > 0:
        raise ConfigError(f"{name} has attention dropout {dropout}; packing needs 0 (set attention_dropout: 0)")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{name} is not causal; it cannot be packed")
    query, key, value = _autocast(query, key, value)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    tree.attended[layer] = sliding_window
    if tree.fresh is not None:
        tree.fresh.keys[layer] = key, value
    if tree.context.keys:
        earlier_key, earlier_value = tree.context.keys[layer]
        key, value = torch.cat([earlier_key, key], 2), torch.cat([earlier_value, value], 2)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    # latent attention has smaller values; kernels require equal sizes
    value = F.pad(value, (0, query.shape[-1] - size))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tree.kernel(q, k, v, scale, sliding_window, s_aux, softcap)[None, ..., :size], None


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Cast as autocast does for stock attention. Norms and rotary embeddings leave queries and keys in float32, whereas
    values arrive in half precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return iter(tensors)
    dtype = torch.get_autocast_dtype(device)
    return (x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


AttentionInterface.register(ATTENTION, tree_attention)


class Store:
    """Layers' outputs of a tree computed in chunks, with the gradients collected for them.

    First pass: `put` each chunk's outputs; `at` returns what the next ones need. Second pass, last chunk first:
    `leaves` for its context, back-propagate from `pending`, `collect` the gradients of the leaves.
    """

    def __init__(self, nodes: int) -> None:
        self._keys = _KeyStore(nodes)
        self._states = _StateStore()

    def put(self, part: MicroBatch, fresh: Past) -> None:
        """Store the chunk's outputs."""
        self._keys.put(part, fresh.keys)
        self._states.put(fresh.states)

    def at(self, context: Indices) -> Past:
        """Return the outputs of these nodes; empty for an empty context."""
        return Past(self._keys.at(context), self._states.at(context))

    def leaves(self, context: Indices) -> Past:
        """Return the same as `at`, as leaves that collect gradients."""
        past = self.at(context)
        for tensor in _tensors(past):
            tensor.requires_grad_()
        return past

    def pending(self, part: MicroBatch, fresh: Past) -> tuple[list[Tensor], list[Tensor]]:
        """Return the chunk's outputs, and for each tensor the gradient that later chunks have collected for it."""
        pairs = [*self._keys.pending(part, fresh.keys), *self._states.pending(fresh.states)]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def collect(self, context: Indices, leaves: Past) -> None:
        """Add the leaves' gradients to those of the context's nodes."""
        self._keys.collect(context, leaves.keys)
        self._states.collect(leaves.states)


def _tensors(past: Past) -> Iterator[Tensor]:
    for pair in past.keys.values():
        yield from pair
    for nodes in past.states.values():
        for state in nodes.values():
            yield from state.values()


class _KeyStore:
    """Keys and values [1, K, T, D] of every layer, and gradients of that shape."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._values: dict[int, KeysAndValues] = {}
        self._gradients: dict[int, KeysAndValues] = {}

    def put(self, part: MicroBatch, fresh: Mapping[int, KeysAndValues]) -> None:
        for layer, made in fresh.items():
            if layer not in self._values:
                self._values[layer] = _empty(made, self.nodes)
            for whole, new in zip(self._values[layer], made, strict=True):
                whole[:, :, part.start : part.start + len(part.token_ids)] = new.detach()

    def at(self, context: Indices) -> dict[int, KeysAndValues]:
        """Return keys and values [1, K, C, D] of these nodes for each layer; an empty dict for an empty context."""
        if not len(context):
            return {}
        selected = {}
        for layer, (key, value) in self._values.items():
            rows = torch.from_numpy(context).to(key.device)
            selected[layer] = key.index_select(2, rows), value.index_select(2, rows)
        return selected

    def pending(self, part: MicroBatch, fresh: Mapping[int, KeysAndValues]) -> Iterator[tuple[Tensor, Tensor]]:
        rows = slice(part.start, part.start + len(part.token_ids))
        for layer, collected in self._gradients.items():
            for made, gradient in zip(fresh[layer], collected, strict=True):
                yield made, gradient[:, :, rows].to(made.dtype)

    def collect(self, context: Indices, leaves: Mapping[int, KeysAndValues]) -> None:
        for layer, pair in leaves.items():
            if layer not in self._gradients:
                wide = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in pair)
                self._gradients[layer] = tuple(x.zero_() for x in _empty(wide, self.nodes))  # type: ignore[assignment]
            for whole, leaf in zip(self._gradients[layer], pair, strict=True):
                if leaf.grad is not None:
                    rows = torch.from_numpy(context).to(whole.device)
                    whole.index_add_(2, rows, leaf.grad.to(whole.dtype))


def _empty(like: tuple[Tensor, ...], nodes: int) -> KeysAndValues:
    key, value = (x.new_empty(1, x.shape[1], nodes, x.shape[3]) for x in like)
    return key, value


class _StateStore:
    """States after the nodes where other chunks continue, with their gradients."""

    def __init__(self) -> None:
        self._values: dict[int, dict[int, State]] = {}
        self._gradients: dict[tuple[int, int, tuple[str, int]], Tensor] = {}  # layer, node, name

    def put(self, fresh: Mapping[int, Mapping[int, State]]) -> None:
        for layer, states in fresh.items():
            held = self._values.setdefault(layer, {})
            for node, state in states.items():
                held[node] = {name: tensor.detach() for name, tensor in state.items()}

    def at(self, context: Indices) -> dict[int, dict[int, State]]:
        """Return the states after those of these nodes that have one."""
        nodes = context.tolist()
        return {
            layer: {
                node: {name: tensor.detach() for name, tensor in held[node].items()} for node in nodes if node in held
            }
            for layer, held in self._values.items()
            if nodes
        }

    def pending(self, fresh: Mapping[int, Mapping[int, State]]) -> Iterator[tuple[Tensor, Tensor]]:
        for layer, states in fresh.items():
            for node, state in states.items():
                for name, made in state.items():
                    if (gradient := self._gradients.pop((layer, node, name), None)) is not None:
                        yield made, gradient.to(made.dtype)

    def collect(self, leaves: Mapping[int, Mapping[int, State]]) -> None:
        for layer, states in leaves.items():
            for node, state in states.items():
                for name, leaf in state.items():
                    if leaf.grad is not None:
                        wide = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
                        place = layer, node, name
                        before = self._gradients.get(place)
                        self._gradients[place] = wide if before is None else before + wide
