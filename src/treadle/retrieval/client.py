"""`RetrievalClient`: queries a retrieval server, and survives its restarts."""

from __future__ import annotations

import asyncio
import ssl
from functools import cache

import httpx

from treadle.core.errors import Cause, ConfigError, InfrastructureError, TrajectoryFailure
from treadle.core.text import keys_in, read_json, redacted

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between attempts
_PASSING = (429, 500, 502, 503, 504)  # transient statuses


class RetrievalClient:
    """Queries one retrieval server over a persistent connection.

    url: URL of the route, for example http://127.0.0.1:8000/retrieve. timeout: limit of one attempt, in seconds.
    patience: seconds after which a query is given up. A server that is unreachable, answers with a transient error or
    sends Retry-After is retried with growing pauses.
    """

    def __init__(self, url: str, timeout: float = 30.0, patience: float = 45.0) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url {url!r}: {error}; write http://127.0.0.1:8000/retrieve") from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"url {url!r} is not a retrieval server's; write http://127.0.0.1:8000/retrieve")
        self._url, self._timeout, self._patience = url, timeout, patience
        self._http = httpx.AsyncClient(verify=_tls() if parts.scheme == "https" else False, trust_env=False)

    async def search(self, query: str, topk: int) -> list[str]:
        """Return the contents of at most `topk` passages, best first.

        Raises InfrastructureError for an outage longer than `patience`, TrajectoryFailure of cause environment for an
        invalid answer.
        """
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + self._patience, _FIRST_PAUSE
        # Servers in use accept either `queries` or `query`, and ignore the other.
        body = {"query": query, "queries": [query], "topk": topk, "return_scores": True}
        while True:
            try:
                response = await self._http.post(self._url, json=body, timeout=min(self._timeout, end - loop.time()))
            except httpx.RequestError as error:
                problem, least = str(error) or type(error).__name__, 0.0
            else:
                if response.status_code not in _PASSING:
                    return self._contents(response)
                problem, retry_after = f"status {response.status_code}", response.headers.get("Retry-After", "")
                least = float(retry_after) if retry_after.isdecimal() else 0.0  # may also be a date
            wait = max(pause, least)
            if loop.time() + wait >= end:
                raise InfrastructureError(self._said(f"no answer for {self._patience:g} s, at last: {problem}"))
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def close(self) -> None:
        await self._http.aclose()

    def _contents(self, response: httpx.Response) -> list[str]:
        """Return the contents of the documents, which come with or without scores."""
        if response.status_code != 200:
            raise self._failure(f"status {response.status_code}: {redacted(response.text, *keys_in(self._url)):.200}")
        try:
            [row] = read_json(response.text)["result"]
            contents = [document.get("document", document)["contents"] for document in row]
            if wrong := [text for text in contents if not isinstance(text, str)]:
                raise ValueError(f"contents {wrong[0]!r:.60} are not text")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = redacted(response.text, *keys_in(self._url))
            raise self._failure(f"it answered {text!r:.200}, which is not the result of one query") from error
        return contents

    def _failure(self, problem: str) -> TrajectoryFailure:
        return TrajectoryFailure(Cause.ENVIRONMENT, self._said(problem))

    def _said(self, problem: str) -> str:
        return redacted(f"the retrieval server at {self._url}: {problem}", *keys_in(self._url))


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()
