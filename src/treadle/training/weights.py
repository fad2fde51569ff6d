"""The three named sets of a model's weights (`treadle.core.trainer`).

They coincide here, where one process trains a whole model. An adapter's trained weights are a part of those that are
published, and of those that are saved; a shard's are gathered, one tensor after the other, by `published` and `saved`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from treadle.engines.weights import unique_weights


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of what the optimizer moves, in the module's own order; a tied one once."""
    return module.named_parameters()


def published(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, not copied, of what engines serve, in the order of names; a tied one under its first."""
    weights = unique_weights(module)
    return ((name, weights[name]) for name in sorted(weights))


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor, not copied, of what a checkpoint or an export holds; a tied one under its first name."""
    return unique_weights(module)
