"""A recorded trajectory in readable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.cli.console import Console, Part
from treadle.orchestration.store.recorded import decoder, load_run_tokenizer, load_trajectory, step_relations


def ending(row: dict[str, Any]) -> str:
    """Return `reward 1, done`, or `no reward, failed: environment: step raised ...`."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    failure = f": {row['failure_cause']}: {row['failure_message']}" if row["failure_cause"] else ""
    return f"{reward}, {row['status']}{failure}"


def print_transcript(console: Console, run: Path, trajectory_id: str) -> None:
    """Print what the model read (dim) and wrote (bold), and how the trajectory ended."""
    row, steps = load_trajectory(run, trajectory_id)
    decode = decoder(load_run_tokenizer(run))
    parts: list[Part] = []
    for step, relation in zip(steps, step_relations(steps, decode), strict=True):
        parts += [(decode(step.prompt_ids[relation.shared :]), "dim"), (decode(step.completion_ids), "bold cyan")]
    console.text(*parts)
    console.line(f"-> {ending(row)}, {len(steps)} step{'s' if len(steps) != 1 else ''}", style="bold")
