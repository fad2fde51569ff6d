"""Which row of the KV cache holds which tokens: placement of calls, prefix lookup, eviction of the least recently used.

    rows      0 ............ n                       R
              busy, no gaps   | idle sequences, free rows

Calls decode in the first rows, so that a pass reads one slice of the cache. A sequence stays after its call, for the
session's next one; the least recently used goes when memory is short.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from treadle.core.processes import release_freed_memory
from treadle.core.types import Ids, common_prefix
from treadle.engines.torch.kv_cache import KVCache

_GROW = 64  # positions


@dataclass(slots=True, eq=False)
class Cached:
    """Tokens whose keys and values are at the start of a row.

    busy: a call still writes there. exact: all keys are of the current weights. used: time of the last use.
    """

    session: int
    salt: str | None
    ids: Ids
    row: int = -1
    busy: bool = True
    exact: bool = True
    used: int = 0


class CachedRows:
    """The cache, and what its rows hold.

    budget: most bytes of the cache; a single call may exceed it. position_bytes: of one position of one row.
    """

    def __init__(self, budget: int, position_bytes: int) -> None:
        self._budget, self._position_bytes = budget, position_bytes
        self.cache = KVCache(rows=0, capacity=0)
        self._held: list[Cached] = []
        self._clock = count()

    @property
    def share(self) -> float:
        """Share of the budget taken by tokens, without those being sampled."""
        return sum(len(sequence.ids) for sequence in self._held) * self._position_bytes / self._budget

    def fits(self, busy: int, positions: int) -> bool:
        """Whether `busy` calls at once, the longest of `positions` positions, stay within the budget."""
        return busy <= self._most_rows(max(self.cache.capacity, _rounded(positions)))

    def place(self, newcomers: Sequence[Cached], positions: int) -> list[int]:
        """Give each newcomer a row with as much of its prompt as a sequence of its session has.

        positions: that the longest of all calls may take. Busy sequences may change rows; afterwards they and the
        newcomers, in order, fill the first rows. Returns the number of cached tokens of each prompt, which never
        includes the last one, because its logits are needed.
        """
        busy = [s for s in self._held if s.busy]
        origins, cached, continued = self._sources(newcomers)
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
        self._rearrange(moves, min(longest, self.cache.capacity), rows, capacity)
        now = next(self._clock)
        for sequence, row in targets.items():
            sequence.row = row
        for sequence in newcomers:
            sequence.used = now
        self._held = [*busy, *newcomers, *idle]
        return cached

    def release(self, sequence: Cached, ids: Ids) -> None:
        """Mark a sequence as idle: its call ended and left keys for `ids`. One with keys of old weights is dropped."""
        sequence.ids, sequence.busy, sequence.used = ids, False, next(self._clock)
        if not sequence.exact:
            self._held.remove(sequence)

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the idle sequences of closed sessions. The last one frees the memory, which training may need."""
        gone = set(sessions)
        self._held = [s for s in self._held if s.session not in gone]
        if gone and not self._held:
            self.clear()

    def outdate(self, keep_busy: bool) -> None:
        """Drop idle sequences, whose weights are old; busy ones when their call ends, unless `keep_busy`."""
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
        """For each newcomer, the sequence with most of its prompt and how much; and which sequences they continue."""
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
                if length > longest:
                    longest, origin = length, other
            if origin is not None and not origin.busy and longest == len(origin.ids):
                continued.add(origin)  # the newcomer's row will hold all that it holds
            origins.append(origin)
            lengths.append(longest)
        return origins, lengths, continued

    def _most_rows(self, capacity: int) -> int:
        return self._budget // (capacity * self._position_bytes)

    def _grown(self, positions: int, rows: int) -> int:
        """Capacity for so many positions: grows by half, so that copying is rare, if the rows then fit."""
        have = self.cache.capacity
        if positions <= have:
            return have
        generous = _rounded(max(positions, have + have // 2))
        return generous if rows <= self._most_rows(generous) else _rounded(positions)

    def _rearrange(self, moves: dict[int, int], length: int, rows: int, capacity: int) -> None:
        have = self.cache
        if rows > have.rows or (capacity > have.capacity and rows == have.rows):
            have.resize(rows, capacity)
        have.move(moves, length)
        if (rows, capacity) != (have.rows, have.capacity):
            have.resize(rows, capacity)


def _assign(
    busy: Sequence[Cached], newcomers: Sequence[Cached], idle: Sequence[Cached], first: int, rows: int
) -> dict[Cached, int]:
    """A row for each: busy ones and newcomers in [0, first), idle ones in [first, rows), moved only if necessary."""
    targets = {s: s.row for s in busy if s.row < first} | {s: s.row for s in idle if first <= s.row < rows}
    taken = set(targets.values())
    holes, free = (iter([r for r in span if r not in taken]) for span in (range(first), range(first, rows)))
    targets |= {s: next(holes) for s in busy if s not in targets}
    targets |= {s: next(holes) for s in newcomers}
    return targets | {s: next(free) for s in idle if s not in targets}


def _rounded(positions: int) -> int:
    return -(-positions // _GROW) * _GROW
