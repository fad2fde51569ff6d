"""A recorded trajectory in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from treadle.core.errors import RunError
from treadle.core.types import Ids, Step
from treadle.orchestration.ledger import Ledger
from treadle.orchestration.rollout_store import read_steps
from treadle.orchestration.run_directory import RunDirectory


def load_trajectory(run: Path, trajectory_id: str) -> tuple[dict[str, Any], list[Step]]:
    """Its ledger row (with the task and split) and its steps. Raises RunError if it is not on record."""
    ledger = Ledger(run / "ledger.sqlite", read_only=True)
    rows = ledger.query(
        "SELECT t.*, g.task, g.split, g.shard FROM trajectories t JOIN groups g USING (group_id) "
        "WHERE trajectory_id = ?",
        trajectory_id,
    )
    some = ledger.query("SELECT trajectory_id FROM trajectories ORDER BY rowid DESC LIMIT 3")
    ledger.close()
    if not rows:
        known = ", ".join(row["trajectory_id"] for row in some) or "none yet"
        raise RunError(f"no trajectory {trajectory_id!r} in {run}; it has for example {known} (treadle show {run})")
    if not (run / "rollouts" / rows[0]["shard"]).is_file():
        raise RunError(f"the tokens of {trajectory_id} were in {run / 'rollouts' / rows[0]['shard']}, which is gone")
    return rows[0], read_steps(run / "rollouts", rows[0]["shard"], trajectory_id)


def load_run_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer kept in the run's checkpoints, before the first one the configured one. Raises TreadleError."""
    files = sorted(run.glob("checkpoints/step-*/tokenizer.json"))
    if not files:
        from treadle.training.model import tokenizer_directory  # torch

        files = [tokenizer_directory(RunDirectory.open(run).config().model) / "tokenizer.json"]
    return Tokenizer.from_file(str(files[-1]))


def known_tokens(steps: Sequence[Step], number: int) -> tuple[int, int | None]:
    """How many tokens of a step's prompt an earlier step held, and which one held most of them (None for none).

    A step that continues another one knows all of its tokens; one that forked off knows what the two share.
    """
    best, holder = 0, None
    for earlier in reversed(range(number)):
        shared = _common_prefix(steps[number].prompt_ids, steps[earlier].full_ids)
        if shared > best:
            best, holder = shared, earlier
        if holder == number - 1 and best == len(steps[earlier].full_ids):
            break  # the usual case: nothing before it can share more
    return best, holder


def _common_prefix(a: Ids, b: Ids) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def ending(row: dict[str, Any]) -> str:
    """`reward 1, done`, or `no reward, failed: environment: step raised ...`."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    failure = f": {row['failure_cause']}: {row['failure_message']}" if row["failure_cause"] else ""
    return f"{reward}, {row['status']}{failure}"


def print_transcript(console: Console, run: Path, trajectory_id: str) -> None:
    """What the model read (dim) and wrote (bold), and how it ended."""
    row, steps = load_trajectory(run, trajectory_id)
    tokenizer = load_run_tokenizer(run)
    text = Text()
    for number, step in enumerate(steps):
        new = step.prompt_ids[known_tokens(steps, number)[0] :]
        text.append(tokenizer.decode(new.tolist(), skip_special_tokens=False), style="dim")
        text.append(tokenizer.decode(step.completion_ids.tolist(), skip_special_tokens=False), style="bold cyan")
    console.print(text, soft_wrap=True)
    console.print(f"-> {ending(row)}, {len(steps)} step{'s' if len(steps) != 1 else ''}", style="bold", soft_wrap=True)
