"""`Ranks`: what the processes that train one model together do as one. By default there is one.

Every rank gets the same groups and makes the same batch, advantages, trees and objective of them. It computes its own
trees only (`packing.slots`). Since the objective sees the scores of all N tokens on every rank, losses that couple
tokens, corrections, KL control, refusals and metrics need no version for several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError
from treadle.training.forward import Forward
from treadle.training.objective import TokenScores, concat

ReadWeights = Callable[[PreTrainedModel], None]
"""Fills a model's saved weights, of which each rank has its part."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ranks(Protocol):
    """Joins this process, number `rank` of `size`, with the others that train the same model.

    Every method is a collective: all ranks call the same ones, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def shard(self, forward: Forward, half: bool = False, read: ReadWeights | None = None) -> None:
        """Keep a part of each of the model's parameters on every rank. Gradients then add up over ranks.

        half: parameters are gathered in bfloat16, and all is computed in it; gradients still add up in float32.
        The values are the first rank's: the others need not have any, their model may be on the meta device. With
        `read`, which reads them, no rank has any of the model's before.
        Raises ConfigError for a model that computes otherwise afterwards.
        """

    def gather(self, parts: Sequence[TokenScores], like: Tensor) -> TokenScores:
        """Return the scores of all N tokens, in order, from the parts of all ranks, which hold each token once.

        like [N]: a tensor of the dtype and device of the result.
        """

    def add(self, number: float) -> float:
        """Return the sum of the ranks' numbers."""

    def every(self, work: Callable[[], Result]) -> list[Result]:
        """Return what `work` returns on each rank, by rank; all raise the error that one raises, if it is Treadle's."""

    def first(self, take: Callable[[Iterator[Item]], Result], items: Iterator[Item]) -> Result:
        """Have the first rank alone do something with the items, and return what it returns there; None elsewhere.

        The other ranks go through the items, too, since all gather each of them. All ranks raise the error that it
        raises, where that is one of Treadle's.
        """


class OneRank:
    """The default: this process trains the whole model."""

    rank, size = 0, 1

    def shard(self, forward: Forward, half: bool = False, read: ReadWeights | None = None) -> None:
        if half:
            raise ConfigError(
                "training.precision 'bfloat16_pure' is of weights that several ranks gather; set "
                "placement.learner.ranks to 2 or more, or training.precision to bfloat16"
            )

    def gather(self, parts: Sequence[TokenScores], like: Tensor) -> TokenScores:
        return concat(parts, like)

    def add(self, number: float) -> float:
        return number

    def every(self, work: Callable[[], Result]) -> list[Result]:
        return [work()]

    def first(self, take: Callable[[Iterator[Item]], Result], items: Iterator[Item]) -> Result:
        return take(items)
