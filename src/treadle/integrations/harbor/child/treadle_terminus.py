"""`DeferredTerminus2`: Harbor's Terminus-2, but it writes its trajectory once, at the end and without token ids.

Stock Terminus-2 rewrites `trajectory.json`, including token ids, after every turn and on the event loop: a trial of 33
turns spends ten times as much time on that as on everything else. Prompts, parsing and the loop are Harbor's own, and
the ids are in `rollout_details`, which is not touched here. No import of Treadle.
"""

from typing import Any

from harbor.agents.terminus_2 import Terminus2


class DeferredTerminus2(Terminus2):
    """Plays as Terminus-2 does. With a Harbor whose Terminus-2 lacks these methods it also plays, but more slowly."""

    _is_in_loop = False

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._is_in_loop = True
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        finally:
            self._is_in_loop = False

    def _dump_trajectory(self) -> None:
        if self._is_in_loop:
            return
        for metrics in (step.metrics for step in self._trajectory_steps if step.metrics is not None):
            metrics.prompt_token_ids = metrics.completion_token_ids = metrics.logprobs = None
        super()._dump_trajectory()
