"""Layers that process tokens sequentially with a state: recurrences and convolutions, by transformers' cache interface.

Such a layer (gated delta net, Kimi delta attention, Mamba 2, short convolution) asks a cache for the state before its
first token and hands back the one after its last, for any number of tokens. `States` is such a cache for one layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

State = Mapping[tuple[str, int], Tensor]
"""Name and number of a layer's state: `("conv", 0)`, `("recurrent", 0)`; tensors without the batch dimension."""

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_MEASURED = 256  # tokens; covers several chunks of recurrent scoring
_CACHE = ("cache", "cache_params", "past_key_values")


def stateful_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that keep a state in a cache -> the name of their cache argument."""
    found = {}
    for module in model.modules():
        if hasattr(module, "layer_idx") and _keeps_state(type(module)):
            parameters = inspect.signature(type(module).forward).parameters
            found[module] = next((name for name in _CACHE if name in parameters), _CACHE[0])
    return found


def _keeps_state(kind: type) -> bool:
    methods = (inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each))
    return any(_UPDATES & set(method.__code__.co_names) for method in methods)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Memory of layers with states, in bytes, in float32.

    state: one sequence, in all layers. kept: kept by autograd for one token in all layers. one_state, one_kept: the
    same for the largest layer.
    """

    state: int = 0
    kept: int = 0
    one_state: int = 0
    one_kept: int = 0


def state_memory(model: PreTrainedModel, device: torch.device | str = "meta") -> StateMemory:
    """Measure the memory of a model's layers with states, by a pass of one layer per type. device: where to compute.

    The meta device needs no memory but has no fused kernels, which keep less.
    """
    layers, measured = stateful_layers(model), dict[type, tuple[int, int]]()
    width: int = model.config.get_text_config().hidden_size
    for layer, argument in layers.items():
        if type(layer) not in measured:
            one = copy.deepcopy(layer).to_empty(device=torch.device(device))
            measured[type(layer)] = _measure(one, argument, width)
    states = [measured[type(layer)][0] for layer in layers]
    kept = [measured[type(layer)][1] for layer in layers]
    return StateMemory(sum(states), sum(kept), max(states, default=0), max(kept, default=0))


def _measure(layer: nn.Module, argument: str, width: int) -> tuple[int, int]:
    """Return the bytes of a sequence's state, and the bytes kept by autograd per token."""
    weights, kept = {p.untyped_storage()._cdata for p in layer.parameters()}, dict[int, Tensor]()
    device = next(layer.parameters()).device

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in weights:
            kept[storage] = tensor
        return tensor

    states = States()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        row = torch.zeros(1, _MEASURED, width, device=device, requires_grad=True)
        layer(row, **{argument: states, "attention_mask": None})
    return (
        sum(tensor.nbytes for tensor in states.now.values()),
        sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // _MEASURED,
    )


class States:
    """The states of B sequences in one layer, with the interface of transformers' cache.

    now: name -> [B, ...]; empty for new sequences.
    """

    def __init__(self, now: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.now = dict(now or {})

    @classmethod
    def of(cls, states: Sequence[State]) -> States:
        """Return the states of several sequences; without any, of new sequences."""
        return cls({name: torch.stack([state[name] for state in states]) for name in states[0]} if states else {})

    def at(self, row: int) -> State:
        return {name: tensor[row] for name, tensor in self.now.items()}

    # --- what layers call ---

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.now.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.now.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.now)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Add the newest inputs [B, d, n]; return them after the kept ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        self.now["conv", state_idx] = F.pad(whole, (max(0, size - whole.shape[-1]), 0))[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.now["recurrent", state_idx] = recurrent_states
        return recurrent_states
