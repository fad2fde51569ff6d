"""Ready clients of the OpenAI and Anthropic SDKs for one attempt's session; the SDKs are imported on first use."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, overload

from treadle.rollout.isolation.user_code import is_async

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


@asynccontextmanager
async def async_client(base_url: str, api_key: str, timeout: float) -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of the session at `base_url`, which ends in `/v1`. timeout: limit of each call, in seconds."""
    import openai

    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=_tls())  # loopback must bypass proxies
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, http_client=http) as client:
        yield client


@asynccontextmanager
async def sync_client(base_url: str, api_key: str, timeout: float) -> AsyncIterator[OpenAI]:
    """Yield a synchronous client, for code in a thread. Parameters as in `async_client`."""
    import openai

    http = openai.DefaultHttpxClient(trust_env=False, verify=_tls())
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=timeout, http_client=http) as client:
        yield client


@asynccontextmanager
async def client_of(
    agent: object, base_url: str, api_key: str, timeout: float
) -> AsyncIterator[AsyncOpenAI | OpenAI | AsyncAnthropic | Anthropic]:
    """Yield the client for an agent: of the SDK in its annotation, or OpenAI's."""
    claude = wants_anthropic(agent)
    if is_async(agent):
        async with async_client(base_url, api_key, timeout) as client, AsyncExitStack() as stack:
            yield await stack.enter_async_context(anthropic_client(client)) if claude else client
    else:
        async with sync_client(base_url, api_key, timeout) as plain, AsyncExitStack() as stack:
            yield stack.enter_context(anthropic_client(plain)) if claude else plain


def wanted_client(agent: object) -> str:
    """Return the annotated class of its second parameter, without the module: "AsyncOpenAI"; or ""."""
    parameters = [*inspect.signature(agent).parameters.values()] if callable(agent) else []
    annotation = parameters[1].annotation if len(parameters) > 1 else ""
    return str(getattr(annotation, "__name__", annotation)).rpartition(".")[2]


def wants_anthropic(agent: object) -> bool:
    """Return whether its second parameter is annotated as a client of Anthropic's SDK."""
    return wanted_client(agent) in ("Anthropic", "AsyncAnthropic")


@overload
def anthropic_client(client: AsyncOpenAI) -> AsyncAnthropic: ...
@overload
def anthropic_client(client: OpenAI) -> Anthropic: ...
def anthropic_client(client: AsyncOpenAI | OpenAI) -> AsyncAnthropic | Anthropic:
    """Make Anthropic's client for the same session, asynchronous if `client` is. Close it after use."""
    import anthropic
    import openai

    url = anthropic_base_url(client)
    timeout = client.timeout if isinstance(client.timeout, float) else anthropic.NOT_GIVEN
    if isinstance(client, openai.OpenAI):
        plain = anthropic.DefaultHttpxClient(trust_env=False, verify=_tls())
        return anthropic.Anthropic(base_url=url, api_key=client.api_key, timeout=timeout, http_client=plain)
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=_tls())
    return anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key, timeout=timeout, http_client=http)


def anthropic_base_url(client: AsyncOpenAI | OpenAI) -> str:
    """Return the base URL of that client's session for Anthropic's SDK, which adds `/v1` itself."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


@cache
def _tls() -> ssl.SSLContext:
    """Create the TLS context once for all attempts: reading the certificates takes some 20 ms."""
    return ssl.create_default_context()
