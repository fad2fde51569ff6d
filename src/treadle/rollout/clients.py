"""Ready clients of the OpenAI and Anthropic SDKs, for one attempt's session; imports the SDKs when first needed."""

from __future__ import annotations

import ssl
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


def openai_client(base_url: str, api_key: str, timeout: float) -> AsyncOpenAI:
    """A client of the session at `base_url`, which ends in `/v1`. timeout: of each of its calls, seconds."""
    import openai

    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=_tls())  # a proxy must not be asked for loopback
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, http_client=http)


def anthropic_client(client: AsyncOpenAI) -> AsyncAnthropic:
    """Anthropic's client for the same session; close it, or use it as `async with anthropic_client(client) as mine`.

    Raises ModuleNotFoundError where the package `anthropic` is not installed.
    """
    import anthropic

    return anthropic.AsyncAnthropic(
        base_url=anthropic_base_url(client),
        api_key=client.api_key,
        timeout=client.timeout if isinstance(client.timeout, float) else anthropic.NOT_GIVEN,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=_tls()),
    )


def anthropic_base_url(client: AsyncOpenAI) -> str:
    """What Anthropic's SDK calls the base URL of that client's session: it adds `/v1` itself."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes some 20 ms: once, not for every attempt."""
    return ssl.create_default_context()
