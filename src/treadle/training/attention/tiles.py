"""Tree attention on the CPU, without a mask and without anything quadratic in memory.

In depth-first order, all descendants of a node directly follow it. So a *run*, a stretch of nodes without a branch
inside, needs two calls of the stock flash kernel: one causal, on itself, and one for all queries below it, which form
one contiguous range, over all of it. A query's parts are merged by their log-sum-exp:

    a   b   c   d   e   f   g           runs: abc, de, fg (both under abc)
    a   a   a   |below      |           causal: abc x abc, de x de, fg x fg
        b   b   | (defg x abc)          full: defg x abc
            c   |           |
                d   d
                    e
                        f   f
                            g

The backward pass is the flash kernel's own, part by part, given the merged output and log-sum-exp: exp(score - lse) are
then the weights of the whole softmax (Dao 2023, "FlashAttention-2", section 3.1).

An attention sink is an additional part without an output. The flash kernel lacks soft caps: `capped` computes their
tiles.

A sliding window limits depths: runs are cut into pieces, pairs of pieces out of reach are skipped, and only those at
the window's edge take a small mask.

Shapes: T nodes, C context, H heads, K key/value heads, D head size; R rectangles per call, each with n queries and m
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.training.attention.capped import capped, capped_backward
from treadle.training.attention.interface import Shape

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_PIECE = 512  # piece size of runs under a sliding window, in nodes: at least the window up to this limit
_CALL = 2**19  # cost of a call, in multiply-adds of scores: smaller rectangles share one padded call


class Rectangle(NamedTuple):
    """Queries [first_query, end_query) over keys [first_key, end_key). causal: a run over itself. edge: the window
    ends inside. ahead: queries see only the keys after themselves."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    causal: bool = False
    edge: bool = False
    ahead: bool = False

    @property
    def height(self) -> int:
        return self.end_query - self.first_query

    @property
    def width(self) -> int:
        return self.end_key - self.first_key


def runs(shape: Shape) -> list[tuple[int, int, int]]:
    """Return (start, end, end of its descendants) of every run: a maximal stretch of keys without a branch inside."""
    depth, subtree_end = shape.depth.numpy(), shape.subtree_end.numpy()
    cut = (depth[1:] != depth[:-1] + 1) | (subtree_end[1:] != subtree_end[:-1])
    if shape.context:
        cut[shape.context - 1] = True
    starts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    ends = np.append(starts[1:], len(depth))
    return list(zip(starts.tolist(), ends.tolist(), subtree_end[ends - 1].tolist(), strict=True))


def rectangles(shape: Shape, window: int | None) -> list[list[Rectangle]]:
    """Return all of attention in rounds: no query appears twice in one; the first has every node over itself."""
    windowed = window is not None and int(shape.depth.max()) >= window
    rounds = _windowed(shape, window) if windowed and window is not None else _unlimited(shape)
    c = shape.context
    ahead = [Rectangle(start - c, end - c, start, end, ahead=True) for start, end in shape.seen_ahead(window)]
    return [*rounds, ahead] if ahead else rounds


def _unlimited(shape: Shape) -> list[list[Rectangle]]:
    """Return rounds of runs: each over itself, then all nodes below it over it."""
    rounds: list[list[Rectangle]] = [[]]
    open_ends: list[int] = []  # ends of the runs above the current one
    for start, end, below in runs(shape):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if start >= shape.context:
            rounds[0].append(Rectangle(start - shape.context, end - shape.context, start, end, causal=True))
        first = max(end, shape.context)
        if below > first:
            open_ends.append(below)
            if len(rounds) <= len(open_ends):
                rounds.append([])
            rounds[len(open_ends)].append(Rectangle(first - shape.context, below - shape.context, start, end))
    return rounds


def _windowed(shape: Shape, window: int) -> list[list[Rectangle]]:
    """Return rounds of pieces: a piece sees itself, then the pieces above it within reach of the window."""
    depth, size = shape.depth.numpy(), max(64, min(window, _PIECE))
    rounds: list[list[Rectangle]] = []
    path: list[tuple[int, int, int]] = []  # pieces above the current one
    for start, end, below in runs(shape):
        for first in range(start, end, size):
            last = min(first + size, end)
            while path and path[-1][2] <= first:
                path.pop()
            if first >= shape.context:
                above = _reach(depth, path, first, last, window, shape.context)
                for number, rectangle in enumerate(above):
                    if len(rounds) <= number:
                        rounds.append([])
                    rounds[number].append(rectangle)
            path.append((first, last, below))
    return rounds


