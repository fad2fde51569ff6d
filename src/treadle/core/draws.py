"""Keyed random draws: every number is a pure function of its address, with no shared stream.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised in numpy.
Evaluating, retrying or killing one call therefore never changes another call's draws.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_TO_UNIT = 1.0 / (1 << 53)

Words = NDArray[np.uint64]


class Stream(IntEnum):
    """Purpose of a draw; streams never share an address."""

    TRAIN = 1
    EVALUATE = 2
    SHUFFLE = 3
    BENCH = 4
    DEMONSTRATE = 5
    SERVE = 6
    TRACE = 7
    OTHER_MODEL = 8
    START = 9
    CURRICULUM = 10
    FORK = 11


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]
) -> tuple[Words, Words, Words, Words]:
    """Run ten rounds of Philox4x32 on broadcastable uint64 arrays that hold 32-bit words; return four such arrays."""
    c0, c1, c2, c3, k0, k1 = np.broadcast_arrays(*(np.asarray(w, np.uint64) for w in (*counter, *key)))
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def call_seed(seed: int, stream: Stream, epoch: int, task: int, attempt: int, step: int) -> int:
    """Return the 63-bit seed of one engine call, addressed by its position in the run."""
    high, low, _, _ = philox4x32((epoch, task, attempt, step), (seed & 0xFFFFFFFF, (seed >> 32) ^ (int(stream) << 24)))
    return (int(high) << 31 | int(low) >> 1) & 0x7FFFFFFFFFFFFFFF


def task_uniforms(seed: int, stream: Stream, epochs: ArrayLike, tasks: ArrayLike) -> NDArray[np.float64]:
    """Return a draw in [0, 1) per task of an epoch, keyed by data position: float64, broadcast, 53 bits."""
    a, b, _, _ = philox4x32((epochs, tasks, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) ^ (int(stream) << 24)))
    return _unit(a, b)


def token_uniforms(seeds: Words, token: ArrayLike) -> NDArray[np.float64]:
    """Return a draw in [0, 1) for token number `token` of each call: uint64[B] -> float64[B], broadcast, 53 bits."""
    a, b, _, _ = philox4x32((token, 0, 0, 0), (seeds & _LOW, seeds >> _32))
    return _unit(a, b)


def permutation(
    size: int, seed: int, epoch: int, stream: Stream = Stream.SHUFFLE, source: int = 0
) -> NDArray[np.int64]:
    """Return an epoch's shuffle of a source's `size` items, int64[size]. source: its number in a mixture."""
    high, low, _, _ = philox4x32(
        (np.arange(size, dtype=np.uint64), epoch, source, 0), (seed & 0xFFFFFFFF, (seed >> 32) ^ (int(stream) << 24))
    )
    return np.argsort((high << _32) | low, kind="stable").astype(np.int64)


def _unit(a: Words, b: Words) -> NDArray[np.float64]:
    return ((a >> np.uint64(5)) * np.uint64(1 << 26) + (b >> np.uint64(6))).astype(np.float64) * _TO_UNIT
