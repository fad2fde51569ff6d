"""`Record`: a run on disk as everybody but the run itself reads it.

report, show, plot, view, export-traces, sft --from  ->  Record  ->  ledger, shards, traces, logs, tokenizer
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from treadle.core.errors import DataError, RunError
from treadle.core.files import read_proven
from treadle.core.trainer import StepTrace
from treadle.core.types import Step
from treadle.models.config import ModelConfig
from treadle.models.model_files import tokenizer_directory
from treadle.packing.compactions import RecordedCall
from treadle.record.checkpoint_retention import read_checkpoint
from treadle.record.ledger_reader import LedgerReader, trace_file
from treadle.record.recorded import AS_TEXT, RecordedTrajectory, trajectory_on_record, vocabulary_sha256
from treadle.record.rollout_store import read_call_times, read_calls, read_shard, read_steps, read_traces, task_of
from treadle.record.run_directory import RunDirectory
from treadle.rendering.texts import MessageTexts, TokenTexts

_SHARDS = 8  # number kept in memory while trajectories are read in order of groups


class Record:
    """A run, finished or in progress, opened read-only. directory: its files and logs. ledger: its counts and states.

    shard: name in the ledger's rows. All methods raise RunError, DamageError for what is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, RunDirectory(path)
        self.ledger = LedgerReader(self.directory.ledger_file)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a run. Raises RunError, with the remedy, if there is none, or if it has recorded nothing."""
        RunDirectory.open(path).ledger()
        return cls(path)

    def trajectory(self, trajectory_id: str) -> tuple[dict[str, Any], list[Step]]:
        """Return a trajectory's row of the ledger, with task, split and trained_version, and its steps."""
        row = self.ledger.trajectory(trajectory_id)
        if row is None:
            examples = ", ".join(newest["trajectory_id"] for newest in self.ledger.newest(3)) or "none yet"
            known = f"it has for example {examples} (treadle show {self.path})"
            raise RunError(f"no trajectory {trajectory_id!r} in {self.path}; {known}")
        return row, self.steps(row["shard"], trajectory_id)

    def trajectories(self) -> Iterator[RecordedTrajectory]:
        """Read all trajectories, training first, in the order of groups. Resampled ones appear once."""
        self.ledger.prove()
        vocabulary = AS_TEXT if self.directory.is_text else vocabulary_sha256(self.tokenizer())
        read = lru_cache(_SHARDS)(self.shard)
        for row in self.ledger.sampled_once():
            task = task_of(row["task"], self.directory.rollouts)
            steps = read(row["shard"]).get(row["trajectory_id"], [])
            trajectory = trajectory_on_record(row, task.task_id, steps)
            yield RecordedTrajectory(str(self.path), row["split"], row["group_id"], task, trajectory, vocabulary)

    def steps(self, shard: str, trajectory_id: str) -> list[Step]:
        return read_steps(self.directory.rollouts, self.ledger.shard(shard), trajectory_id)

    def shard(self, shard: str) -> dict[str, list[Step]]:
        """Return all steps of a shard by trajectory_id."""
        return read_shard(self.directory.rollouts, self.ledger.shard(shard))

    def calls(self, shard: str) -> dict[str, list[RecordedCall]]:
        """Return the ids of all calls of a shard by trajectory_id, without those of text alone."""
        return read_calls(self.directory.rollouts, self.ledger.shard(shard))

    def call_times(self, shard: str) -> list[dict[str, Any]]:
        """Return trajectory_id, step, started, waited and seconds of each call of a shard."""
        return read_call_times(self.directory.rollouts, self.ledger.shard(shard))

    def traces(self, trajectory_id: str, version: int | None) -> list[StepTrace]:
        """Return the traces of a trajectory, in order of updates; [] if it is not traced, or not trained yet.

        version: policy version that trained it.
        """
        file = None if version is None else self.ledger.traces().get(trace_file(version))
        traces = [] if file is None else read_traces(self.directory.traces, file, trajectory_id)
        return sorted(traces, key=lambda trace: trace.update)

    def tokenizer(self) -> Tokenizer:
        """Return the run's own tokenizer, or the latest checkpoint's, or the configured one. Raises TreadleError."""
        directory, latest = self.directory, self.ledger.latest_checkpoint()
        if directory.tokenizer_file.is_file():
            source, sha256 = self.path, self.ledger.file_sha256(directory.tokenizer_file.name)
            content = read_proven(directory.tokenizer_file, sha256 or "", "restore it from a copy")
        elif latest is not None and (directory.checkpoints / latest[0]).is_dir():
            checkpoint, content = read_checkpoint(self.path, "latest", lambda each: each.read("tokenizer.json"))
            source = checkpoint.directory
        else:
            source = tokenizer_directory(ModelConfig.model_validate(directory.config_data()["model"]))
            content = (source / "tokenizer.json").read_bytes()
        try:
            return Tokenizer.from_buffer(content)
        except Exception as error:
            # The library raises no narrower class.
            raise DataError(f"the tokenizer in {str(source)!r} cannot be read: {error}") from error

    def texts(self) -> TokenTexts:
        """Return the texts of the run's tokens, or of its messages if it is text. Raises TreadleError."""
        return MessageTexts() if self.directory.is_text else TokenTexts(self.tokenizer())
