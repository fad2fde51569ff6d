"""`Support`: which tokens could have been sampled, where filters or a grammar left some out; `Probabilities` of these.

The sampler renormalizes over what is left, so a sampled token's log-probability is `logit - logsumexp` over its
support, in every model that scores it. What filters left is data: recorded, never computed again, as are the sampler's
probabilities. What a grammar left follows from grammar and tokens alone, and is derived before training
(`rendering.grammars`).
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

    counts int32[C]: number of ids; 0: every id of the vocabulary. ids int32[sum of counts of tokens without a mask]:
    ascending within a token. masks: bits of the possible ids, little-endian, for each of the C tokens where those are
    too many to list, otherwise None; () if there are none. Raises DataError for arrays that do not fit together.
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    masks: tuple[bytes | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("counts", "ids"):
            array = np.array(getattr(self, name), np.int32)  # a private copy
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not any(self.masks):
            object.__setattr__(self, "masks", ())
        elif len(self.masks) != len(self.counts):
            raise DataError(f"Support.masks has {len(self.masks)} entries for {len(self.counts)} tokens")
        listed = self.listed.sum(dtype=np.int64)
        if (self.counts < 0).any() or int(listed) != len(self.ids):
            raise DataError(f"Support.ids has {len(self.ids)} ids for counts of {listed}")
        falls = (np.diff(self.ids) <= 0) & (np.diff(self._token) == 0)
        if falls.any() or (self.ids < 0).any():
            raise DataError("Support.ids must ascend within each token, from 0 on")

    @property
    def listed(self) -> NDArray[np.int32]:
        """Return int32[C]: number of ids listed for each token."""
        if not self.masks:
            return self.counts
        return np.where([mask is None for mask in self.masks], self.counts, 0).astype(np.int32)

    @property
    def _token(self) -> NDArray[np.int64]:
        """Return the token of each id."""
        return np.repeat(np.arange(len(self.counts)), self.listed)

    @property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.listed, dtype=np.int64)])

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | NDArray[np.int32] | bytes | None]) -> Support:
        """Return the support of tokens with these ids, or masks of ids; None for all."""
        masks = tuple(ids if isinstance(ids, bytes) else None for ids in tokens)
        counts = [
            int.from_bytes(ids).bit_count() if isinstance(ids, bytes) else 0 if ids is None else len(ids)
            for ids in tokens
        ]
        ids = [np.empty(0, np.int32), *(ids for ids in tokens if not isinstance(ids, bytes | None))]
        return cls(np.array(counts, np.int32), np.concatenate(ids), masks)

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Support | None]]) -> Support | None:
        """Return the support of consecutive (number of tokens, support); None if no part has any."""
        if not any(support is not None for _, support in parts):
            return None
        counts = [np.zeros(n, np.int32) if s is None else s.counts for n, s in parts]
        masks = (mask for n, s in parts for mask in (s.masks if s is not None and s.masks else [None] * n))
        return cls(np.concatenate(counts), np.concatenate([s.ids for _, s in parts if s is not None]), tuple(masks))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, tokens: slice) -> Support:
        """Return the support of consecutive tokens."""
        first, end, _ = tokens.indices(len(self))
        starts = self._starts
        return Support(self.counts[first:end], self.ids[starts[first] : starts[max(first, end)]], self.masks[first:end])

    def take(self, tokens: NDArray[np.int64]) -> Support:
        """Return the support of some tokens, in their order."""
        masks = tuple(self.masks[token] for token in tokens) if self.masks else ()
        return Support(self.counts[tokens], self.ids[self.places(tokens)], masks)

    def places(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in `ids` of some tokens' ids."""
        counts = self.listed[tokens]
        first = np.repeat(self._starts[:-1][tokens], counts)
        return first + np.arange(len(first)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)

    def columns(self, other: Support) -> NDArray[np.int64]:
        """Return, for each id of the other support, its index among this one's ids of the same token.

        Raises DataError for an id that this one lacks.
        """
        keys, wanted = ((s._token << 32) + s.ids for s in (self, other))
        found = np.searchsorted(keys, wanted)
        if not np.array_equal(keys.take(found, mode="clip") if len(keys) else keys, wanted):
            raise DataError("a probability was recorded of an id that could not have been sampled")
        return found - self._starts[other._token]

    def of_token(self, token: int) -> NDArray[np.int32]:
        """Return the possible ids of one token, int32[K], empty for all."""
        if self.masks and (mask := self.masks[token]) is not None:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            return np.flatnonzero(bits).astype(np.int32)
        return self.ids[self._starts[token] : self._starts[token + 1]]

    def contains(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool[C]: whether each token is in its support."""
        inside: NDArray[np.bool_] = self.counts == 0
        inside[self._token[self.ids == tokens[self._token]]] = True
        for at, mask in enumerate(self.masks):
            if mask is not None:
                byte, bit = divmod(int(tokens[at]), 8)
                inside[at] = byte < len(mask) and bool(mask[byte] >> bit & 1)
        return inside

    def possible(self, size: int) -> NDArray[np.bool_]:
        """Return bool[C, size]: whether each of the first `size` ids is possible."""
        possible = np.repeat((self.counts == 0)[:, None], size, axis=1)
        possible[self._token, self.ids] = True
        masked: dict[bytes, list[int]] = {}
        for at, mask in enumerate(self.masks):
            if mask is not None:
                masked.setdefault(mask, []).append(at)
        for mask, tokens in masked.items():
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]
            possible[tokens, : len(bits)] = bits
        return possible


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """The sampler's probabilities of its most probable ids at each of C tokens, after temperature and filters.

    of: the ids; a count of 0: not recorded. values float32[ids]. What is missing from a sum of 1 belongs to all other
    ids. cap: of the ratio that weighs each token (`algorithm.correction.token_tis`); None: nothing weighs.
    Raises DataError for values that are not probabilities.
    """

    of: Support
    values: NDArray[np.float32]
    cap: float | None = None

    def __post_init__(self) -> None:
        values = np.array(self.values, np.float32)  # a private copy
        values.flags.writeable = False
        object.__setattr__(self, "values", values)
        if len(values) != len(self.of.ids):
            raise DataError(f"Probabilities has {len(values)} values for {len(self.of.ids)} ids")
        if (wrong := ~((values >= 0) & (values <= 1 + 1e-5))).any():
            raise DataError(f"Probabilities must lie in [0, 1], got {values[wrong][0]}")

    @classmethod
    def of_tokens(cls, tokens: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> Probabilities:
        """Return those of tokens with these (ids, values)."""
        values = [np.empty(0, np.float32), *(values for _, values in tokens)]
        return cls(Support.of([ids for ids, _ in tokens]), np.concatenate(values))

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Probabilities | None]]) -> Probabilities | None:
        """Return those of consecutive (number of tokens, probabilities); None if no part has any."""
        of = Support.joined([(n, None if part is None else part.of) for n, part in parts])
        values = [part.values for _, part in parts if part is not None]
        return None if of is None else cls(of, np.concatenate(values))

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, tokens: slice) -> Probabilities:
        """Return those of consecutive tokens."""
        return self.take(np.arange(len(self))[tokens])

    def take(self, tokens: NDArray[np.int64]) -> Probabilities:
        """Return those of some tokens, in their order."""
        return Probabilities(self.of.take(tokens), self.values[self.of.places(tokens)], self.cap)
