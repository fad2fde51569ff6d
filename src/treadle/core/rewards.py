"""`Reward`: the named components and token rewards of one step.

Shapes: C completion tokens of one step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError

PLAIN = "reward"
"""Component of plain numbers."""

TOKENS = "tokens"
"""Reserved component: the sum of the token rewards."""

LARGEST = 1e12
"""Largest magnitude of a reward: float32 holds the sums of such rewards, and of their squares, over any batch."""

NUMBER = f"finite number, at most {LARGEST:g} in size"
"""What a reward must be, for error messages."""

_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Reward:
    """The reward of one step: named components, and rewards of single completion tokens.

    components: `{"answer": 1.0, "page": 0.2}`, before weights. tokens float32[C], or None: added to the components,
    each at its own token, and never weighted.

    >>> Reward({"answer": 1.0, "page": 0.2}).total()
    1.2
    >>> Reward({"answer": 1.0, "page": 0.2}, tokens=np.array([0, -0.5], np.float32)).total({"page": 0.5})
    0.6

    Raises DataError for values, or a total, not finite or larger than `LARGEST`, and for the name `tokens`.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    tokens: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", _checked_components(self.components))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _checked_tokens(self.tokens))
        self.total()

    @classmethod
    def of(cls, value: object, name: str = PLAIN) -> Reward:
        """Return a Reward unchanged, a number as component `name`, 0 as none. Raises DataError for other values."""
        if isinstance(value, Reward):
            return value
        if not is_reward(value):
            raise DataError(f"a reward must be a {NUMBER}, or a Reward, got {value!r:.100}")
        return cls({name: cast(float, value)} if value else {})

    def __bool__(self) -> bool:
        return bool(self.components) or self.tokens is not None

    def __reduce__(self) -> tuple[type[Reward], tuple[Any, ...]]:
        """Copy and unpickle through the constructor: numpy would return a writeable array."""
        return Reward, (self.components, self.tokens)

    def total(self, weights: Mapping[str, float] = _NO_WEIGHTS) -> float:
        """Return the sum of components times weights (default 1.0) and token rewards. Raises as `reward_sum` does."""
        weighted = [weights.get(name, 1.0) * value for name, value in self.components.items()]
        return reward_sum([*weighted, self.token_sum])

    @property
    def token_sum(self) -> float:
        return 0.0 if self.tokens is None else math.fsum(self.tokens.tolist())

    @property
    def by_name(self) -> dict[str, float]:
        return {**self.components, **({} if self.tokens is None else {TOKENS: self.token_sum})}

    def plus(self, other: Reward) -> Reward:
        """Return the sum by name and by token. Raises DataError for an invalid sum or different lengths."""
        names = dict.fromkeys((*self.components, *other.components))
        components = {n: math.fsum([self.components.get(n, 0.0), other.components.get(n, 0.0)]) for n in names}
        if self.tokens is None or other.tokens is None:
            return Reward(components, other.tokens if self.tokens is None else self.tokens)
        if len(self.tokens) != len(other.tokens):
            raise DataError(f"rewards of {len(self.tokens)} and of {len(other.tokens)} tokens do not go together")
        return Reward(components, self.tokens + other.tokens)


def _checked_components(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise DataError(f"a reward's components must be numbers by name, got {value!r:.100}")
    for name, amount in value.items():
        if not isinstance(name, str) or not name or re.search("[\ud800-\udfff]", name):  # cannot be written to a file
            raise DataError(f"a component of a reward needs a name, got {name!r:.100}")
        if name == TOKENS:
            raise DataError(f"a component of a reward cannot be called {TOKENS!r}; that is the sum of its tokens")
        if not is_reward(amount):
            raise DataError(f"the component {name!r} of a reward must be a {NUMBER}, got {amount!r:.100}")
    return {name: float(amount) for name, amount in value.items()}


def _checked_tokens(value: object) -> NDArray[np.float32]:
    try:
        # Values beyond float32 become infinite, and are refused below.
        with np.errstate(over="ignore"):
            tokens = np.array(cast(Any, value), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"a reward's tokens must be numbers, one a token, got {value!r:.100}") from error
    if tokens.ndim != 1 or not (np.abs(tokens) <= LARGEST).all():
        raise DataError(f"a reward's tokens must be one {NUMBER}, for each token, got {value!r:.100}")
    tokens.flags.writeable = False
    return tokens


def reward_sum(values: Iterable[float]) -> float:
    """Return the sum of rewards. Raises DataError if it is not finite or beyond `LARGEST`."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):
        total = math.inf
    if not abs(total) <= LARGEST:
        raise DataError(f"rewards add up to {total}; the sum must be a {NUMBER}, too")
    return total


def is_reward(value: object) -> bool:
    return is_finite(value) and abs(cast(float, value)) <= LARGEST


def is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real | np.bool_) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
