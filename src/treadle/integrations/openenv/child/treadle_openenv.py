"""Handler of worker processes (`treadle.workers.foreign`): sessions of an OpenEnv server. No import of Treadle.

{"prompt": [...], "reset": {...}, "base_url", "seconds"}  ->  {"reward": 0.5, "metrics": {"turns": 3}, "error": None}
"""

import asyncio
import importlib.metadata
import json
import ssl
from typing import Any

import httpx
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed

Json = dict[str, Any]

_FULL, _INVALID = "(code: CAPACITY_REACHED)", "(code: VALIDATION_ERROR)"  # texts of the client for the server's errors
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds before a full server is tried again

_server: Json = {}


def versions() -> dict[str, str]:
    """Return the version of the library."""
    return {"openenv-core": importlib.metadata.version("openenv-core")}


async def start(options: Json) -> Json:
    """Fetch the server's action schema. Raises RuntimeError if it is unreachable, or has no field of that name."""
    _server.update(options, http=_open_http())
    try:
        answer = await _server["http"].get(f"{options['url']}/schema", timeout=30.0)
        answer.raise_for_status()
        actions = answer.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"no OpenEnv server answers at {options['url']} ({type(error).__name__}: {error})"
        ) from error
    fields = {name: field for name, field in actions["properties"].items() if name != "metadata"}
    if options["action"] and options["action"] not in fields:
        raise RuntimeError(f"its actions have no field {options['action']!r}, only {', '.join(fields)}")
    only = [name for name, field in fields.items() if len(fields) == 1 and field.get("type") == "string"]
    _server.update(action=options["action"] or next(iter(only), ""), fields=list(fields))
    return {"action": _server["action"], "fields": _server["fields"]}


def _open_http() -> httpx.AsyncClient:
    """Open the client shared by all attempts, each with its own address."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False, limits=limits)


async def run(payload: Json, stop: asyncio.Event) -> Json:
    """Play one attempt in its own session."""
    played = _Played()
    try:
        session, first = await _opened(payload["reset"])
        try:
            await _converse(payload, session, first, played)
        finally:
            await session.close()
    except RuntimeError as failure:
        played.error = {"cause": "environment", "message": str(failure)}
    except (OSError, ConnectionClosed, TimeoutError) as failure:
        played.error = {"cause": "infrastructure", "message": f"the session with the server ended: {failure!r}"}
    reward = sum(played.rewards) if played.rewards else None
    return {"reward": reward, "metrics": {"turns": played.turns}, "error": played.error}


class _Played:
    """State of an attempt."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.turns = 0
        self.error: Json | None = None


async def _opened(options: Json) -> tuple[GenericEnvClient, Any]:
    """Open a session, as soon as the server has a free slot, and reset it."""
    wait = _FIRST_WAIT
    while True:
        client = GenericEnvClient(base_url=_server["url"])
        try:
            await client.connect()
            return client, await client.reset(**options)
        except BaseException as error:
            await client.close()
            is_full = isinstance(error, RuntimeError) and _FULL in str(error)
            # Closed immediately, without waiting for us.
            if not is_full and not isinstance(error, ConnectionClosed):
                raise
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)


async def _converse(payload: Json, session: GenericEnvClient, observed: Any, played: _Played) -> None:
    """Alternate between model and environment until either ends it."""
    messages = [*payload["prompt"], _shown(observed.observation)]
    while not observed.done:
        answer = await _asked(payload, messages)
        if "error" in answer:
            played.error = {"cause": "agent", "message": str(answer["error"]["message"])}
            return
        played.turns += 1
        reply = answer["choices"][0]["message"]
        # Whole, with its thoughts, so that the next prompt extends the sampled tokens.
        messages.append(reply)
        try:
            observed = await _stepped(session, reply["content"] or "")
        except ValueError as wrong:
            # The model's mistake, reported to it.
            messages.append({"role": "user", "content": str(wrong)})
            continue
        if observed.reward is not None:
            played.rewards.append(float(observed.reward))
        messages.append(_shown(observed.observation))


async def _asked(payload: Json, messages: list[Json]) -> Json:
    url = f"{payload['base_url']}/chat/completions"
    request = {"model": "policy", "messages": messages}
    answer: Json = (await _server["http"].post(url, json=request, timeout=payload["seconds"])).json()
    return answer


async def _stepped(session: GenericEnvClient, text: str) -> Any:
    """Take the reply as the next action. Raises ValueError for an invalid one."""
    fields = ", ".join(_server["fields"])
    action: Any = {_server["action"]: text}
    if not _server["action"]:
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"Not JSON ({error}). Answer with one JSON object with the fields: {fields}") from error
        if not isinstance(action, dict):
            raise ValueError(f"Not a JSON object. Answer with one, with the fields: {fields}")
    try:
        return await session.step(action)
    except RuntimeError as error:
        if _INVALID not in str(error):
            raise
        raise ValueError(f"Not a valid action. Its fields are: {fields}") from error


def _shown(observation: Json) -> Json:
    field = _server["observation"]
    seen = observation.get(field, "") if field else {k: v for k, v in observation.items() if k != "metadata"}
    return {"role": "user", "content": seen if isinstance(seen, str) else json.dumps(seen)}
