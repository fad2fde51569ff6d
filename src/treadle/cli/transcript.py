"""A recorded trajectory in readable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from treadle.core.errors import RunError
from treadle.core.types import Step
from treadle.orchestration.ledger import Ledger
from treadle.orchestration.rollout_store import read_steps


def load_trajectory(run: Path, trajectory_id: str) -> tuple[dict[str, Any], list[Step]]:
    """Its ledger row (with the task and split) and its steps. Raises RunError if it is not on record."""
    ledger = Ledger(run / "ledger.sqlite", read_only=True)
    rows = ledger.query(
        "SELECT t.*, g.task, g.split, g.shard FROM trajectories t JOIN groups g USING (group_id) WHERE trajectory_id = ?",
        trajectory_id,
    )
    some = ledger.query("SELECT trajectory_id FROM trajectories ORDER BY rowid DESC LIMIT 3")
    ledger.close()
    if not rows:
        raise RunError(f"no trajectory {trajectory_id!r} in {run}; for example {[r['trajectory_id'] for r in some]}")
    return rows[0], read_steps(run / "rollouts", rows[0]["shard"], trajectory_id)


def load_run_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer kept in the run's checkpoints. Raises RunError if there is none."""
    files = sorted(run.glob("checkpoints/step-*/tokenizer.json"))
    if not files:
        raise RunError(f"no checkpoint with a tokenizer under {run}")
    return Tokenizer.from_file(str(files[-1]))


def print_transcript(console: Console, run: Path, trajectory_id: str) -> None:
    """What the model read (dim) and wrote (bold), and how it ended."""
    row, steps = load_trajectory(run, trajectory_id)
    tokenizer = load_run_tokenizer(run)
    seen = 0
    text = Text()
    for step in steps:
        text.append(tokenizer.decode(step.prompt_ids[seen:].tolist(), skip_special_tokens=False), style="dim")
        text.append(tokenizer.decode(step.completion_ids.tolist(), skip_special_tokens=False), style="bold cyan")
        seen = len(step.full_ids)
    console.print(text, highlight=False, soft_wrap=True)
    how = row["failure_message"] or row["status"]
    console.print(
        f"reward {row['reward']}, {how}, {len(steps)} steps, task {row['task'][:0]}{row['trajectory_id']}",
        highlight=False,
    )
