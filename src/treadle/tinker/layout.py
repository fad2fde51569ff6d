"""Datums as inputs of packing: every distinct (prefix, target) is a pair that is computed once.

    datums --by kind--> plain: each target is the next token      -> pairs shared like their prefixes
                        tabular: any other targets, [T] or [T, k] -> a pair per position, k targets at each

Shapes: D datums of T tokens each, M targets of all of them, N pairs, k targets of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.core.errors import DataError
from treadle.packing.flat import Indices, PackedCall
from treadle.packing.tree import depth_first
from treadle.tinker.data import Datum, Sparse
from treadle.tinker.losses import TARGETS, Inputs, Loss
from treadle.training.objective import LossGradients, TokenScores


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Some datums laid out.

    number int64[D]: of each datum in the call. shapes: of their targets. calls: their pairs, [0, N). pair int64[M]:
    pair of each target. column int64[M], top int64[N, k]: which of the pair's targets it is; None: the pair's own.
    inputs: of the loss, float64[M] each, and `datum` int64[M].
    """

    number: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    calls: Sequence[PackedCall]
    pairs: int
    pair: Indices
    column: Indices | None
    top: NDArray[np.int64] | None
    inputs: Mapping[str, NDArray[np.generic]]

    def tensors(self, like: Tensor) -> Inputs:
        """Return the inputs in the dtype and on the device of `like`."""
        return {
            name: torch.from_numpy(array).to(like.device, None if name == "datum" else like.dtype)
            for name, array in self.inputs.items()
        }

    def targets(self, scores: TokenScores) -> tuple[Tensor, Tensor]:
        """Return the targets that these scores cover, int64[m], and the index of each one's pair in the scores."""
        place = np.full(self.pairs, -1, np.int64)
        place[scores.flat] = np.arange(len(scores.flat))
        local = place[self.pair]
        covered = np.flatnonzero(local >= 0)
        device = scores.logp.device
        return torch.from_numpy(covered).to(device), torch.from_numpy(local[covered]).to(device)

    def logp(self, scores: TokenScores) -> tuple[Tensor, Tensor]:
        """Return the targets that these scores cover, int64[m], and their log-probabilities [m]."""
        covered, local = self.targets(scores)
        if self.column is None or scores.top is None:
            return covered, scores.logp[local]
        return covered, scores.top[local, self._columns(covered)]

    def slopes(self, scores: TokenScores, slope: Tensor) -> LossGradients:
        """Return the gradient by scores from that by the log-probabilities of all targets [M]."""
        covered, local = self.targets(scores)
        zeros = torch.zeros_like(scores.logp)
        if self.column is None or scores.top is None:
            return LossGradients(zeros.index_add(0, local, slope[covered]))
        top = torch.zeros_like(scores.top)  # no two targets share a pair and a column
        return LossGradients(zeros, top=top.index_put((local, self._columns(covered)), slope[covered]))

    def _columns(self, covered: Tensor) -> Tensor:
        assert self.column is not None
        return torch.from_numpy(self.column).to(covered.device)[covered]

    def split(self, values: NDArray[np.floating]) -> list[tuple[int, NDArray[np.float32]]]:
        """Return the number of each datum with its part of values [M], in its targets' shape."""
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)]).tolist()
        parts = zip(self.number, self.shapes, pairwise(ends), strict=True)
        return [(number, values[a:b].reshape(shape).astype(np.float32)) for number, shape, (a, b) in parts]


def lay_out(
    data: Sequence[Datum], name: str, loss: Loss, options: Mapping[str, float], vocabulary: int, context: int
) -> list[Layout]:
    """Return the layouts of a call's datums, one for each kind of targets. Raises DataError, naming a datum."""
    if not data:
        raise DataError("the call has no datum")
    checked = [_checked(datum, f"datum {n}", name, loss, options, vocabulary, context) for n, datum in enumerate(data)]
    plain = [n for n, (datum, inputs) in enumerate(zip(data, checked, strict=True)) if _shifts(datum, inputs[TARGETS])]
    others = sorted(set(range(len(data))) - set(plain))
    kinds = ((plain, _plain), (others, _tabular))
    return [
        make(numbers, [data[n] for n in numbers], [checked[n] for n in numbers]) for numbers, make in kinds if numbers
    ]


