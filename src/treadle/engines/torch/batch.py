"""The running batch of `TorchEngine`: calls join it, decode together token by token, and leave it. No asyncio here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.core.draws import token_uniforms
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import DataError, EngineError
from treadle.core.images import ImageIds, PromptImage, axes
from treadle.core.support import Probabilities, Support
from treadle.core.types import Floats, Ids, Routing, SamplingParams, StopReason, common_prefix
from treadle.engines.sampling import Rules, rules, sample
from treadle.engines.torch.kv_cache import Cached, CachedRows, KVCache, KVCall
from treadle.engines.torch.model import Axes, CachedModel, Pictures, Predicted
from treadle.engines.torch.options import TorchEngineOptions
from treadle.rendering.grammars import Constraint

Decode = Callable[[Sequence[int]], str]
_UNFINISHED = "�"  # decoded text of an incomplete character
_SHARED = 0.75  # share of live rows above which computing all rows is cheaper than gathering the live ones
_DRAWS = 16  # tokens per batch of draws
_PREFIX = 64  # minimum common prefix worth computing once


@dataclass(slots=True)
class EngineCounters:
    """Tokens computed and saved since the start."""

    prefilled: int = 0  # prompt tokens computed
    reused: int = 0  # prompt tokens found in the session's cache
    shared: int = 0  # prompt tokens computed once for several calls
    sampled: int = 0


@dataclass(slots=True, eq=False)
class Call:
    """A request for one completion. constraint: what a grammar and forbidden ids leave, if anything is left out, or
    what is wrong with the grammar. cancelled: set from any thread. made: time of the request, in seconds. stop: tokens
    that end it; None: the engine's. images: of the prompt, whose placeholders have ids of their own once it joined the
    batch. axes: of prompt and completion.
    """

    session: int
    prompt: Ids
    sampling: SamplingParams
    salt: str | None = None
    constraint: Constraint | DataError | None = None
    cancelled: bool = False
    made: float = field(default_factory=time.perf_counter)
    stop: frozenset[int] | None = None
    images: tuple[PromptImage, ...] = ()
    axes: Axes = field(init=False)

    def __post_init__(self) -> None:
        self.axes = axes(self.positions, self.images)

    @property
    def positions(self) -> int:
        """Maximum number of positions in its row, including one for padding."""
        return len(self.prompt) + self.sampling.max_tokens + 1

    @property
    def shift(self) -> int:
        """How far the completion's positions, equal on all axes, are from its places in the row."""
        return 0 if self.axes is None else int(self.axes[0, -1]) - (self.positions - 1)


@dataclass(slots=True, eq=False)
class _Row:
    """A call in the batch. starts: (version, first token sampled by it). waited: seconds before it joined."""

    call: Call
    cached: Cached
    stops: StopStrings | None
    starts: list[tuple[int, int]]
    waited: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routing: list[Routing] = field(default_factory=list)
    kept: list[Ids | None] = field(default_factory=list)
    likely: list[tuple[Ids, Floats]] = field(default_factory=list)
    ended: StopReason | None = None

    def position(self) -> int:
        """Position of its last token; after its end, the position behind that, which no query reads."""
        return len(self.call.prompt) + len(self.tokens) - (self.ended is None)

    def cached_ids(self) -> Ids:
        """Ids with computed keys: all but the last token."""
        return np.concatenate([self.call.prompt, np.array(self.tokens[:-1], np.int32)])

    def completion(self, reason: StopReason) -> Completion:
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        return Completion(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason=reason,
            policy_versions=tuple(VersionSpan(v, a, b) for (v, a), b in zip(self.starts, ends, strict=True) if a < b),
            routing=np.stack(self.routing) if self.routing else None,
            waited=self.waited,
            support=Support.of(self.kept) if self.call.sampling.truncates else None,
            probabilities=Probabilities.of_tokens(self.likely) if self.likely else None,
        )


