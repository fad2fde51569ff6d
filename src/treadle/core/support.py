"""`Support`: which tokens could have been sampled, where filters or a grammar left some out.

The sampler renormalizes over what is left, so a sampled token's log-probability is `logit - logsumexp` over its
support, in every model that scores it. Supports are data: they are recorded, never computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Ids that could have been sampled at each of C tokens.

    counts int32[C]: number of ids; 0: every id of the vocabulary. ids int32[sum of counts]: ascending within a token.
    Raises DataError for arrays that do not fit together.
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("counts", "ids"):
            array = np.array(getattr(self, name), np.int32)  # a private copy
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if (self.counts < 0).any() or int(self.counts.sum(dtype=np.int64)) != len(self.ids):
            raise DataError(f"Support.ids has {len(self.ids)} ids for counts of {self.counts.sum(dtype=np.int64)}")
        falls = (np.diff(self.ids) <= 0) & (np.diff(self._token) == 0)
        if falls.any() or (self.ids < 0).any():
            raise DataError("Support.ids must ascend within each token, from 0 on")

    @property
    def _token(self) -> NDArray[np.int64]:
        """Return the token of each id."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | NDArray[np.int32] | None]) -> Support:
        """Return the support of tokens with these ids, None for all."""
        counts = [0 if ids is None else len(ids) for ids in tokens]
        ids = [np.empty(0, np.int32), *(ids for ids in tokens if ids is not None)]
        return cls(np.array(counts, np.int32), np.concatenate(ids))

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Support | None]]) -> Support | None:
        """Return the support of consecutive (number of tokens, support); None if no part has any."""
        if not any(support is not None for _, support in parts):
            return None
        counts = [np.zeros(n, np.int32) if s is None else s.counts for n, s in parts]
        return cls(np.concatenate(counts), np.concatenate([s.ids for _, s in parts if s is not None]))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, tokens: slice) -> Support:
        """Return the support of consecutive tokens."""
        first, end, _ = tokens.indices(len(self))
        starts = self._starts
        return Support(self.counts[first:end], self.ids[starts[first] : starts[max(first, end)]])

    def take(self, tokens: NDArray[np.int64]) -> Support:
        """Return the support of some tokens, in their order."""
        counts = self.counts[tokens]
        first = np.repeat(self._starts[:-1][tokens], counts)
        within = np.arange(len(first)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
        return Support(counts, self.ids[first + within])

    def contains(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool[C]: whether each token is in its support."""
        inside: NDArray[np.bool_] = self.counts == 0
        inside[self._token[self.ids == tokens[self._token]]] = True
        return inside
