"""Layers that go from token to token with a state: recurrences and convolutions, by transformers' cache interface.

Such a layer (gated delta net, Kimi delta attention, Mamba 2, short convolution) asks a cache for the state before its
first token and hands it the one behind its last, for any number of tokens. `States` is such a cache, of one layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = Mapping[tuple[str, int], Tensor]
"""What a layer keeps of a sequence, by name and number: `("conv", 0)`, `("recurrent", 0)`; without the batch."""

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHE = ("cache", "cache_params", "past_key_values")


def stateful_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that hand a state to a cache -> the name of their argument for it."""
    found = {}
    for module in model.modules():
        if hasattr(module, "layer_idx") and _keeps_state(type(module)):
            parameters = inspect.signature(type(module).forward).parameters
            found[module] = next((name for name in _CACHE if name in parameters), _CACHE[0])
    return found


def _keeps_state(kind: type) -> bool:
    methods = (inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each))
    return any(_UPDATES & set(method.__code__.co_names) for method in methods)


class States:
    """The states of B sequences in one layer, in the shape of transformers' cache.

    now: name -> [B, ...]; empty where the sequences begin.
    """

    def __init__(self, now: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.now = dict(now or {})

    @classmethod
    def of(cls, states: Sequence[State]) -> States:
        """Return the states of several sequences; without any, of sequences that begin."""
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
        """Add the newest inputs [B, d, n]; return them behind the kept ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        self.now["conv", state_idx] = F.pad(whole, (max(0, size - whole.shape[-1]), 0))[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.now["recurrent", state_idx] = recurrent_states
        return recurrent_states