def _checked(
    datum: Datum,
    where: str,
    name: str,
    loss: Loss,
    options: Mapping[str, float],
    vocabulary: int,
    context: int,
) -> dict[str, NDArray[Any]]:
    """Return a datum's inputs, all in the shape of its targets, with options among them."""
    ids = datum.ids
    if not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise DataError(f"{where}: its tokens must be non-empty and in [0, {vocabulary})")
    if len(ids) >= context:
        raise DataError(f"{where}: {len(ids)} tokens and a target do not fit the model's context of {context}")
    names = {TARGETS, *loss.required, *loss.optional, *loss.options}
    if unknown := sorted(datum.inputs.keys() - names):
        raise DataError(f"{where}: loss {name!r} has no input {unknown[0]!r}; it has {sorted(names)}")
    if missing := sorted({TARGETS, *loss.required} - datum.inputs.keys()):
        raise DataError(f"{where}: loss {name!r} needs the input {missing[0]!r}")
    inputs = {key: array.dense() if isinstance(array, Sparse) else array for key, array in datum.inputs.items()}
    targets = inputs[TARGETS]
    if targets.ndim not in (1, 2) or len(targets) != len(ids) or not targets.size:
        raise DataError(f"{where}: target_tokens has the shape {targets.shape}, and the datum {len(ids)} tokens")
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= vocabulary:
        raise DataError(f"{where}: target_tokens must be integers in [0, {vocabulary})")
    for key, array in inputs.items():
        if array.shape != targets.shape:
            raise DataError(f"{where}: {key} has the shape {array.shape}, and target_tokens {targets.shape}")
        if not np.isfinite(array).all():
            raise DataError(f"{where}: {key} has a value that is not finite")
    defaults = {"weights": 1.0, **options}
    return {**{key: np.full(targets.shape, value) for key, value in defaults.items()}, **inputs}


def _shifts(datum: Datum, targets: NDArray[Any]) -> bool:
    return targets.ndim == 1 and bool((targets[:-1] == datum.ids[1:]).all())


def _plain(number: Sequence[int], data: Sequence[Datum], checked: Sequence[Mapping[str, NDArray[Any]]]) -> Layout:
    """Lay out datums whose targets are the next tokens. A pair belongs to the first datum with its prefix."""
    whole = [
        np.append(datum.ids, inputs[TARGETS][-1]).astype(np.int32) for datum, inputs in zip(data, checked, strict=True)
    ]
    order, shared = depth_first([PackedCall(ids, 1, 0) for ids in whole], [0] * len(whole))
    calls: list[PackedCall] = []
    pair: list[Indices] = [np.empty(0, np.int64)] * len(whole)
    pairs, path = 0, np.empty(0, np.int64)  # pairs of the current sequence
    for at, common in zip(order, shared.tolist(), strict=True):
        begin, end = max(1, common), len(whole[at])
        path = np.concatenate([path[: begin - 1], pairs + np.arange(end - begin)])
        pair[at] = path
        if begin < end:
            calls.append(PackedCall(whole[at], begin, pairs))
        pairs += end - begin
    return Layout(number, [ids.shape for ids in pair], calls, pairs, np.concatenate(pair), None, None, _inputs(checked))


def _tabular(number: Sequence[int], data: Sequence[Datum], checked: Sequence[Mapping[str, NDArray[Any]]]) -> Layout:
    """Lay out datums with any targets; a pair's own token, which nothing reads, is the datum's last one again."""
    targets = [inputs[TARGETS] for inputs in checked]
    starts = np.cumsum([0, *(len(datum.ids) for datum in data)]).tolist()
    calls = [
        PackedCall(np.append(datum.ids, datum.ids[-1]), 1, start)
        for datum, start in zip(data, starts[:-1], strict=True)
    ]
    tables = [t[:, None] if t.ndim == 1 else t for t in targets]
    top = np.zeros((starts[-1], max(table.shape[1] for table in tables)), np.int64)
    for table, start in zip(tables, starts[:-1], strict=True):
        top[start : start + len(table), : table.shape[1]] = table
    pair = [np.repeat(np.arange(a, a + len(t)), t.shape[1]) for t, a in zip(tables, starts[:-1], strict=True)]
    column = [np.tile(np.arange(t.shape[1]), len(t)) for t in tables]
    return Layout(
        number,
        [t.shape for t in targets],
        calls,
        starts[-1],
        np.concatenate(pair),
        np.concatenate(column),
        top,
        _inputs(checked),
    )


def _inputs(checked: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[np.generic]]:
    """Return the datums' inputs as flat arrays [M]."""
    names = checked[0].keys() - {TARGETS}
    sizes = [inputs[TARGETS].size for inputs in checked]
    flat: dict[str, NDArray[np.generic]] = {
        name: np.concatenate([inputs[name].ravel().astype(np.float64) for inputs in checked]) for name in names
    }
    return flat | {"datum": np.repeat(np.arange(len(checked)), sizes)}
