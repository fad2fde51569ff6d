"""The gateway: sessions behind the HTTP APIs of OpenAI and Anthropic.

    client -> routes (who, how large) -> dialect.read -> Exchanges (retry or new?) -> Session -> dialect.write -> client

`gateway.Gateway` knows the sessions, `serving.serving` puts it on a socket. Only `serving` needs Starlette and uvicorn
(the extra `gateway`).
"""