class Batch:
    """Rows of the cache that decode together.

    The row of an ended call is still computed until others join, or until so few are live that gathering them is
    cheaper. A call's samples do not depend on other calls, except for rounding.
    """

    def __init__(self, model: CachedModel, options: TorchEngineOptions, decode: Decode | None) -> None:
        self._model, self._options, self._decode = model, options, decode
        self._stop = frozenset(options.stop_token_ids)
        self._cached = CachedRows(int(options.cache_gib * 2**30), *model.cache_bytes())
        self._images = _SessionImages()
        self._rows: list[_Row] = []  # row i of the cache
        self._computed: list[int] = []  # the rows of `_rules`
        self._rules: Rules = rules([])
        self._draws: NDArray[np.float64] = np.empty((0, _DRAWS))
        self._drawn = 0  # consumed columns of `_draws`
        self.version = 0
        self.counters = EngineCounters()
        self.finished: list[tuple[Call, Completion | DataError]] = []  # taken by the caller

    @property
    def live(self) -> list[_Row]:
        return [row for row in self._rows if row.ended is None]

    @property
    def cache_share(self) -> float:
        return self._cached.share

    @torch.inference_mode()
    def join(self, calls: Sequence[Call]) -> int:
        """Add as many of `calls` as fit, and sample their first tokens; return their number.

        An empty batch takes at least one.
        """
        live = self.live
        calls = calls[: self._room(live, calls)]
        if not calls:
            return 0
        for call in calls:
            call.prompt = self._images.put(call)
        entering = [self._row(call) for call in calls]
        cached = self._cached.place([row.cached for row in entering], max(r.call.positions for r in [*live, *entering]))
        self._rows = sorted([*live, *entering], key=lambda row: row.cached.row)
        predicted = self._prefill(entering, cached)
        self._computed = []
        numbers = [row.cached.row for row in entering]
        if self._model.stateful:
            self._cached.cache.states.mark(torch.tensor(numbers, device=self._model.device))
            for row in entering:
                row.cached.marked = len(row.call.prompt)
        self._draw(set(numbers))
        entering_rules = rules([row.call.sampling for row in entering], self._model.samples_on)
        self._append(entering, predicted, entering_rules, numbers)
        return len(calls)

    @torch.inference_mode()
    def step(self) -> None:
        """End cancelled calls, then sample one more token for every live row."""
        for row in self.live:
            if row.call.cancelled:
                self._end(row, StopReason.ABORT)
        computed = [number for number, row in enumerate(self._rows) if row.ended is None]
        if not computed:
            return
        # The state of an ended row must not change.
        everything = len(computed) >= (1.0 if self._model.stateful else _SHARED) * len(self._rows)
        if everything:
            computed = list(range(len(self._rows)))
        rows = [self._rows[number] for number in computed]
        if computed != self._computed:
            self._computed = computed
            self._rules = rules([row.call.sampling for row in rows], self._model.samples_on)
        if self._drawn == _DRAWS:
            self._draw(set())
        where = slice(0, len(rows)) if everything else torch.tensor(computed, device=self._model.device)
        self._append(rows, self._next(rows, where), self._rules, computed)

    @torch.inference_mode()
    def publish(self, weights: Mapping[str, Tensor], version: int, *, recompute: bool) -> None:
        """Load new weights between two tokens; live rows continue with their cache, or with a recomputed one.

        Raises EngineError, and changes nothing, if weights are missing or of another shape.
        """
        self._model.load(weights, version)
        self.version = version
        live = self.live
        self._cached.outdate(keep_busy=recompute)
        for row in live:
            if row.starts[-1][1] == len(row.tokens):
                row.starts.pop()
            row.starts.append((version, len(row.tokens)))
            row.cached.marked = 0
        if recompute:
            for part in self._model.parts([(n, 0, len(row.cached_ids())) for n, row in enumerate(live)]):
                where = self._where([live[number].cached.row for number, _, _ in part])
                chunks = [live[number].cached_ids()[begin:end] for number, begin, end in part]
                shown = self._pictures([live[number] for number, _, _ in part])
                self._model.extend(self._cached.cache, where, chunks, [begin for _, begin, _ in part], shown)

    def sleep(self) -> None:
        """Free the memory of cache and weights until others are published. Raises EngineError while calls run."""
        if self.live:
            raise EngineError(f"{len(self.live)} calls run: the engine cannot sleep")
        self.clear()
        self._model.release()

    def forget(self, sessions: Sequence[int]) -> None:
        """Drop cached sequences of closed sessions without running calls."""
        self._cached.forget(sessions)
        self._images.forget(sessions)

    def clear(self) -> None:
        """Drop all rows and cached data, which are undefined after a failure."""
        self._rows, self.finished = [], []
        self._cached.clear()

    def _room(self, live: Sequence[_Row], calls: Sequence[Call]) -> int:
        longest = max((row.call.positions for row in live), default=0)
        for number, call in enumerate(calls[: self._options.max_batch - len(live)]):
            longest = max(longest, call.positions)
            if (number or live) and not self._cached.fits(len(live) + number + 1, longest):
                return number
        return min(len(calls), self._options.max_batch - len(live))

    def _row(self, call: Call) -> _Row:
        stop = call.sampling.stop
        stops = StopStrings(stop, self._decode) if stop and self._decode is not None else None
        waited = time.perf_counter() - call.made
        cached = Cached(call.session, call.salt, call.prompt, exact=self._model.reuses)
        return _Row(call, cached, stops, [(self.version, 0)], waited)

    # --- prompts -------------------------------------------------------------------------------------------------

    def _prefill(self, rows: Sequence[_Row], cached: Sequence[int]) -> Predicted:
        """Compute the uncached part of every prompt; return the predictions after each.

        cached: number of cached tokens of each prompt.
        """
        predicted = self._model.empty(len(rows))
        fresh: dict[str | None, dict[bytes, list[int]]] = {}  # salt -> prompt -> indices of its rows
        for number, row in enumerate(rows):
            if not cached[number]:
                same = fresh.setdefault(row.call.salt, {})
                same.setdefault(row.call.prompt.tobytes(), []).append(number)
        starts = list(cached)
        for same in fresh.values():
            start = self._prefill_prefix([rows[number] for numbers in same.values() for number in numbers], len(same))
            for number, *_others in same.values():
                starts[number] = start
        groups = [numbers for same in fresh.values() for numbers in same.values()]
        self._extend(rows, [number for number, *_others in groups], starts, predicted)
        self._repeat(rows, groups, predicted)
        self._extend(rows, [number for number, length in enumerate(cached) if length], starts, predicted)
        self.counters.reused += sum(cached)
        return predicted

    def _prefill_prefix(self, rows: Sequence[_Row], prompts: int) -> int:
        """Compute the common prefix of these fresh rows once; return its length, or 0 if it is not worthwhile.

        prompts: number of distinct prompts.
        """
        first = rows[0].call.prompt
        length = min(min(common_prefix(first, row.call.prompt), len(row.call.prompt) - 1) for row in rows)
        if prompts == 1 or length < _PREFIX or not self._model.reuses:
            return 0
        once = KVCache(1, length + 1)
        self._model.extend(once, slice(0, 1), [first[:length]], [0], self._pictures(rows[:1]))
        targets = torch.tensor([row.cached.row for row in rows], device=self._model.device)
        self._cached.cache.copy_rows(once, torch.zeros_like(targets), targets, length)
        self.counters.prefilled += length
        self.counters.shared += length * (prompts - 1)
        return length

    def _extend(
        self, rows: Sequence[_Row], numbers: Sequence[int], starts: Sequence[int], predicted: Predicted
    ) -> None:
        """Compute the prompts of rows[number] for these numbers, from starts[number] on."""
        for part in self._model.parts([(number, starts[number], len(rows[number].call.prompt)) for number in numbers]):
            numbers, begins, _ends = zip(*part, strict=True)
            chunks = [rows[number].call.prompt[begin:end] for number, begin, end in part]
            where = self._where([rows[number].cached.row for number in numbers])
            shown = self._pictures([rows[number] for number in numbers])
            after = self._model.extend(self._cached.cache, where, chunks, begins, shown)
            predicted.put(torch.tensor(numbers, device=self._model.device), after)
            self.counters.prefilled += sum(map(len, chunks))

    def _repeat(self, rows: Sequence[_Row], groups: Sequence[Sequence[int]], predicted: Predicted) -> None:
        """Copy cache and prediction of each group's first row to its others, which have the same prompt."""
        pairs = [(first, other) for first, *others in groups for other in others]
        if not pairs:
            return
        device, cache = self._model.device, self._cached.cache
        firsts, others = (torch.tensor(numbers, device=device) for numbers in zip(*pairs, strict=True))
        sources, targets = (
            torch.tensor([rows[n].cached.row for n in ns], device=device) for ns in zip(*pairs, strict=True)
        )
        cache.copy_rows(cache, sources, targets, max(len(rows[first].call.prompt) for first, _ in pairs))
        predicted.put(others, predicted, firsts)
        self.counters.shared += sum(len(rows[first].call.prompt) for first, _ in pairs)

    def _pictures(self, rows: Sequence[_Row]) -> Pictures | None:
        """Return what rows show; None for rows of text."""
        if not any(row.call.images for row in rows):
            return None
        return Pictures(self._images.table, [row.call.axes for row in rows])

    def _where(self, rows: list[int]) -> slice | Tensor:
        """Return a slice if rows are consecutive (no copy), otherwise an index."""
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return torch.tensor(rows, device=self._model.device)

    # --- tokens --------------------------------------------------------------------------------------------------

    def _next(self, rows: Sequence[_Row], where: slice | Tensor) -> Predicted:
        """Feed each row its last token."""
        positions = np.array([row.position() for row in rows])
        ids = torch.tensor([row.tokens[-1] for row in rows])[:, None]
        places = torch.from_numpy(positions)[:, None].to(self._model.device)
        call = KVCall(self._cached.cache, where, places, int(positions.max()) + 1, False)
        shifts = [row.call.shift for row in rows]
        if any(shifts):
            call.places = places + torch.tensor(shifts, device=places.device)[:, None]
        return self._model.forward(call, ids)

    def _draw(self, entering: set[int]) -> None:
        """Make the next draws of all rows. Entering rows use them now, the others from the next step on."""
        seeds = np.array([row.call.sampling.seed for row in self._rows], np.uint64)
        waits = bool(entering)
        first = [len(row.tokens) - (waits and number not in entering) for number, row in enumerate(self._rows)]
        tokens = np.array(first)[:, None] + np.arange(_DRAWS)
        self._draws, self._drawn = token_uniforms(seeds[:, None], tokens), 0

    def _append(self, rows: Sequence[_Row], predicted: Predicted, how: Rules, numbers: list[int]) -> None:
        draws = torch.from_numpy(self._draws[numbers, self._drawn]).to(self._model.samples_on)
        self._drawn += 1
        logits = self._constrained(rows, predicted.logits.to(self._model.samples_on))
        ids, logprobs, among = sample(logits, how, draws)
        supports = _supports(among > -torch.inf, ids) if how.filters else [None] * len(rows)
        most = self._options.probabilities
        likely = None if most is None else most_probable(among, most)
        routing = None if predicted.routing is None else predicted.routing.cpu().numpy()
        for number, (row, token, logprob) in enumerate(zip(rows, ids.tolist(), logprobs.tolist(), strict=True)):
            if row.ended is not None:
                continue
            row.tokens.append(token)
            row.logprobs.append(min(logprob, 0.0))
            if isinstance(row.call.constraint, Constraint):
                row.call.constraint.take(token)
            if row.call.sampling.truncates:
                row.kept.append(supports[number])
            if likely is not None and row.call.sampling.temperature > 0:
                row.likely.append(likely[number])
            if routing is not None:
                row.routing.append(routing[number])
            self.counters.sampled += 1
            ends = self._stop if row.call.stop is None else row.call.stop
            if token in ends or (row.stops is not None and row.stops.completes(token)):
                self._end(row, StopReason.STOP)
            elif len(row.tokens) == row.call.sampling.max_tokens:
                self._end(row, StopReason.LENGTH)

    def _constrained(self, rows: Sequence[_Row], logits: Tensor) -> Tensor:
        """Return the logits with -inf for what a row's constraint leaves out. Ends rows that cannot go on."""
        if not any(row.call.constraint for row in rows):
            return logits
        outside = np.zeros(logits.shape, np.bool_)
        for number, row in enumerate(rows):
            if not isinstance(row.call.constraint, Constraint) or row.ended is not None:
                continue
            try:
                possible = np.unpackbits(np.frombuffer(row.call.constraint.mask(), np.uint8), bitorder="little")
            except DataError as error:
                self._end(row, StopReason.ABORT, error)
                continue
            outside[number] = True
            outside[number, : len(possible)] = possible[: logits.shape[1]] == 0
        return logits.masked_fill(torch.from_numpy(outside).to(logits.device), -torch.inf)

    def _end(self, row: _Row, reason: StopReason, error: DataError | None = None) -> None:
        self._cached.release(row.cached, row.cached_ids())
        self.finished.append((row.call, error or row.completion(reason)))
        row.ended = reason


