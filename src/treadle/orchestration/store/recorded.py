"""A recorded trajectory as it is read again: its row in the ledger, its steps, and how they relate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from treadle.core.errors import DataError, RunError
from treadle.core.trainer import StepTrace
from treadle.core.types import Step
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.store.checkpoint_retention import read_checkpoint
from treadle.orchestration.store.rollout_store import read_steps
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.orchestration.store.trace_store import read_traces
from treadle.packing.breaks import Decode, Relation, relations
from treadle.packing.flat import PackedCall


def load_trajectory(run: Path, trajectory_id: str) -> tuple[dict[str, Any], list[Step]]:
    """A trajectory's ledger row (with task and split) and its steps. Raises RunError if it is not on record."""
    ledger = RunDirectory(run).ledger()
    ledger.prove("groups", "trajectories")
    row = ledger.trajectory(trajectory_id)
    if row is None:
        examples = ", ".join(newest["trajectory_id"] for newest in ledger.newest(3)) or "none yet"
        raise RunError(f"no trajectory {trajectory_id!r} in {run}; it has for example {examples} (treadle show {run})")
    return row, read_steps(run / "rollouts", ledger.shard(row["shard"]), trajectory_id)


def load_traces(run: Path, trajectory_id: str) -> list[StepTrace]:
    """Traces of a trajectory, in order; [] if it is not traced, or not trained yet. Raises DamageError."""
    ledger = RunDirectory(run).ledger()
    row = ledger.trajectory(trajectory_id)
    file = ledger.traces_of(row["trained_version"]) if row else None
    return [] if file is None else read_traces(run / "traces", file, trajectory_id)


def load_run_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer of the run's latest checkpoint, or else the configured one. Raises TreadleError."""
    directory, latest = RunDirectory.open(run), RunDirectory(run).latest_checkpoint()
    if latest is not None and (directory.checkpoints / latest).is_dir():
        checkpoint, content = read_checkpoint(run, "latest", lambda checkpoint: checkpoint.read("tokenizer.json"))
        source = checkpoint.directory
    else:
        source = tokenizer_directory(directory.config().model)
        content = (source / "tokenizer.json").read_bytes()
    return parse_tokenizer(content, source)


def parse_tokenizer(content: bytes, source: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. source: its directory, for errors. Raises DataError."""
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"the tokenizer in {str(source)!r} cannot be read: {error}") from error


def decoder(tokenizer: Tokenizer) -> Decode:
    """A function from ids to text, special tokens included."""
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def step_relations(steps: Sequence[Step], decode: Decode) -> list[Relation]:
    """How each step of a trajectory relates to the earlier ones."""
    calls = [PackedCall(step.full_ids, len(step.prompt_ids), first=0) for step in steps]
    return relations(calls, decode, [step.break_cause for step in steps])
