"""What is due when: pure functions of the configuration and the loop's state."""

from __future__ import annotations

from treadle.orchestration.config import RunConfig
from treadle.orchestration.store.checkpoint_retention import best_update
from treadle.orchestration.store.ledger_reader import LoopState


def is_last(config: RunConfig, state: LoopState) -> bool:
    """Whether all updates are made."""
    return state.update >= config.orchestration.updates


def is_due(config: RunConfig, state: LoopState, every: int | None) -> bool:
    """Whether the last batch reached a multiple of `every` updates; never for 0 and None."""
    return bool(every) and state.update % (every or 1) < config.training.updates_between_publications


def pending_evaluations(config: RunConfig, state: LoopState) -> list[float]:
    """Temperatures at which the current weights are to be evaluated and have not been yet."""
    section, ends = config.evaluation, state.update == 0 or is_last(config, state)
    if not (ends or is_due(config, state, section.every)):
        return []
    greedy = [0.0] if ends and section.greedy_too and section.temperature > 0 else []
    made = [row["temperature"] for row in state.evaluations if row["update"] == state.update]
    return [temperature for temperature in (section.temperature, *greedy) if temperature not in made]


def checkpoint_is_due(config: RunConfig, state: LoopState) -> bool:
    """Whether to save: at multiples of `checkpoint_every` and `keep_every`, and after the best evaluation."""
    section = config.orchestration
    if is_due(config, state, section.checkpoint_every) or is_due(config, state, section.keep_every):
        return True
    best = section.keep_best and best_update(state.evaluations, section.keep_best, config.evaluation.temperature)
    return best == state.update