class _SessionImages:
    """Images of open sessions, which later calls may show again."""

    def __init__(self) -> None:
        self.table = ImageIds()
        self._sessions: dict[str, set[int]] = {}  # hash of a processed image -> sessions

    def put(self, call: Call) -> Ids:
        """Return the call's prompt with the ids of its images' placeholders."""
        for image in call.images:
            self._sessions.setdefault(image.processed, set()).add(call.session)
        return self.table.put(call.prompt, call.images)

    def forget(self, sessions: Sequence[int]) -> None:
        for owners in self._sessions.values():
            owners.difference_update(sessions)
        unseen = [processed for processed, owners in self._sessions.items() if not owners]
        self.table.forget(unseen)
        for processed in unseen:
            del self._sessions[processed]


def _supports(kept: Tensor, sampled: Tensor) -> list[Ids | None]:
    """Return the kept ids of each row, None for all. kept bool[B, V]; sampled int64[B]: belong to them."""
    rows = kept.scatter(1, sampled[:, None], True).cpu().numpy()
    each = [np.flatnonzero(row).astype(np.int32) for row in rows]
    return [None if len(ids) == rows.shape[1] else ids for ids in each]


def most_probable(logprobs: Tensor, count: int) -> list[tuple[Ids, Floats]]:
    """Return (ascending ids, probabilities) of the most probable ids of each row of logprobs float32[B, V].

    Those as probable as the last one are included, so that ties do not depend on the order of computation.
    """
    likely = logprobs.isfinite()
    if count < logprobs.shape[1]:
        likely &= logprobs >= logprobs.topk(count).values[:, -1:]
    ends = likely.sum(1).cumsum(0)[:-1].cpu().numpy()
    ids, values = likely.nonzero()[:, 1].int().cpu().numpy(), logprobs[likely].exp().cpu().numpy()
    return list(zip(np.split(ids, ends), np.split(values, ends), strict=True))


class StopStrings:
    """Watches one growing completion for stop strings.

    Decodes only the newest tokens, with those of the piece before them: a token's text can depend on its predecessor
    (spaces, characters of several tokens).
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop, self._decode = stop, decode
        self._reach = max(map(len, stop)) - 1  # characters before a token's text where a match may begin
        self._tail = ""
        self._tokens: list[int] = []  # tokens of the last finished piece, then of the unfinished one
        self._read = 0  # number of tokens in the finished piece
        self._known = ""  # that piece's text

    def completes(self, token: int) -> bool:
        """Return whether the text contains a stop string once this token is added."""
        self._tokens.append(token)
        fresh = self._decode(self._tokens)[len(self._known) :]
        if any(s in self._tail + fresh for s in self._stop):
            return True
        if fresh and not fresh.endswith(_UNFINISHED):
            self._tail = (self._tail + fresh)[-self._reach :] if self._reach else ""
            self._tokens = self._tokens[self._read :]
            self._read, self._known = len(self._tokens), self._decode(self._tokens)
        return False
