"""One hierarchy of errors. Each message names the offending value and what to do about it.

Every class also derives from the standard library's nearest relative, so that callers who know nothing of
Treadle can still catch them sensibly, and every instance survives pickling.
"""

from __future__ import annotations

from enum import StrEnum


class TreadleError(Exception):
    """Is the base of everything Treadle raises on purpose."""


class ConfigError(TreadleError, ValueError):
    """Says that a configuration cannot work: unknown key, wrong type, impossible combination."""


class DataError(TreadleError, ValueError):
    """Says that a dataset, task, demonstration or record breaks its contract."""


class DownloadError(TreadleError, RuntimeError):
    """Says that a model could not be fetched: no network, no such package in the index, no pip."""


class EngineError(TreadleError, RuntimeError):
    """Says that the inference engine refused or failed a call."""


class EngineEnded(EngineError):
    """The process of an engine ended before it answered. The call may be made on another engine."""


class RunError(TreadleError, RuntimeError):
    """Says that a run directory cannot be used as requested: taken, missing, damaged, of another model."""


class DamageError(RunError):
    """Says that something on disk is not as it was written; it is not used."""


class RemovedError(RunError):
    """Says that a directory was removed while it was read: a run in progress removes its older checkpoints."""


class CheckpointError(RunError):
    """Says that a checkpoint could not be written or does not fit what it is loaded into."""


class PlacementError(TreadleError, RuntimeError):
    """Says that a cluster cannot give a run its processes: resources, versions, directories, or the cluster itself."""


class WorkerLost(PlacementError):
    """A process that answers calls ended before it answered. The call may be made again on the next one."""


class RankError(TreadleError, RuntimeError):
    """Says that a process of the learner failed, ended or did not answer; the message has its own error."""


class TrainingStopped(TreadleError, RuntimeError):
    """Is raised when a run ends itself because continuing would be pointless; the message names the cause."""


class Cause(StrEnum):
    """Names what is to blame for a failed trajectory."""

    AGENT = "agent"
    ENVIRONMENT = "environment"
    VERIFIER = "verifier"
    ENGINE = "engine"
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    CONTEXT = "context"


class TrajectoryFailure(TreadleError, RuntimeError):
    """Says that one attempt failed. It ends that trajectory, never the run; `cause` decides what happens next.

    traceback: of the user code that raised, as text. Raises DataError for a cause that is not a `Cause`.
    """

    def __init__(self, cause: Cause, message: str, traceback: str = "") -> None:
        super().__init__(cause, message, traceback)
        if cause not in list(Cause):
            known = ", ".join(Cause)
            raise DataError(f"a TrajectoryFailure has one of the causes {known}, got {cause!r:.100}")
        self.cause = Cause(cause)
        self.message = str(message).encode(errors="backslashreplace").decode()  # lone surrogates fit into no file
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"


class ContextExceeded(TreadleError, RuntimeError):
    """Says that the prompt as sent is longer than a limit: `rollout.max_input_tokens`, or the model's context.

    context: the model's, where it alone is the limit, which no setting can raise.
    """

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
    """Says that an agent program requested one call more than `max_steps`."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        self.max_steps = max_steps

    def __str__(self) -> str:
        return f"the attempt has made its {self.max_steps} calls; raise rollout.max_steps if it needs more"
