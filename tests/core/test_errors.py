"""Each error survives a process boundary."""

import pickle

import pytest

from treadle.core import errors
from treadle.core.errors import (
    Cause,
    ContextExceeded,
    FormError,
    InfrastructureError,
    StepsExceeded,
    TokensExceeded,
    TrajectoryFailure,
    TreadleError,
)

CLASSES = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TreadleError)}
MADE = [
    TrajectoryFailure(Cause.TIMEOUT, "no answer in 5 s"),
    InfrastructureError("search is down"),
    ContextExceeded(1025, 1024),
    FormError("tool_choice", "there are no tools"),
    StepsExceeded(8),
    TokensExceeded(9),
]
EXAMPLES = [*MADE, *(kind("runs/a is taken") for kind in sorted(CLASSES - set(map(type, MADE)), key=str))]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: TreadleError) -> None:
    error.add_note("while closing")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
