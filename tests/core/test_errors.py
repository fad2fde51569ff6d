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
    EngineError,
    PlacementError,
    RankError,
    RemovedError,
    RunError,
    StepsExceeded,
    TrainingStopped,
    TrajectoryFailure,
    TreadleError,
)

EXAMPLES: list[TreadleError] = [
    TreadleError("base"),
    ConfigError("steps = 0 must be >= 1"),
    DataError("row 3"),
    DownloadError("no such package"),
    EngineError("no token ids"),
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


@pytest.mark.parametrize("error", EXAMPLES[1:], ids=lambda error: type(error).__name__)
def test_errors_are_also_the_standard_librarys(error: TreadleError) -> None:
    expected = ValueError if isinstance(error, ConfigError | DataError) else RuntimeError
    assert isinstance(error, expected)


def test_a_damaged_checkpoint_is_a_run_that_cannot_be_used() -> None:
    assert issubclass(CheckpointError, RunError)


def test_a_failure_says_who_is_to_blame() -> None:
    failure = TrajectoryFailure(Cause.VERIFIER, "exit code 1")
    assert (failure.cause, failure.message) == (Cause.VERIFIER, "exit code 1")
    assert str(failure) == "verifier: exit code 1"


def test_an_exceeded_context_names_both_lengths_and_the_fix() -> None:
    error = ContextExceeded(1025, 1024)
    assert (error.prompt_tokens, error.max_input_tokens) == (1025, 1024)
    for part in ("1025", "1024", "rollout.max_input_tokens"):
        assert part in str(error)
