"""`HarborDriver`: plays Harbor's tasks as trials, in processes of Harbor's own Python.

place -> run -> WorkerPool.call -> TrialReport -> judge -> Graded
                       ^
                       | stop: one call too many;  cancel: the engine failed
                AgentSession.errors -------'
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from treadle.core.errors import ConfigError, ContextExceeded, DataError, EngineError, StepsExceeded, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, measured
from treadle.core.outcomes import was_played
from treadle.core.types import Step, Task
from treadle.integrations.harbor.config import HarborConfig, harbor_program
from treadle.integrations.harbor.outcomes import AGENT, VERIFIER, TrialReport, Verdict, judge
from treadle.rollout.drivers.driver import DriverSetup
from treadle.rollout.drivers.gateway import AgentSession, CallError, GatewayDriver, Graded
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode
from treadle.workers.foreign import WorkerPool

_METRICS = {
    "timed_out": ("share", "trials whose agent took too long"),
    "context_exceeded": ("share", "trials that ended at a full context"),
    "stopped": ("share", "trials stopped at rollout.max_steps, and verified"),
    "errored": ("share", "trials in which Harbor noted an exception"),
    "summaries": ("summaries", "summaries that the agent made of its context"),
    "start_seconds": ("s", "starting the sandbox and setting up the agent"),
    "agent_seconds": ("s", "the agent's part"),
    "verifier_seconds": ("s", "the verifier's part"),
    "calls_unreported": ("calls", "recorded calls that the agent's own record lacks (cut off, lost)"),
    "calls_misreported": ("calls", "calls of the agent's own record that were not recorded so"),
}
"""Name -> unit and help, all means over trials."""

_MISREPORTED = "the agent's own record (rollout_details) holds calls with other tokens than the gateway recorded"


class HarborDriver(GatewayDriver):
    """Plays tasks with a directory, `extras: {path: ...}`, as Harbor trials.

    Invariant: training uses the gateway's record. The agent's own record is only compared with it.
    """

    may_wait: ClassVar[bool] = True  # for a slot, and for its turn to begin
    replayable: ClassVar[bool] = False  # external effects of its sandboxes are not undone
    options_type = HarborConfig

    def __init__(self, setup: DriverSetup, options: HarborConfig) -> None:
        super().__init__(setup)
        self._harbor = options
        self._directory = options.directory or (setup.directory and setup.directory / "trials")
        self._pool = WorkerPool(harbor_program(options.python), options.worker)
        self._places = asyncio.Semaphore(options.concurrency)
        self._opened, self._next_start, self._names = AsyncExitStack(), 0.0, ""

    async def __aenter__(self) -> Self:
        """Start the worker processes. Raises ConfigError if a program or Harbor itself is missing."""
        check_programs(self._harbor)
        await super().__aenter__()
        async with AsyncExitStack() as opened:
            if self._directory is None:
                self._directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="treadle-trials-")))
            self._directory = self._directory.absolute()
            self._directory.mkdir(parents=True, exist_ok=True)
            self._names = run_names(self._setup.directory or self._directory)
            await opened.enter_async_context(self._pool)
            await self._remove_sandboxes(self._names)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel trials in progress, and end the worker processes."""
        await self._opened.aclose()

    async def describe(self, task: Task) -> str:
        """Describe Harbor's version, agent and environment. Makes a trial of the task without playing it."""
        nowhere = SessionAddress("none", f"{self.gateway.url}/v1")
        trial = await check_trial(self._pool, self._order("check", task, nowhere))
        version = self._pool.ready.versions["harbor"]
        return f"Harbor {version} plays {trial['agent']} in {self._harbor.environment}"

    async def check(self, session: AgentSession, task: Task) -> None:
        """Make a trial of the task without playing it, and one call through Harbor's own LLM class.

        Raises ConfigError for a configuration refused by Harbor, EngineError if the arriving token ids differ from the
        sampled ones.
        """
        async with self.gateway.attached(session) as clients:
            order = self._order(session.name, task, clients.address)
            await check_trial(self._pool, order)
            answer = await self._pool.call({"probe": order})
        sampled = [(step.prompt_ids.tolist(), step.completion_ids.tolist()) for step in session.steps]
        if (answer.get("prompt"), answer.get("completion")) not in sampled or not answer.get("logprobs"):
            what = answer.get("error") or "the answer has other token ids than were sampled, or no log-probabilities"
            raise EngineError(f"a call through Harbor's LLM class, at {self.gateway.url}: {what}")

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one of `concurrency` slots, and for this trial's turn under the rate limit."""
        async with self._places:
            now = asyncio.get_running_loop().time()
            at = max(now, self._next_start)
            self._next_start = at + 1 / self._harbor.trials_per_second
            await asyncio.sleep(at - now)
            yield

    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        """Play a trial and return its grade by `outcomes.judge`. Raises EngineError if a call failed."""
        order = self._order(session.name, task, address)
        try:
            answer, refused = await self._play(order, session)
        except TrajectoryFailure:
            # Its worker may be gone, which would have stopped the sandbox.
            await self._remove_sandboxes(f"{order['name']}__")
            raise
        session.close()
        report = TrialReport.of(answer)
        verdict = judge(report, refused, self._harbor)
        unreported, misreported = compare(report, session.steps)
        warning = "; ".join(filter(None, (verdict.warning, _MISREPORTED if misreported else "")))
        metrics = _metrics(report, verdict, unreported, misreported)
        return Graded(verdict.reward, metrics, warning, verdict.ended_by, stopped=verdict.timed_out)

    async def _play(self, order: Mapping[str, Any], session: AgentSession) -> tuple[dict[str, Any], CallError | None]:
        """Return the worker's report of the trial, and the error that refused its agent's last call, if any.

        A trial with one call too many is stopped and verified. Raises EngineError if a call fails in the engine,
        because the agent would retry forever.
        """
        stop, refused = asyncio.Event(), None
        trial = asyncio.ensure_future(self._pool.call({"trial": order}, stop))
        watching = asyncio.ensure_future(_first_refusal(session))
        try:
            await asyncio.wait({trial, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not trial.done():
                refused = watching.result()
                if isinstance(refused, EngineError):
                    raise refused
                stop.set()
            return await trial, refused or session.last_error
        finally:
            watching.cancel()
            trial.cancel()
            await asyncio.wait({trial})
            # Retrieve it so that asyncio does not log it.
            trial.cancelled() or trial.exception()

    async def _remove_sandboxes(self, names: str) -> None:
        """Remove sandboxes of killed processes, by the prefix of their names, if no provider ends them."""
        if self._harbor.environment == "docker":
            await self._pool.call({"remove": {"names": names}})

    def _order(self, name: str, task: Task, address: SessionAddress) -> dict[str, Any]:
        """Return the request for a trial of the task. Raises DataError."""
        options, rollout, path = self._harbor, self.config, task.extras.get("path")
        if not isinstance(path, str):
            raise DataError(f"task {task.task_id}: no extra 'path', a directory of a Harbor task; use harbor_tasks")
        return {
            "name": trial_name(self._names, name),
            "directory": str(self._directory),
            "gateway": {"base_url": address.base_url, "anthropic_url": address.anthropic_url, "secret": address.secret},
            "config": options.trial,
            "agent": options.agent,
            "environment": options.environment,
            "task": str(Path(path).absolute()),
            "window": [rollout.max_input_tokens, rollout.max_input_tokens + rollout.max_completion_tokens],
            "temperature": rollout.temperature,
            "lifetime": 2 * rollout.trajectory_timeout,
            "keep": options.trial_directories,
        }


def check_programs(config: HarborConfig) -> None:
    """Raise ConfigError if a program that local sandboxes need is missing."""
    if config.environment != "local":
        return
    wanted = {"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux"}
    if config.agent.startswith("terminus-2"):
        wanted["tmux"] = "tmux"
    if missing := [program for program in wanted if shutil.which(program) is None]:
        install = f"apt-get install {' '.join(sorted({wanted[program] for program in missing}))}"
        raise ConfigError(
            f"driver_options.environment 'local' needs {' and '.join(missing)}, and there is none: {install}"
        )


async def check_trial(pool: WorkerPool, made: Mapping[str, Any]) -> dict[str, Any]:
    """Make a trial without playing it; return Harbor's names of its task and agent. Raises ConfigError."""
    try:
        return await pool.call({"check": made})
    except TrajectoryFailure as failure:
        raise ConfigError(f"harbor: no trial can be made with this configuration: {failure.message}") from failure


def run_names(directory: Path) -> str:
    """Return the prefix of the run's trials and their sandboxes: `treadle-3f2a-`."""
    return f"treadle-{hashlib.blake2b(str(directory.absolute()).encode(), digest_size=3).hexdigest()}-"


def trial_name(names: str, attempt: str) -> str:
    """Return the name of an attempt's trial: `treadle-3f2a-00012-3`. names: its prefix (`run_names`)."""
    return names + re.sub("[^A-Za-z0-9]+", "-", attempt).strip("-").lower()[-40:]


def compare(report: TrialReport, steps: Sequence[Step]) -> tuple[int, int]:
    """Return the number of recorded calls missing in the agent's own record, and of its calls recorded differently.

    An agent without a record of ids counts as complete.
    """
    if not any(report.recorded):
        return 0, 0
    ours = Counter(digest(step) for step in steps if was_played(step))
    theirs = Counter(call for segment in report.recorded for call in segment)
    return (ours - theirs).total(), (theirs - ours).total()


def digest(step: Step) -> str:
    """Return a digest of a step's token ids; `child/treadle_trials.py` computes the same."""
    ids = np.concatenate([[len(step.prompt_ids)], step.prompt_ids, step.completion_ids]).astype(np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


async def _first_refusal(session: AgentSession) -> StepsExceeded | EngineError:
    """Wait until a call is refused for the number of steps or fails in the engine, and return that error."""
    while isinstance(error := await session.errors.get(), ContextExceeded):
        # An agent may summarize, and continue.
        continue
    return error


def _metrics(report: TrialReport, verdict: Verdict, unreported: int, misreported: int) -> Measures:
    seconds = report.seconds
    values: dict[str, float] = {
        "timed_out": verdict.timed_out,
        "context_exceeded": verdict.context_exceeded,
        "stopped": report.stopped,
        "errored": bool(report.exception or report.invalid),
        "summaries": report.summaries,
        "start_seconds": seconds.get("environment_setup", 0.0) + seconds.get("agent_setup", 0.0),
        "agent_seconds": seconds.get(AGENT, 0.0),
        "verifier_seconds": seconds.get(VERIFIER, 0.0),
        "calls_unreported": unreported,
        "calls_misreported": misreported,
    }
    return measured(
        "trajectory", {Metric(name, "trajectory", "mean", *_METRICS[name]): [value] for name, value in values.items()}
    )
