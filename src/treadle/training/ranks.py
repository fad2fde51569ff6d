"""`Ranks`: joint operations of the processes that train one model together. By default there is one.

Every rank gets the same groups and derives the same batch, advantages, trees and objective. It computes only its own
trees (`packing.layout.slots`). The objective sees the scores of all N tokens on every rank, so losses that couple
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
"""Fills a model's saved weights, on each rank its own part."""

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
        """Keep a part of each of the model's parameters on every rank. Gradients are then summed over ranks.

        half: gather parameters and compute everything in bfloat16; gradients are still summed in float32.
        The values come from the first rank: the others need none, and their model may be on the meta device. With
        `read`, which reads them, no rank needs any of the model's values before. Raises ConfigError for a model that
        computes something else afterwards.
        """

    def gather(self, parts: Sequence[TokenScores], like: Tensor) -> TokenScores:
        """Return the scores of all N tokens, in order, from the parts of all ranks, which contain each token once.

        like [N]: a tensor of the dtype and device of the result.
        """

    def add(self, number: float) -> float:
        """Return the sum of the ranks' numbers."""

    def every(self, work: Callable[[], Result]) -> list[Result]:
        """Return the result of `work` on each rank, by rank; one rank's error, if it is Treadle's, is raised on all."""

    def first(self, take: Callable[[Iterator[Item]], Result], items: Iterator[Item]) -> Result:
        """Have only the first rank process the items; return its result there, None elsewhere.

        The other ranks also iterate over the items, because gathering each of them takes all ranks. The first one's
        error, if it is Treadle's, is raised on all ranks.
        """


class OneRank:
    """The default: this process trains the whole model."""

    rank, size = 0, 1

    def shard(self, forward: Forward, half: bool = False, read: ReadWeights | None = None) -> None:
        if half:
            raise ConfigError(
                "training.precision 'bfloat16_pure' applies to weights gathered by several ranks; set "
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
