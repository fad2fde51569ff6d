"""The KV cache of `TorchEngine`: assignment of tokens to rows, and the attention that reads them.

    rows      0 ............ n                       R
              busy, no gaps   | idle sequences, free rows

Calls decode in the first rows, so that a pass reads one slice of the cache. A sequence stays after its call, for the
session's next one; the least recently used are evicted when memory is short.

Shapes: B rows of a call, R rows of the cache, C new tokens per row, T positions, H heads, K key/value heads, D head
size.

Any Hugging Face decoder writes and reads this cache through transformers' attention interface: it is called with
`attention="treadle_kv"`, and every attention layer finds the call's `KVCall` (`models.passing`). Layers with a state
instead of keys and values also find theirs there; a sequence can continue where a state was kept, after its prompt and
after its last token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from treadle.core.errors import EngineError
from treadle.core.images import BothWays
from treadle.core.processes import release_freed_memory
from treadle.core.types import Ids, common_prefix
from treadle.models.attention import attention_weights
from treadle.models.passing import handed
from treadle.models.states import States

ATTENTION = "treadle_kv"
_GROW = 64  # positions
_SCORES = 2**26  # size of one product of queries and keys


class StateRows:
    """States of R rows for every layer that keeps one: after the last token, and after the prompt.

    layers: layer -> name -> [2, R, ...], in that order. Layers are allocated at their first write.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.layers = rows, dict[int, dict[tuple[str, int], Tensor]]()

    def __bool__(self) -> bool:
        return bool(self.layers)

    def take(self, layer: int, rows: slice | Tensor) -> States:
        """Return the states after the last tokens of rows; a slice of rows is a view."""
        return States({name: held[0][rows] for name, held in self.layers[layer].items()})

    def put(self, layer: int, rows: slice | Tensor, states: States) -> None:
        """Set the states after the last tokens of rows."""
        held = self.layers.setdefault(layer, {})
        for name, new in states.now.items():
            if name not in held:
                held[name] = new.new_zeros((2, self.rows, *new.shape[1:]))
            held[name][0][rows] = new

    def mark(self, rows: Tensor) -> None:
        """Keep the present states of rows as their states after the prompt."""
        for held in self._tensors():
            held[1, rows] = held[0, rows]

    def resize(self, rows: int) -> None:
        kept, self.rows = min(rows, self.rows), rows
        for states in self.layers.values():
            for name, held in states.items():
                states[name] = held.new_zeros((2, rows, *held.shape[2:]))
                states[name][:, :kept] = held[:, :kept]

    def move(self, sources: Mapping[int, int], marked: Collection[int]) -> None:
        """Simultaneously copy states between rows. sources: target row -> source row.

        marked: rows that begin with the state after a prompt.
        """
        if not sources:
            return
        for held in self._tensors():
            rows, origins = (torch.tensor(list(r), device=held.device) for r in (sources.keys(), sources.values()))
            which = torch.tensor([int(row in marked) for row in sources], device=held.device)
            held[0, rows], held[1, rows] = held[which, origins], held[1, origins]

    def copy_rows(self, other: StateRows, sources: Tensor, rows: Tensor) -> None:
        """Copy to row rows[i] the state after the last token of `other`'s row sources[i]."""
        for layer in other.layers:
            self.put(layer, rows, other.take(layer, sources))

    def row_bytes(self) -> int:
        """Return the bytes of one row in all layers."""
        return sum(held[:, 0].nbytes for held in self._tensors()) if self.rows else 0

    def _tensors(self) -> Iterator[Tensor]:
        for states in self.layers.values():
            yield from states.values()


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer: layer -> (K, V), each [R, K, T, D]. Layers are allocated at their first write.

    states: states of layers that have them instead. pasts: by row, what a model keeps that uses nothing of this
    (`RowModel`).

    Memory is zero-initialized: masked positions are still multiplied by 0, and must be finite.
    """

    rows: int
    capacity: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    states: StateRows = field(init=False)
    pasts: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = StateRows(self.rows)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's (K, V); allocated like the new key and value [B, K, C, D] if necessary."""
        if index not in self.layers:
            keys, values = (t.new_zeros((self.rows, t.shape[1], self.capacity, t.shape[3])) for t in (key, value))
            self.layers[index] = (keys, values)
        return self.layers[index]

    def position_bytes(self) -> int:
        """Bytes of one position of one row in all layers."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self.layers.values() for t in pair)

    def resize(self, rows: int, capacity: int) -> None:
        """Change to `rows` rows of `capacity` >= the current number of positions, and keep the contents that fit."""
        kept_rows, old_capacity = min(rows, self.rows), self.capacity
        self.rows, self.capacity = rows, capacity
        self.states.resize(rows)
        for number, pair in self.layers.items():
            larger = [t.new_zeros((rows, t.shape[1], capacity, t.shape[3])) for t in pair]
            for new, old in zip(larger, pair, strict=True):
                new[:kept_rows, :, :old_capacity] = old[:kept_rows]
            self.layers[number] = (larger[0], larger[1])

    def move(self, sources: Mapping[int, int], length: int) -> None:
        """Simultaneously copy the first `length` positions between rows. sources: target row -> source row."""
        moving = {row: self.pasts.pop(source) for row, source in sources.items() if source in self.pasts}
        self.pasts |= moving
        if not sources or not length:
            return
        for pair in self.layers.values():
            for t in pair:
                rows, origins = (torch.tensor(list(r), device=t.device) for r in (sources.keys(), sources.values()))
                t[:, :, :length].index_copy_(0, rows, t[:, :, :length].index_select(0, origins))

    def copy_rows(self, other: KVCache, sources: Tensor, rows: Tensor, length: int) -> None:
        """Copy to row rows[i] the first `length` positions of `other`'s row sources[i], and its state."""
        self.states.copy_rows(other.states, sources, rows)
        if other.pasts:
            self.pasts |= {
                row: deepcopy(other.pasts[source]) for row, source in zip(rows.tolist(), sources.tolist(), strict=True)
            }
        for number, pair in other.layers.items():
            for target, origin in zip(self.layer(number, *pair), pair, strict=True):
                target[:, :, :length].index_copy_(0, rows, origin[:, :, :length].index_select(0, sources))


