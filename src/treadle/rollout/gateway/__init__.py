"""The gateway: sessions behind the HTTP APIs of OpenAI and Anthropic.

    client -> routes (authorization, size) -> dialect.read -> Exchanges (retry?) -> Session -> dialect.write -> client

`gateway.Gateway` manages the sessions, `serving.serving` puts it on a socket. Only `serving` needs Starlette and
uvicorn (the extra `gateway`).
"""
