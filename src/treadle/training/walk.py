"""Layers with a state over a prefix tree: their own forward, segment by segment, each from its parent's state.

    row [1, T, d] --together--> [B, n, d] and states [B, ...] --the layer--> outputs, states --> [1, T, d]

No layer is reimplemented, and gradients flow through the states. See `treadle.packing.segments`.

Shapes: T nodes of a micro-batch, B segments of a call, n tokens of the longest, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.models.passing import handed
from treadle.models.states import State, States
from treadle.packing.segments import Segment, Together
from treadle.training.attention.interface import Past, Tree

_INPUT = ("input", 0)  # part of a state: input not yet read by the layer, [1, d]
# they describe one row with all nodes, unlike any call
_NOT_PASSED_ON = ("attention_mask", "position_ids", "use_cache")


@contextmanager
def walking(layers: Mapping[nn.Module, str]) -> Iterator[None]:
    """Let layers compute a tree instead of a row. layers: layer -> its cache argument."""
    for layer, cache in layers.items():
        vars(layer)["forward"] = _walk(layer, layer.forward, cache)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def waiting(context: Past | None) -> set[int]:
    """Return the nodes outside a micro-batch with waiting inputs, the same in all layers."""
    states = next(iter(context.states.values()), {}) if context is not None else {}
    return {node for node, state in states.items() if _INPUT in state}


def _walk(layer: nn.Module, own: Callable[..., Any], cache: str) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *_: Any, **named: Any) -> Any:
        for name in _NOT_PASSED_ON:
            named.pop(name, None)
        tree: Tree = handed(layer)
        index = int(layer.layer_idx)  # type: ignore[arg-type]
        tree.walked.add(index)
        states = dict(tree.context.states.get(index, {}))
        row, pieces, nodes, answer = hidden_states[0], [], [], None
        for call in tree.calls:
            start = _start(call, states)
            answer = own(_rows(row, call, states), **{**named, cache: start})
            out = answer[0] if isinstance(answer, tuple) else answer
            for at, segment in enumerate(call.segments):
                pieces.append(out[at, call.waiting : call.waiting + segment.length])
                nodes.append(torch.arange(segment.first, segment.end))
                if segment.leaves:
                    states[segment.last] = _left(segment, call, start.at(at), states, row)
        if tree.fresh is not None:
            kept = {segment.last for call in tree.calls for segment in call.segments if segment.kept}
            tree.fresh.states[index] = {node: states[node] for node in kept}
        order = torch.argsort(torch.cat(nodes)).to(row.device)
        whole = torch.cat(pieces).index_select(0, order)[None]
        return (whole, *answer[1:]) if isinstance(answer, tuple) else whole

    return forward


def _start(call: Together, states: Mapping[int, State]) -> States:
    """Return the initial states of segments."""
    before = [states[s.before] for s in call.segments if s.before is not None]
    return States.of([{name: x for name, x in state.items() if name != _INPUT} for state in before])


def _rows(row: Tensor, call: Together, states: Mapping[int, State]) -> Tensor:
    """Return [B, n, d]: waiting inputs and the segments' nodes, padded with zeros, and after a single one."""
    rows = [row[s.first : s.end] for s in call.segments]
    if call.waiting:
        inputs = [states[s.before][_INPUT] for s in call.segments if s.before is not None]
        rows = [torch.cat([waiting, own]) for waiting, own in zip(inputs, rows, strict=True)]
    return F.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, 0, 0, int(call.single)))


def _left(segment: Segment, call: Together, state: State, states: Mapping[int, State], row: Tensor) -> State:
    """Return the state after a segment; for a single node, the one before it, and its input."""
    if call.single and segment.before is not None:
        return {**states[segment.before], _INPUT: row[segment.first : segment.end]}
    return state
