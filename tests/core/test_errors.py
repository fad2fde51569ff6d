"""The hierarchy of errors, and that each of them survives a process boundary."""

import pickle

import pytest

from treadle.core import errors
from treadle.core.errors import (
    Cause,
    CheckpointError,
    ConfigError,
    ContextExceeded,
    DamageError,
    DataError,
    DownloadError,
    EngineEnded,
    EngineError,
    PlacementError,
    RankError,
    RemovedError,
    RunError,
    StepsExceeded,
    TrainingStopped,
    TrajectoryFailure,
    TreadleError,
    WorkerLost,
)

EXAMPLES: list[TreadleError] = [
    TreadleError("base"),
    ConfigError("steps = 0 must be >= 1"),
    DataError("row 3"),
    DownloadError("no such package"),
    EngineError("no token ids"),
    EngineEnded("engine 1 ended with code -9"),
    WorkerLost("rollout worker 2 is gone"),
    RunError("runs/a is taken"),
    CheckpointError("step-000040 holds another model"),
    DamageError("step-000040 is damaged"),
    RemovedError("step-000040 is gone"),
    PlacementError("engine 1 needs a GPU"),
    RankError("rank 1 ended with code -9"),
    TrainingStopped("every trajectory failed"),
    TrajectoryFailure(Cause.TIMEOUT, "no answer in 5 s"),
    ContextExceeded(1025, 1024),
    StepsExceeded(8),
]


def test_every_class_has_an_example() -> None:
    defined = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TreadleError)}
    assert {type(example) for example in EXAMPLES} == defined


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: TreadleError) -> None:
    error.add_note("while closing")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