def _reach(
    depth: NDArray[np.int64], path: Sequence[tuple[int, int, int]], first: int, last: int, window: int, context: int
) -> Iterator[Rectangle]:
    yield Rectangle(first - context, last - context, first, last, causal=True, edge=last - first > window)
    for start, end, _ in reversed(path):
        if depth[first] - depth[end - 1] >= window:
            return
        edge = bool(depth[last - 1] - depth[start] >= window)
        yield Rectangle(first - context, last - context, start, end, edge=edge)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Views R ranges of rows of a flat array [N, ...] as [R, width, ...], padded with zeros at the end.

    index int64[rows]: index of each row in the flat array. place int64[rows]: index in [R * width]. One range needs
    neither.
    """

    count: int
    width: int
    start: int
    index: Tensor | None
    place: Tensor | None

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]]) -> Ranges:
        width = max(end - start for start, end in bounds)
        if len(bounds) == 1:
            return cls(1, width, bounds[0][0], None, None)
        index = np.concatenate([np.arange(start, end) for start, end in bounds])
        place = np.concatenate([np.arange(end - start) + r * width for r, (start, end) in enumerate(bounds)])
        return cls(len(bounds), width, 0, torch.from_numpy(index), torch.from_numpy(place))

    def take(self, flat: Tensor, heads: int) -> Tensor:
        """Return the ranges of [N, heads * D] as [R, heads, width, D]; a view if there is one range."""
        if self.index is None or self.place is None:
            rows = flat[self.start : self.start + self.width]
        else:
            rows = flat.new_zeros(self.count * self.width, flat.shape[1])
            rows.index_copy_(0, self.place, flat.index_select(0, self.index))
        return rows.view(self.count, self.width, heads, -1).transpose(1, 2)

    def put(self, flat: Tensor, padded: Tensor) -> None:
        """Overwrite the ranges with [R, heads, width, D]."""
        rows = self._rows(padded)
        if self.index is None:
            flat[self.start : self.start + self.width] = rows
        else:
            flat.index_copy_(0, self.index, rows.to(flat.dtype))

    def add(self, flat: Tensor, padded: Tensor) -> None:
        """Add [R, heads, width, D] to the ranges, which may overlap."""
        rows = self._rows(padded)
        if self.index is None:
            flat[self.start : self.start + self.width] += rows
        else:
            flat.index_add_(0, self.index, rows.to(flat.dtype))

    def _rows(self, padded: Tensor) -> Tensor:
        rows = padded.transpose(1, 2).reshape(self.count * self.width, -1)
        return rows if self.place is None else rows.index_select(0, self.place)


@dataclass(frozen=True, slots=True)
class Tile:
    """One call of the flash kernel.

    mask [R, 1, n or 1, m]: 0 or -inf. blind bool[R, 1, n]: rows that see no key here.
    own: whether it is the first tile of its queries, in which every node sees at least itself.
    """

    queries: Ranges
    keys: Ranges
    own: bool
    causal: bool
    mask: Tensor | None = None
    blind: Tensor | None = None


def tiles(shape: Shape, window: int | None, features: int) -> list[Tile]:
    """Return the calls of the flash kernel, in order. features: H * D, for weighing padding against calls."""
    calls = []
    for number, rounds in enumerate(rectangles(shape, window)):
        for bucket in _buckets(rounds, _CALL // features):
            calls.append(_tile(shape, bucket, window, own=number == 0))
    return calls


def _buckets(same_round: Sequence[Rectangle], call: int) -> Iterator[list[Rectangle]]:
    """Group rectangles of similar size, as long as the padding costs less than another call (`call` scores)."""
    ordered = sorted(same_round, key=lambda r: (r.edge, -r.height, -r.width))  # of one kind, if they look ahead
    bucket: list[Rectangle] = []
    width = 0
    for rectangle in ordered:
        if bucket:
            height, wider = bucket[0].height, max(width, rectangle.width)
            more = height * (wider * (len(bucket) + 1) - width * len(bucket))
            if rectangle.edge != bucket[0].edge or more > rectangle.height * rectangle.width + call:
                yield bucket
                bucket, width = [], 0
        bucket.append(rectangle)
        width = max(width, rectangle.width)
    if bucket:
        yield bucket


def _tile(shape: Shape, bucket: Sequence[Rectangle], window: int | None, own: bool) -> Tile:
    queries = Ranges.of([(r.first_query, r.end_query) for r in bucket])
    keys = Ranges.of([(r.first_key, r.end_key) for r in bucket])
    edge, ahead = bucket[0].edge, bucket[0].ahead
    padded = any(r.width < keys.width for r in bucket)
    # A causal triangle hides padding at its end.
    if not edge and not ahead and (own or not padded):
        return Tile(queries, keys, own, causal=own)
    key_depth = _padded(shape.depth, [(r.first_key, r.end_key) for r in bucket], keys.width)
    visible = torch.zeros(len(bucket), 1, 1, keys.width, dtype=torch.bool)
    for row, rectangle in enumerate(bucket):
        visible[row, :, :, : rectangle.width] = True
    if edge and window is not None:
        nodes = [(r.first_query + shape.context, r.end_query + shape.context) for r in bucket]
        distance = _padded(shape.depth, nodes, queries.width)[:, None, :, None] - key_depth[:, None, None, :]
        visible = visible & (distance < window) & (distance >= 0)
    if ahead:
        visible = visible & torch.ones(queries.width, keys.width, dtype=torch.bool).triu(1)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return Tile(queries, keys, own, False, mask, ~visible.any(-1) if (edge or ahead) and not own else None)


def _padded(values: Tensor, bounds: Sequence[tuple[int, int]], width: int) -> Tensor:
    rows = torch.zeros(len(bounds), width, dtype=values.dtype)
    for row, (start, end) in enumerate(bounds):
        rows[row, : end - start] = values[start:end]
    return rows


@dataclass(slots=True)
class Tiles:
    """Computes tree attention (`Kernel`) on the CPU, with one plan per window."""

    shape: Shape
    plans: dict[int | None, list[Tile]] = field(default_factory=dict)

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
        if window not in self.plans:
            self.plans[window] = tiles(self.shape, window, query.shape[1] * query.shape[2])
        plan = self.plans[window]
        out: Tensor = _TileAttention.apply(query, key, value, sinks, plan, scale, softcap)  # type: ignore[no-untyped-call]
        return out


class _TileAttention(torch.autograd.Function):
    """query [T, H, D], key and value [C + T, K, D], sinks [H] -> [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: list[Tile],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        nodes, heads, _ = query.shape
        q, k, v = (x.reshape(len(x), -1) for x in (query, key, value))
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty((nodes, heads), dtype=wide)
        for tile in plan:
            part, part_lse = _forward_of(softcap)(
                *_inputs(tile, q, k, v, heads, key.shape[1]), 0.0, tile.causal, attn_mask=_mask(tile, q), scale=scale
            )
            part, part_lse = part.to(wide), part_lse[..., None]
            if not tile.own:
                if tile.blind is not None:
                    part_lse = part_lse.masked_fill(tile.blind[..., None], -torch.inf)
                before = tile.queries.take(lse, heads)
                total = torch.logaddexp(before, part_lse)
                part = part * (part_lse - total).exp() + tile.queries.take(out, heads) * (before - total).exp()
                part_lse = total
            tile.queries.put(out, part)
            tile.queries.put(lse, part_lse)
        # An additional part with zero output.
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(wide))
            out = (out.view(query.shape) * (lse - total).exp()[..., None]).view(out.shape)
            lse = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.plan, ctx.scale, ctx.softcap = plan, scale, softcap
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        heads, key_heads = query.shape[1], key.shape[1]
        grad_out = grad_outputs[0].reshape(len(query), -1)
        q, k, v = (x.reshape(len(x), -1) for x in (query, key, value))
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
        for tile in ctx.plan:
            part_q, part_k, part_v = _backward_of(ctx.softcap)(
                tile.queries.take(grad_out, heads),
                *_inputs(tile, q, k, v, heads, key_heads),
                tile.queries.take(out, heads),
                tile.queries.take(lse, heads)[..., 0].contiguous(),
                0.0,
                tile.causal,
                attn_mask=_mask(tile, q),
                scale=ctx.scale,
            )
            tile.queries.add(dq, part_q)
            tile.keys.add(dk, _folded(part_k, key_heads, lse.dtype))
            tile.keys.add(dv, _folded(part_v, key_heads, lse.dtype))
        gradients = (d.to(x.dtype).view(x.shape) for d, x in ((dq, query), (dk, key), (dv, value)))
        return *gradients, _sink_gradient(sinks, grad_out, out, lse), None, None, None


