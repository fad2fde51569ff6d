"""Playing held-out tasks with the weights that the engines serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from treadle.core.types import Task
from treadle.orchestration.config import RunConfig
from treadle.orchestration.loop.held_out import play_held_out
from treadle.orchestration.loop.schedule import pending_evaluations
from treadle.orchestration.reporting.metrics import evaluation_result
from treadle.orchestration.reporting.reporter import Reporter
from treadle.orchestration.stop_request import StopRequest
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.orchestration.store.run_store import RunStore
from treadle.rollout.attempt import RolloutRunner


class Evaluator:
    """The evaluations of a run."""

    def __init__(
        self, config: RunConfig, runner: RolloutRunner, tasks: Sequence[Task], store: RunStore, reporter: Reporter
    ) -> None:
        self._config, self._runner, self._tasks = config, runner, tasks
        self._store, self._reporter = store, reporter

    def pending(self, state: LoopState) -> list[float]:
        """Temperatures at which the current weights are still to be evaluated; none without held-out tasks."""
        return pending_evaluations(self._config, state) if self._tasks else []

    async def evaluate(self, state: LoopState, stop: StopRequest) -> LoopState:
        """Make the pending evaluations; return the state with their results.

        Those that a stop request comes before stay pending until the run is resumed.
        """
        section = self._config.evaluation
        for temperature in self.pending(state):
            name = self._name(state.update, temperature)
            self._reporter.begin("evaluation", len(self._tasks) * section.attempts_at(temperature))
            playing = play_held_out(
                self._runner,
                self._tasks,
                name=name,
                seed=self._config.seed,
                epoch=state.update,
                temperature=temperature,
                config=section,
                side_by_side=self._config.evaluated_together,
                on_trajectory=lambda: self._reporter.advance("evaluation"),
            )
            with self._reporter.timed("evaluation", state.update):
                groups = await stop.unless_requested(playing)
            if groups is None:
                return state
            self._store.record_evaluation(name, groups, state.version)
            result = evaluation_result(
                groups, state.update, temperature, section.success_at, self._config.data.table_by, section.success_of
            )
            self._reporter.callbacks.evaluate(result)
            state = replace(state, evaluations=(*state.evaluations, asdict(result)))
        return state

    def _name(self, update: int, temperature: float) -> str:
        """Prefix of group ids, new each time an evaluation is repeated."""
        name = f"e{update:06d}" + ("g" if temperature == 0 else "")
        times = self._store.ledger.times_evaluated(name)
        return f"{name}r{times}" if times else name
