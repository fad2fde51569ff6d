"""summary.json: the result of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from treadle.orchestration.config import RunConfig
from treadle.orchestration.store.loop_state import LoopState


def run_summary(
    config: RunConfig,
    run: Path,
    state: LoopState,
    *,
    weights_sha256: str,
    stopped_early: bool,
    warm_start: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what summary.json holds; held-out figures are at `evaluation.temperature`, the greedy ones beside them."""
    sampled = [e for e in state.evaluations if e["temperature"] == config.evaluation.temperature]
    greedy = [e for e in state.evaluations if e["temperature"] == 0]

    def before(results: list[dict[str, Any]]) -> float | None:
        return next((e["success"] for e in results if e["update"] == 0), None)

    def after(results: list[dict[str, Any]]) -> float | None:
        return results[-1]["success"] if results and results[-1]["update"] > 0 and not stopped_early else None

    return {
        "run": str(run),
        "recipe": config.recipe,
        "seed": config.seed,
        "updates": state.update,
        "stopped_early": stopped_early,
        "held_out_success_before": before(sampled),
        "held_out_success_after": after(sampled),
        "held_out_greedy_before": before(greedy),
        "held_out_greedy_after": after(greedy),
        "held_out_tasks": sampled[0]["tasks"] if sampled else 0,
        "evaluations": list(state.evaluations),
        "warm_start": warm_start,
        "threads": torch.get_num_threads(),
        "wall_seconds": round(state.wall_seconds, 1),
        "cpu_seconds": round(state.cpu_seconds, 1),
        "weights_sha256": weights_sha256,
    }
