"""verifiers up to 0.1.14: `load_environment`, and rollouts of an `Environment`."""

import signal
import ssl
import threading
from typing import Any

import verifiers
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout
from verifiers.clients import OpenAIChatCompletionsClient

Json = dict[str, Any]

_TLS = ssl.create_default_context()  # once: reading the certificates takes some 20 ms
_OF_MACHINES = ("InfraError", "TunnelError", "SandboxError")
_set_handler = signal.signal


def _set_in_main_thread(number: Any, handler: Any) -> Any:
    """Leave signals to this process: an environment loaded in a thread would install handlers as for a command line."""
    if threading.current_thread() is threading.main_thread():
        return _set_handler(number, handler)
    return signal.getsignal(number)


signal.signal = _set_in_main_thread  # type: ignore[assignment]


class Library:
    """A loaded environment and one of its data sets."""

    def __init__(self, environment: str, arguments: Json, split: str) -> None:
        self._environment = verifiers.load_environment(environment, **arguments)
        if self._environment.rubric.has_group_rewards:
            raise ValueError("its rubric grades groups of rollouts together, and here each attempt is graded by itself")
        get = self._environment.get_dataset if split == "train" else self._environment.get_eval_dataset
        self._data = get()

    @staticmethod
    def check_programs() -> None:
        """No-op: it starts no programs."""

    def rows(self, first: int, count: int | None) -> range:
        """Return the numbers of `count` rows from `first` on, or of all."""
        end = len(self._data)
        return range(min(first, end), end if count is None else min(first + count, end))

    def data(self, row: int) -> Json:
        """Return the row as stored."""
        return dict(self._data[row])

    async def close(self) -> None:
        """Let the environment release resources shared by its rollouts."""
        await self._environment._teardown()

    async def play(self, row: int, base_url: str, seconds: float) -> Json:
        """Play the row by the library's own rollout."""
        limits = Timeout(seconds, connect=30.0)
        async with (
            DefaultAsyncHttpxClient(verify=_TLS, trust_env=False, timeout=limits) as http,
            AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, http_client=http, timeout=limits) as client,
        ):
            output = await self._environment.run_rollout(
                self.data(row), OpenAIChatCompletionsClient(client), "policy", {}
            )
        return {"reward": output["reward"], "metrics": output["metrics"] or {}, "error": _error(output.get("error"))}


def _error(error: Any) -> Json | None:
    if error is None:
        return None
    cause = "infrastructure" if error["error"] in _OF_MACHINES else "environment"
    return {"cause": cause, "message": str(error["error_chain_repr"])[-2000:]}
