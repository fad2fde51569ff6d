"""Playing held-out tasks; the evaluations of a run, with its engines' current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.core.draws import Stream
from treadle.core.stop import StopRequest
from treadle.core.types import Group, Trajectory
from treadle.loop.config import LoopPlan
from treadle.loop.failures import FailuresConfig, has_not_failed, reward_together
from treadle.loop.stopping import check_evaluation
from treadle.record.ledger_reader import LoopState
from treadle.report.metrics import EvaluationResult, evaluation_result
from treadle.rollout.attempt import RolloutRunner
from treadle.rollout.rewards import RewardShaper
from treadle.rollout.session import Address

if TYPE_CHECKING:
    from treadle.record.run_store import RunStore
    from treadle.report.reporter import Reporter


async def play_held_out(
    runner: RolloutRunner,
    plan: LoopPlan,
    *,
    name: str,
    update: int,
    temperature: float,
    on_trajectory: Callable[[], None],
    shaper: RewardShaper,
) -> list[Group]:
    """Play `evaluation.attempts` at each held-out task, in fixed concurrent cohorts, so that batches repeat.

    Failed attempts are handled as in training: `failures.causes`.

    name: prefix of group ids. update: keys the draws together with the seed. on_trajectory: called for each attempt
    that is not retried. shaper: applies group rewards.
    """
    section, tasks, groups = plan.evaluation, plan.held_out, list[Group]()
    attempts, sampling = section.attempts_at(temperature), section.sampling(runner.sampling, temperature)
    retry_delay = partial(_retry_delay, plan.failures, attempts)

    def ended(attempt: asyncio.Future[Trajectory]) -> None:
        if not attempt.cancelled() and attempt.exception() is None and retry_delay(attempt.result()) is None:
            on_trajectory()

    def play(group: Group, numbers: Sequence[int]) -> list[asyncio.Future[Trajectory]]:
        addresses = [Address(plan.seed, Stream.EVALUATE, update, group.position, number) for number in numbers]
        started = runner.start(group.group_id, group.task, addresses, sampling)
        for attempt in started:
            attempt.add_done_callback(ended)
        return started

    cohort = max(1, plan.evaluated_together // attempts)
    for start in range(0, len(tasks), cohort):
        places = enumerate(tasks[start : start + cohort], start)
        together = [Group(f"{name}-{place:04d}", place, update, place, task, ()) for place, task in places]
        played = await _played(together, attempts, play, retry_delay)
        groups += await asyncio.gather(*(_rewarded(shaper, group, plan.failures, retry_delay) for group in played))
    return groups


def _retry_delay(failures: FailuresConfig, attempts: int, trajectory: Trajectory) -> float | None:
    """Return the seconds before this attempt is retried; None if it is not. attempts: number per task."""
    return failures.retry_delay(trajectory, trajectory.attempt // attempts + 1)


async def _played(
    groups: list[Group],
    attempts: int,
    play: Callable[[Group, Sequence[int]], list[asyncio.Future[Trajectory]]],
    retry_delay: Callable[[Trajectory], float | None],
) -> list[Group]:
    """Play attempts of all groups and, once all have ended, retry failed ones together, until none is left."""
    missing = [list(range(attempts)) for _ in groups]
    while any(missing):
        running = [play(group, own) if own else [] for group, own in zip(groups, missing, strict=True)]
        ended = await asyncio.gather(*(asyncio.gather(*own) for own in running))
        groups = [replace(g, trajectories=(*g.trajectories, *own)) for g, own in zip(groups, ended, strict=True)]
        missing = [[t.attempt + attempts for t in own if retry_delay(t) is not None] for own in ended]
        if any(missing):
            await asyncio.sleep(max(retry_delay(t) or 0.0 for own in ended for t in own))
    return groups


async def _rewarded(
    shaper: RewardShaper, group: Group, failures: FailuresConfig, retry_delay: Callable[[Trajectory], float | None]
) -> Group:
    """Apply `rewards.group` and `failures.causes` to the group's attempts, in order."""
    last = [failures.final(t) if retry_delay(t) is None else t for t in group.trajectories]
    reward = partial(shaper.reward_group, group.task, group.group_id)
    rewarded = await reward_together([t for t in last if has_not_failed(t)], reward, failures)
    by_attempt = {t.attempt: t for t in (*last, *rewarded)}
    return replace(group, trajectories=tuple(by_attempt[number] for number in sorted(by_attempt)))


def pending_evaluations(plan: LoopPlan, state: LoopState) -> list[float]:
    """Return the temperatures at which the current weights still need an evaluation."""
    section, ends = plan.evaluation, state.update == 0 or plan.is_last(state.update)
    if not (ends or plan.is_due(state.update, section.every)):
        return []
    greedy = [0.0] if ends and section.greedy_too and section.temperature > 0 else []
    made = [row["temperature"] for row in state.evaluations if row["update"] == state.update]
    return [temperature for temperature in (section.temperature, *greedy) if temperature not in made]


class Evaluator:
    """The evaluations of a run."""

    def __init__(
        self, plan: LoopPlan, runner: RolloutRunner, store: RunStore, reporter: Reporter, shaper: RewardShaper
    ) -> None:
        self._plan, self._runner, self._shaper = plan, runner, shaper
        self._store, self._reporter = store, reporter

    def pending(self, state: LoopState) -> list[float]:
        """Return the temperatures at which the current weights still need an evaluation; none without tasks."""
        return pending_evaluations(self._plan, state) if self._plan.held_out else []

    async def evaluate(self, state: LoopState, stop: StopRequest) -> LoopState:
        """Make the pending evaluations; return the state with their results.

        Evaluations preempted by a stop request stay pending until the run is resumed, as does one with only failed
        attempts: StopConditionMet.
        """
        plan, update, reporter = self._plan, state.update, self._reporter
        for temperature in self.pending(state):
            name = f"e{update:06d}" + ("g" if temperature == 0 else "")
            if times := self._store.ledger.times_evaluated(name):
                name += f"r{times}"
            reporter.begin("evaluation", len(plan.held_out) * plan.evaluation.attempts_at(temperature))
            playing = play_held_out(
                self._runner,
                plan,
                name=name,
                update=update,
                temperature=temperature,
                on_trajectory=lambda: reporter.advance("evaluation"),
                shaper=self._shaper,
            )
            with reporter.timed("evaluation", update):
                groups = await stop.unless_requested(playing)
            if groups is None:
                return state
            self._store.record_evaluation(name, groups, state.version)
            check_evaluation(groups, plan)
            result = result_of(plan, groups, update, temperature)
            reporter.callbacks.evaluate(result)
            state = replace(state, evaluations=(*state.evaluations, asdict(result)))
        return state


def result_of(plan: LoopPlan, groups: Sequence[Group], update: int, temperature: float) -> EvaluationResult:
    """Return success and rewards of the evaluated groups, by the configuration's settings."""
    section, attempts = plan.evaluation, plan.evaluation.attempts_at(temperature)
    of_success = section.success_at, plan.table_by, section.success_of
    return evaluation_result(groups, attempts, update, temperature, *of_success)
