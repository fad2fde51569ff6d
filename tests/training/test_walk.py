"""Layers with a state over a prefix tree: each node once, each from its own past, whatever the tree and the budget."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models import exact
from treadle.core.types import Ids
from treadle.models import states
from treadle.models.passing import Passing
from treadle.models.states import stateful_layers
from treadle.packing import segments as packed
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing, arrange, chunks
from treadle.packing.segments import segments, together
from treadle.packing.tree import PrefixTree
from treadle.training import walk
from treadle.training.attention.interface import Past, Shape, Store, Tree
from treadle.training.attention.select import Dense
from treadle.training.forward import Forward
from treadle.training.walk import waiting, walking


class Recurrence(nn.Module):
    """s_t = s_{t-1} / 2 + x_t + x_{t-1} / 3; refuses what no layer has to take: single tokens behind a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        length, state = hidden_states.shape[1], cache.get_recurrent_state(0)
        assert length > 1 or state is None
        x = cache.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=2)
        mixed = nn.functional.conv1d(nn.functional.pad(x, (1, 0)), KERNEL.expand(x.shape[1], 1, 2), groups=x.shape[1])
        out = []
        for at in range(-length, 0):
            state = mixed[..., at] if state is None else state / 2 + mixed[..., at]
            out.append(state)
        cache.update_recurrent_state(state, 0)
        return torch.stack(out, 1)


KERNEL = torch.tensor([1 / 3, 1.0], dtype=torch.float64)


def alone(x: Tensor) -> Tensor:
    """[n, d] -> [n, d], token by token."""
    out, state = [], torch.zeros_like(x[0])
    for at, row in enumerate(x):
        state = state / 2 + row + (x[at - 1] / 3 if at else 0)
        out.append(state)
    return torch.stack(out)


def embed(ids: Any, table: Tensor) -> Tensor:
    return table[torch.from_numpy(np.asarray(ids, np.int64))]


@st.composite
def sequences(draw: st.DrawFn) -> list[Ids]:
    """Few ids and short, so that they share prefixes, branch after single tokens and end inside others."""
    return [
        np.array(draw(st.lists(st.integers(0, 2), min_size=2, max_size=9)), np.int32)
        for _ in range(draw(st.integers(1, 7)))
    ]


@given(sequences(), st.sampled_from(list(Packing)), st.integers(1, 9))
def test_every_node_goes_on_from_its_own_past_and_gradients_come_back(
    rows: list[Ids], packing: Packing, budget: int
) -> None:
    table = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    calls = [PackedCall(ids, 1, 20 * at) for at, ids in enumerate(rows)]
    arranged = arrange(calls, packing, Sharing.BATCH)
    tree, weights = PrefixTree.of(arranged.calls, arranged.shared), torch.randn(140, 2, dtype=torch.float64)
    own = table.clone().requires_grad_()
    wanted = {at: alone(embed(ids, own)) for at, ids in enumerate(rows)}
    sum((out[:-1] * weights[20 * at : 20 * at + len(out) - 1]).sum() for at, out in wanted.items()).backward()  # type: ignore[union-attr]
    parts, store = chunks(tree, budget), Store(len(tree))

    def computed(part: Any, past: Past, fresh: Past, values: Tensor) -> Tensor:
        layer, passing = Recurrence(), Passing[Tree]()
        with passing.through(layer), walking(stateful_layers(layer)):
            called = together(segments(part), waiting(past))
            passing.current = Tree(Dense(Shape.of(part)), past, fresh, called)
            out: Tensor = layer(embed(part.token_ids, values)[None])[0]
        assert sorted(n for c in called for s in c.segments for n in range(s.first, s.end)) == list(range(len(out)))
        return out

    for part in parts:
        fresh = Past()
        out = computed(part, store.at(part.context), fresh, table).index_select(0, torch.from_numpy(part.source))
        store.put(part, fresh)
        for flat, value in zip(part.flat.tolist(), out, strict=True):
            torch.testing.assert_close(value, wanted[flat // 20][flat % 20].detach(), rtol=0, atol=1e-14)
    found = table.clone().requires_grad_()
    for part in reversed(parts):
        past, fresh = store.leaves(part.context), Past()
        out = computed(part, past, fresh, found).index_select(0, torch.from_numpy(part.source))
        roots, gradients = store.pending(part, fresh)
        torch.autograd.backward([out, *roots], [weights[torch.from_numpy(part.flat)], *gradients])
        store.collect(part.context, past)
    assert found.grad is not None and own.grad is not None
    torch.testing.assert_close(found.grad, own.grad, rtol=0, atol=1e-12)


def sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment begins with the state of whichever was computed before it."""

    def start(call: packed.Together, known: dict[int, Any]) -> states.States:
        before = [list(known.values())[-1] for s in call.segments if s.before is not None]
        return states.States.of([{n: x for n, x in state.items() if n != ("input", 0)} for state in before])

    monkeypatch.setattr(walk, "_start", start)


def no_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.States, "get_conv_state", lambda *_, **__: None)


def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that others go on from are padded like those that end."""
    monkeypatch.setattr(packed, "_exact", lambda _: 0)


FORKS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 8, 9, 5], [1, 8, 9, 3, 4], [1, 8, 9, 3]]


@pytest.mark.parametrize("mutant", [None, sibling, no_convolution, padded])
def test_a_leak_of_states_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    model, rows = exact("qwen3-5"), [np.array(ids, np.int32) for ids in FORKS]
    forward = Forward(model, 64)
    arranged = arrange([PackedCall(ids, 1, 9 * at) for at, ids in enumerate(rows)], Packing.TREE, Sharing.BATCH)
    tree = PrefixTree.of(arranged.calls, arranged.shared)
    if mutant is not None:
        mutant(monkeypatch)
    scores = forward.scores(tree, torch.ones(45, dtype=torch.float64))
    found = dict(zip(scores.flat.tolist(), scores.logp.tolist(), strict=True))
    wanted = {9 * at + n: p for at, ids in enumerate(rows) for n, p in enumerate(own_logprobs(model, ids))}
    gap = max(abs(found[at] - wanted[at]) for at in wanted)
    assert found.keys() == wanted.keys()
    assert gap < 1e-12 if mutant is None else gap > 1e-4


@torch.no_grad()
def own_logprobs(model: Any, ids: Ids) -> list[float]:
    row = torch.from_numpy(ids).long()[None]
    logprobs = model(row, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[0, 1:, None])[:, 0].tolist()  # type: ignore[no-any-return]