@dataclass(slots=True)
class KVCall:
    """One forward pass over some rows of a cache.

    rows: a slice, or int64[B]. positions: int64[B, C], where each new token is written.
    length: number of positions that queries may attend to. begins: whether all rows start fresh, without a state.
    places: what the model is told of the tokens' positions, int64[B, C], or on three axes int64[3, B, C]; None: the
    same. reach: last position that each query sees, int64[B, C], later than its own in an image that is seen both ways,
    and in which layers; None: its own.
    """

    cache: KVCache
    rows: slice | Tensor
    positions: Tensor
    length: int
    begins: bool
    places: Tensor | None = None
    reach: tuple[Tensor, BothWays] | None = None
    _mask: dict[int | None, Tensor] = field(default_factory=dict)
    _index: dict[int, Tensor] = field(default_factory=dict)  # by number of heads

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, K, C, D]; return all [B, K, length, D]."""
        pair = self.cache.layer(layer, key, value)
        for held, new in zip(pair, (key, value), strict=True):
            # Projections leave them as [B, C, K, D] in memory.
            vectors = new.transpose(1, 2).reshape(-1, new.shape[3])
            held.view(-1, new.shape[3]).index_copy_(0, self._places(new.shape[1]), vectors)
        if isinstance(self.rows, slice):
            keys, values = (t[self.rows, :, : self.length] for t in pair)
        else:
            keys, values = (t[:, :, : self.length].index_select(0, self.rows) for t in pair)
        return keys, values

    def _places(self, heads: int) -> Tensor:
        """Return int64[B * C * K]: index of each new vector in a layer flattened over [R, K, T]."""
        if heads not in self._index:
            device = self.positions.device
            rows = self.rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=device)
            head = rows[:, None, None] * heads + torch.arange(heads, device=device)
            self._index[heads] = (head * self.cache.capacity + self.positions[:, :, None]).reshape(-1)
        return self._index[heads]

    def mask(self, window: int | None) -> Tensor:
        """Return bool[B, 1, C, length]: key position <= query position, and within the sliding window, if any; or
        later, within the query's reach.
        """
        if window not in self._mask:
            key = torch.arange(self.length, device=self.positions.device)
            query = self.positions[:, None, :, None]
            allowed = key <= query
            if window is not None:
                allowed &= key > query - window
            if self.reach is not None and (self.reach[1] == "all" or window is not None):
                allowed |= (key > query) & (key <= self.reach[0][:, None, :, None])
            self._mask[window] = allowed
        return self._mask[window]


def cached_attention(
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
    """Attention of the new queries [B, H, C, D] over the cache; returns ([B, C, H, D], None)."""
    kv: KVCall = handed(module)
    # transformers makes no mask for attention implementations unknown to it.
    if attention_mask is not None:
        raise EngineError(f"{type(module).__name__} makes its own attention mask")
    keys, values = kv.append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    mask = kv.mask(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.shape[2] > 1 and s_aux is None and softcap is None:
        gqa = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
    elif query.shape[2] <= (columns := max(1, _SCORES // (query.shape[0] * query.shape[1] * keys.shape[2]))):
        out = _attend(query, keys, values, mask, scale, s_aux, softcap)
    else:
        parts = zip(query.split(columns, 2), mask.split(columns, 2), strict=True)
        out = torch.cat([_attend(part, keys, values, seen, scale, s_aux, softcap) for part, seen in parts], 2)
    return out.transpose(1, 2), None


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Return the output [B, H, C, D] of two batched products, which beat the fused kernel on CPU for one token per row.

    Fused kernels support neither sinks nor soft caps.
    """
    batch, heads, columns, size = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, size)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).mul_(scale)
    # A key head has `columns` rows of each of its query heads.
    if columns > 1:
        visible = visible.repeat(1, 1, heads // keys.shape[1], 1)
    if sinks is not None:
        sinks = sinks.repeat_interleave(columns).view(*scores.shape[1:3], 1)
    weights = attention_weights(scores, visible, sinks, softcap).to(values.dtype)
    return torch.matmul(weights, values).reshape(batch, heads, columns, values.shape[-1])


AttentionInterface.register(ATTENTION, cached_attention)


@dataclass(slots=True, eq=False)
class Cached:
    """Tokens with keys and values at the start of a row.

    busy: whether a call still writes there. exact: whether all keys belong to the current weights, and later calls may
    reuse them. used: time of the last use. marked: number of prompt tokens after which layers with a state kept theirs;
    0: none.
    """

    session: int
    salt: str | None
    ids: Ids
    row: int = -1
    busy: bool = True
    exact: bool = True
    used: int = 0
    marked: int = 0


class CachedRows:
    """The cache with the assignment of its rows.

    budget: size limit of the cache, in bytes; a single call may exceed it. position_bytes: size of one position of one
    row.
    row_bytes: size of one row's states; if any, reuse is limited to prefixes that end where a state was kept.
    """

    def __init__(self, budget: int, position_bytes: int, row_bytes: int = 0) -> None:
        self._budget, self._position_bytes, self._row_bytes = budget, position_bytes, row_bytes
        self.cache = KVCache(rows=0, capacity=0)
        self._held: list[Cached] = []
        self._clock = count()

    @property
    def share(self) -> float:
        """Return the share of the budget taken by tokens, without those being sampled."""
        positions = sum(len(sequence.ids) for sequence in self._held)
        return (positions * self._position_bytes + len(self._held) * self._row_bytes) / self._budget

    def fits(self, busy: int, positions: int) -> bool:
        """Return whether `busy` concurrent calls, the longest of `positions` positions, stay within the budget."""
        return busy <= self._most_rows(max(self.cache.capacity, _rounded(positions)))

    def place(self, newcomers: Sequence[Cached], positions: int) -> list[int]:
        """Give each newcomer a row with the longest prefix of its prompt cached for its session.

        positions: maximum length of all calls. Busy sequences may change rows; afterwards they and the newcomers, in
        order, fill the first rows. Returns the number of cached tokens of each prompt, which never includes the last
        one, because its logits are needed.
        """
        busy = [s for s in self._held if s.busy]
        origins, cached, continued = self._sources(newcomers)
        ends = [origin is not None and length == origin.marked for origin, length in zip(origins, cached, strict=True)]
        idle = [s for s in self._held if not s.busy and s not in continued]
        first = len(busy) + len(newcomers)
        capacity = self._grown(positions, first)
        idle = sorted(idle, key=lambda s: s.used, reverse=True)[: max(0, self._most_rows(capacity) - first)]
        wanted = first + len(idle)
        have = self.cache.rows
        rows = max(wanted, min(have if wanted <= have else have + have // 2, self._most_rows(capacity)))
        targets = _assign(busy, newcomers, idle, first, rows)
        moves = {targets[s]: s.row for s in (*busy, *idle) if targets[s] != s.row}
        moves |= {
            targets[s]: o.row for s, o in zip(newcomers, origins, strict=True) if o is not None and targets[s] != o.row
        }
        longest = max([positions, *(len(s.ids) for s in self._held)])
        marked = {
            targets[s]: o.row for s, o, end in zip(newcomers, origins, ends, strict=True) if end and o is not None
        }
        self._rearrange(moves, min(longest, self.cache.capacity), rows, capacity, marked)
        now = next(self._clock)
        for sequence, row in targets.items():
            sequence.row = row
        for sequence in newcomers:
            sequence.used = now
        self._held = [*busy, *newcomers, *idle]
        return cached

    def release(self, sequence: Cached, ids: Ids) -> None:
        """Mark a sequence as idle after its call left keys for `ids`. One with keys of old weights is dropped."""
        sequence.ids, sequence.busy, sequence.used = ids, False, next(self._clock)
        if not sequence.exact:
            self._held.remove(sequence)
            self.cache.pasts.pop(sequence.row, None)

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the idle sequences of closed sessions. The last one frees the memory, which training may need."""
        gone = set(sessions)
        self._held = [s for s in self._held if s.session not in gone]
        if gone and not self._held:
            self.clear()

    def outdate(self, keep_busy: bool) -> None:
        """Drop idle sequences, which belong to old weights; busy ones when their call ends, unless `keep_busy`."""
        self._held = [s for s in self._held if s.busy]
        for sequence in self._held:
            sequence.exact &= keep_busy
        if not self._held:
            self.clear()

    def clear(self) -> None:
        """Drop everything, including the memory, which bad weights may have filled with NaN."""
        self._held = []
        self.cache = KVCache(self.cache.rows, self.cache.capacity)
        release_freed_memory()

    def _sources(self, newcomers: Sequence[Cached]) -> tuple[list[Cached | None], list[int], set[Cached]]:
        """Return for each newcomer the sequence with most of its prompt, and how much; and which are continued."""
        sequences: dict[tuple[int, str | None], list[Cached]] = defaultdict(list)
        for sequence in self._held:
            if sequence.exact:
                sequences[sequence.session, sequence.salt].append(sequence)
        origins: list[Cached | None] = []
        lengths, continued = [], set()
        for newcomer in newcomers:
            longest, origin = 0, None
            for other in sequences[newcomer.session, newcomer.salt]:
                length = min(common_prefix(other.ids, newcomer.ids), len(newcomer.ids) - 1)
                if self._row_bytes:
                    length = _with_state(other, length)
                if length > longest:
                    longest, origin = length, other
            if origin is not None and not origin.busy and longest == len(origin.ids):
                # The newcomer's row will contain all its tokens.
                continued.add(origin)
            origins.append(origin)
            lengths.append(longest)
        return origins, lengths, continued

    def _most_rows(self, capacity: int) -> int:
        return self._budget // (capacity * self._position_bytes + self._row_bytes)

    def _grown(self, positions: int, rows: int) -> int:
        """Return the capacity for so many positions: grows by half, so that copying is rare, if the rows then fit."""
        have = self.cache.capacity
        if positions <= have:
            return have
        generous = _rounded(max(positions, have + have // 2))
        return generous if rows <= self._most_rows(generous) else _rounded(positions)

    def _rearrange(self, moves: dict[int, int], length: int, rows: int, capacity: int, marked: dict[int, int]) -> None:
        have = self.cache
        if rows > have.rows or (capacity > have.capacity and rows == have.rows):
            have.resize(rows, capacity)
        have.move(moves, length)
        have.states.move({**moves, **marked}, marked)
        if (rows, capacity) != (have.rows, have.capacity):
            have.resize(rows, capacity)


def _with_state(sequence: Cached, length: int) -> int:
    """Return how many of the first `length` tokens can be reused, up to a kept state."""
    ends = (0 if sequence.busy else len(sequence.ids), sequence.marked)
    return max(end for end in (0, *ends) if end <= length)


def _assign(
    busy: Sequence[Cached], newcomers: Sequence[Cached], idle: Sequence[Cached], first: int, rows: int
) -> dict[Cached, int]:
    """Return a row for each: busy ones and newcomers in [0, first), idle ones in [first, rows); moves few."""
    targets = {s: s.row for s in busy if s.row < first} | {s: s.row for s in idle if first <= s.row < rows}
    taken = set(targets.values())
    holes, free = (iter([r for r in span if r not in taken]) for span in (range(first), range(first, rows)))
    targets |= {s: next(holes) for s in busy if s not in targets}
    targets |= {s: next(holes) for s in newcomers}
    return targets | {s: next(free) for s in idle if s not in targets}


def _rounded(positions: int) -> int:
    return -(-positions // _GROW) * _GROW
