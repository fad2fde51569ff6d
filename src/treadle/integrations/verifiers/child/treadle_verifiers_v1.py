"""verifiers from 0.2 on: a `Taskset`, an `Env`, and a `Harness` with programs (started by `uv`) that call the model."""

import itertools
import shutil
import threading
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

Json = dict[str, Any]

_NO_KEY = "TREADLE_NO_KEY"  # an unset variable: the address itself is the secret


class Library:
    """An environment's configuration, and the tasks read so far from its taskset."""

    def __init__(self, environment: str, arguments: Json, split: str) -> None:
        taskset = {**arguments.get("taskset", {}), "id": environment}
        self._config = resolve_env_config({**arguments, "taskset": taskset})
        made = load_environment(self._config)
        self._is_bounded = made.taskset.bounded
        self._unread = iter(made.taskset)
        self._tasks: list[Any] = []
        self._reading = threading.Lock()

    @staticmethod
    def check_programs() -> None:
        """Raise RuntimeError without `uv`, which harnesses use to start their programs."""
        if shutil.which("uv") is None:
            raise RuntimeError("no uv on the PATH, which verifiers needs to start programs; pip install uv")

    def rows(self, first: int, count: int | None) -> range:
        """Return the numbers of `count` tasks from `first` on, or of all."""
        if count is None and not self._is_bounded:
            raise ValueError("its taskset has no end; say how many tasks are wanted (count)")
        self._read(None if count is None else first + count)
        return range(min(first, len(self._tasks)), len(self._tasks))

    def data(self, row: int) -> Json:
        """Return a task's data."""
        self._read(row + 1)
        data: Json = self._tasks[row].data.model_dump(mode="json")
        return data

    async def close(self) -> None:
        """No-op: each episode ends its own processes."""

    async def play(self, row: int, base_url: str, seconds: float) -> Json:
        """Play the task as one episode with its own server: the library keeps a client for each address it has seen."""
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_NO_KEY)
        environment = load_environment(self._config)
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[row], vf.ModelContext(model="policy", client=client))
        return _answer(episode)

    def _read(self, end: int | None) -> None:
        with self._reading:
            self._tasks += itertools.islice(self._unread, None if end is None else max(0, end - len(self._tasks)))


def _answer(episode: Any) -> Json:
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    error = None
    if not episode.ok and errors:
        error = {"cause": "environment", "message": f"{errors[-1].type}: {errors[-1].message}"[:2000]}
    elif len(traces) != 1:
        message = f"{len(traces)} agents of the episode are trained, and one attempt trains one"
        error = {"cause": "environment", "message": message}
    if len(traces) != 1:
        return {"reward": None, "metrics": {}, "error": error}
    [trace] = traces
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    # Reward functions do not run for a trace with an error.
    reward = trace.reward if trace.ok else None
    return {"reward": reward, "metrics": {**scores, **trace.metrics}, "error": error}