def _forward_of(softcap: float | None) -> Callable[..., tuple[Tensor, Tensor]]:
    return _flash if softcap is None else partial(capped, softcap=softcap)


def _backward_of(softcap: float | None) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return _flash_backward if softcap is None else partial(capped_backward, softcap=softcap)


def _sink_gradient(sinks: Tensor | None, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    """Return the sink's weight times its score's effect on the output, summed over nodes: [H]."""
    if sinks is None:
        return None
    taken = (grad_out.to(lse.dtype) * out).view(*lse.shape, -1).sum(-1)
    return -((sinks - lse).exp() * taken).sum(0).to(sinks.dtype)


def _inputs(tile: Tile, q: Tensor, k: Tensor, v: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return [R, H, n, D] and twice [R, H, m, D]: key and value heads are repeated for their query heads."""
    group = heads // key_heads
    keys, values = tile.keys.take(k, key_heads), tile.keys.take(v, key_heads)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return tile.queries.take(q, heads), keys, values


def _mask(tile: Tile, like: Tensor) -> Tensor | None:
    return None if tile.mask is None else tile.mask.to(like.dtype)


def _folded(gradient: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """[R, H, m, D] -> [R, K, m, D]: sum over the query heads of each key head."""
    rows, heads, width, size = gradient.shape
    if heads == key_heads:
        return gradient
    return gradient.view(rows, key_heads, heads // key_heads, width, size).to(dtype).sum(2)
