"""Access control: only the browser that opened the printed link may read, under a known host name.

The link's token becomes a cookie that no script can read. Every other request needs it. Answers carry headers that
keep scripts, frames and requests of foreign pages out.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_IMPORT_MAP = "sha256-7aYZZYc1GcpJYWEttmz7y2mNrmjY7kKFWeKQjexbQ3c="
"""Of the import map in static/index.html."""
POLICY = (
    f"default-src 'none'; script-src 'self' '{_IMPORT_MAP}'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_NO_TOKEN = "open the link that `treadle view` printed: it carries the token\n"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """Middleware that admits requests with the token's cookie, a known host name and a reading method.

    hosts: names or addresses by which browsers may reach the server, without ports: a tunnel may have any port.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str] = ()) -> None:
        self._app, self._token = app, token
        self._hosts = {*LOOPBACK, *(f"[{host}]" if ":" in host else host.lower() for host in hosts)}
        self._cookie = f"treadle_view_{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # ports share their cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        refusal = self._answer(Request(scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        """Return the refusal of a request; None if it may reach the application."""
        host = request.headers.get("host", "").lower()
        name, colon, port = host.rpartition(":")  # `[::1]` and `8321` of `[::1]:8321`
        if (name if colon and port.isdigit() else host) not in self._hosts:
            return PlainTextResponse("this name of the server is not known; start it with --host NAME\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be changed here\n", 405)
        tokens = parse_qs(request.scope["query_string"].decode("latin-1")).get("token")
        if request.url.path == "/" and tokens:
            if not self._is_token(tokens[-1]):
                return PlainTextResponse(_NO_TOKEN, 403)
            answer = RedirectResponse("./", 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return PlainTextResponse(_NO_TOKEN, 403)
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())
