"""One hierarchy of errors. Each message names the offending value and the remedy.

Every class also derives from the nearest standard exception, so that callers unaware of Treadle can catch it
sensibly. All instances survive pickling.
"""

from __future__ import annotations

from enum import StrEnum


class TreadleError(Exception):
    """Base class of Treadle's errors."""


class ConfigError(TreadleError, ValueError):
    """Raised for a configuration that cannot work: unknown key, wrong type, impossible combination."""


class DataError(TreadleError, ValueError):
    """Raised for an invalid data set, task, demonstration or record."""


class FormError(DataError):
    """Raised for a form, schema or choice of tools that replies cannot follow. where: the place in what was asked."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where

    def __str__(self) -> str:
        return ": ".join(self.args)


class DownloadError(TreadleError, RuntimeError):
    """Raised if a model cannot be downloaded: no network, no such package in the index, no pip."""


class EngineError(TreadleError, RuntimeError):
    """Raised if the inference engine refuses or fails a call."""


class EngineEnded(EngineError):
    """Raised if an engine's process ended before it answered. The call may be repeated on another engine."""


class RunError(TreadleError, RuntimeError):
    """Raised for an unusable run directory: locked by another run, missing, damaged, or made with another model."""


class DamageError(RunError):
    """Raised for a file that fails its checksum or cannot be parsed."""


class RemovedError(RunError):
    """Raised if a directory is removed while it is read: a live run removes its older checkpoints."""


class CheckpointError(RunError):
    """Raised for a checkpoint that cannot be written, or does not fit the model it is loaded into."""


class PlacementError(TreadleError, RuntimeError):
    """Raised if a cluster cannot run the processes: resources, versions, directories, or the cluster itself."""


class WorkerLost(PlacementError):
    """Raised if a worker process ended before it answered. The call may be repeated on the next worker."""


class RankError(TreadleError, RuntimeError):
    """Raised if a process of the learner fails, ends or does not answer; the message includes its error."""


class TrainingStopped(TreadleError, RuntimeError):
    """Raised when a run ends early because continuing would be pointless; the message names the cause."""


class Cause(StrEnum):
    """Party to blame for a failed trajectory."""

    AGENT = "agent"
    ENVIRONMENT = "environment"
    VERIFIER = "verifier"
    ENGINE = "engine"
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    CONTEXT = "context"


class TrajectoryFailure(TreadleError, RuntimeError):
    """Raised when one attempt fails. Ends that trajectory, never the run. traceback: stack of the user's code."""

    def __init__(self, cause: Cause, message: str, traceback: str = "") -> None:
        super().__init__(cause, message, traceback)
        if cause not in list(Cause):
            causes = ", ".join(Cause)
            raise DataError(f"a TrajectoryFailure has one of the causes {causes}, got {cause!r:.100}")
        self.cause = Cause(cause)
        # Lone surrogates cannot be written to a file.
        self.message = str(message).encode(errors="backslashreplace").decode()
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"


class InfrastructureError(TrajectoryFailure):
    """Raised by user code when a dependency is down: `raise treadle.InfrastructureError("the search server is down")`.

    The attempt fails with cause infrastructure and gets no reward, as neither policy nor task is to blame. Tools,
    environments, reward functions and agents may raise it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Cause.INFRASTRUCTURE, message)
        # Unpickling calls the constructor with `args`.
        self.args = (message,)


def failure_in(error: BaseException) -> TrajectoryFailure | None:
    """Return the error if it is a TrajectoryFailure, or the first one in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(failure_in, error.exceptions)), None)
    return error if isinstance(error, TrajectoryFailure) else None


class ContextExceeded(TreadleError, RuntimeError):
    """Raised for a prompt longer than `rollout.max_input_tokens`, or than the model's `context` if one is given."""

    def __init__(self, prompt_tokens: int, max_input_tokens: int, context: int | None = None) -> None:
        super().__init__(prompt_tokens, max_input_tokens, context)
        self.prompt_tokens = prompt_tokens
        self.max_input_tokens = max_input_tokens
        self.context = context

    def __str__(self) -> str:
        tokens = f"the prompt has {self.prompt_tokens} tokens"
        if self.context is not None:
            return f"{tokens}, the model's context is {self.context}; shorten the prompt"
        return (
            f"{tokens}, max_input_tokens is {self.max_input_tokens}; "
            "raise rollout.max_input_tokens or shorten the prompt"
        )


class StepsExceeded(TreadleError, RuntimeError):
    """Raised when an agent program makes more than `max_steps` calls."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        self.max_steps = max_steps

    def __str__(self) -> str:
        return f"the attempt has made its {self.max_steps} calls; raise rollout.max_steps if it needs more"


class TokensExceeded(StepsExceeded):
    """Raised for a call of an attempt that has used up its `max_total_tokens`."""

    def __init__(self, max_total_tokens: int) -> None:
        super().__init__(max_total_tokens)
        self.max_total_tokens = max_total_tokens

    def __str__(self) -> str:
        return f"the attempt has used its {self.max_total_tokens} tokens; raise rollout.max_total_tokens for more"
