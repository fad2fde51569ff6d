"""The viewer's routes, its access control, and the exported file with a page and its answers.

Only the browser that opened the printed link may read, under a known host name: the link's token becomes a cookie that
no script can read, and every other request needs it. Headers block scripts, frames and requests of foreign pages. An
exported file has the same modules as data: URLs in an import map, needs no server and makes no request.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
import secrets
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import treadle
from treadle.core.errors import RunError, TreadleError
from treadle.core.text import escape_line
from treadle.view.compare import compare, compare_tasks
from treadle.view.groups import list_groups
from treadle.view.recorded_run import Key, RecordedRun, Run, Runs
from treadle.view.run_pages import (
    activity,
    calls_of_update,
    view_breaks,
    view_counts,
    view_intervals,
    view_metrics,
    view_run,
)
from treadle.view.texts import Json
from treadle.view.trajectories import experts_of, follow_task, search_update, view_group, view_trajectory

_RUN_PAGES: dict[str, Callable[..., Any]] = {
    "": view_run,
    "/counts": view_counts,
    "/metrics": view_metrics,
    "/intervals": view_intervals,
    "/calls": calls_of_update,
    "/activity": activity,
    "/breaks": view_breaks,
    "/groups": list_groups,
    "/groups/{group_id}": view_group,
    "/trajectories/{trajectory_id}": view_trajectory,
    "/trajectories/{trajectory_id}/experts": experts_of,
    "/search": search_update,
    "/task": follow_task,
}
"""Path below a run -> function that answers it."""


def guarded_app(paths: Iterable[Path], token: str, hosts: Iterable[str] = ()) -> Guard:
    """Return the server's application. paths: run directories, and folders of them. hosts: names beside loopback's."""
    return Guard(make_app(paths), token, hosts)


def make_app(paths: Iterable[Path]) -> FastAPI:
    app = FastAPI(title="Treadle viewer", docs_url=None, redoc_url=None, openapi_url=None)
    runs = app.state.runs = Runs(list(paths))
    for error in (TreadleError, OSError):
        app.add_exception_handler(error, _problem)
    static = static_files()

    @app.get("/static/{name:path}")
    def file(name: str) -> Response:
        if name not in static:
            return PlainTextResponse("no such file\n", 404)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "text/plain"
        return Response(static[name], media_type=kind)

    app.get("/")(lambda: file("index.html"))

    def list_runs() -> Json:
        roots = [str(root) for root in runs.roots]
        return {"runs": [run.summary() for run in runs.all()], "roots": roots, "version": treadle.__version__}

    def changes() -> Json:
        return {"runs": {run.key: {"version": run.signature(), "now": run.now()} for run in runs.all()}}

    def compare_runs(run: Annotated[list[str], Query(max_length=100)]) -> Json:
        return compare([runs.get(key) for key in dict.fromkeys(run)])

    def tasks(before: str, after: str, first: str | None = None, second: str | None = None) -> Json:
        return compare_tasks(runs.get(before), runs.get(after), first, second)

    pages: dict[str, Callable[..., Any]] = {
        "runs": list_runs,
        "changes": changes,
        "compare": compare_runs,
        "tasks": tasks,
        **{f"runs/{{key}}{path}": view for path, view in _RUN_PAGES.items()},
    }
    for path, view in pages.items():
        app.get(f"/api/{path}", response_model=None)(_answering(view))
    app.get("/export/{key}/trajectory/{trajectory_id}")(_export_trajectory)
    app.get("/export/{key}/group/{group_id}")(_export_group)
    return app


async def _problem(_: Request, error: Exception) -> Response:
    """Answer 404 for missing data, 409 for unreadable data."""
    return JSONResponse({"detail": _text(str(error))}, 404 if type(error) is RunError else 409)


def _answering(view: Callable[..., Any]) -> Callable[..., Response]:
    @wraps(view)
    def answer(*arguments: Any, **query: Any) -> Response:
        return Response(_json(view(*arguments, **query)), media_type="application/json")

    return answer


def _json(answer: Any) -> bytes:
    try:
        return to_json(answer, inf_nan_mode="null")
    except PydanticSerializationError:  # text that UTF-8 cannot represent
        return to_json(_clean(answer), inf_nan_mode="null")


def _clean(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {_clean(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _export_trajectory(run: Run, trajectory_id: Key) -> Response:
    view = view_trajectory(run, trajectory_id)
    return _download(run, "trajectory", trajectory_id, {f"trajectories/{trajectory_id}": view})


def _export_group(run: Run, group_id: Key) -> Response:
    view = view_group(run, group_id)
    names = [attempt.trajectory_id for attempt in view["group"].attempts]
    attempts = {f"trajectories/{name}": view_trajectory(run, name) for name in names}
    return _download(run, "group", group_id, {f"groups/{group_id}": view, **attempts})


def _download(run: RecordedRun, kind: str, name: str, views: Mapping[str, Any]) -> Response:
    # Like JavaScript's `encodeURIComponent`.
    def encoded(*parts: str) -> str:
        return "/".join(quote(part, safe="!'()*") for part in parts)

    answers = {encoded("runs", run.key, *path.split("/", 1)): _json(view).decode() for path, view in views.items()}
    page = export_page(f"{name} · {run.path.name}", encoded("run", run.key, kind, name), answers)
    file = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in f"{run.key}-{name}")
    headers = {"content-disposition": f'attachment; filename="{file}.html"'}
    return Response(page.encode("utf-8", "replace"), media_type="text/html", headers=headers)


_IMPORT_MAP = "sha256-7aYZZYc1GcpJYWEttmz7y2mNrmjY7kKFWeKQjexbQ3c="
"""Hash of the import map in static/index.html."""
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

    hosts: names or addresses at which browsers may reach the server, without ports: a tunnel may have any port.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str] = ()) -> None:
        self._app, self._token = app, token
        self._hosts = {*LOOPBACK, *(f"[{host}]" if ":" in host else host.lower() for host in hosts)}
        # named by token, because ports share cookies
        self._cookie = f"treadle_view_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

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
        """Return the refusal of a request; None if it may proceed to the application."""
        host = request.headers.get("host", "").lower()
        # `[::1]` and `8321` of `[::1]:8321`.
        name, colon, port = host.rpartition(":")
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


_ENTRY = 'import "pages/app.js";'


def static_files() -> dict[str, bytes]:
    """Return the pages' files: name below `static/` -> content."""
    root = files("treadle.view") / "static"
    pages = {entry.name: entry.read_bytes() for entry in root.iterdir() if entry.is_file()}
    return pages | {f"vendor/{entry.name}": entry.read_bytes() for entry in (root / "vendor").iterdir()}


def export_page(title: str, route: str, answers: Mapping[str, str]) -> str:
    """Return the file's content. route: initial page. answers: path -> JSON."""
    static = static_files()
    modules = {
        f"pages/{name}": f"data:text/javascript;base64,{b64encode(content).decode()}"
        for name, content in static.items()
        if name.endswith(".js")
    }
    import_map = json.dumps({"imports": modules})
    style = (static["vendor/uPlot.min.css"] + static["style.css"]).decode()
    policy = (
        f"default-src 'none'; script-src {_hash(import_map)} {_hash(_ENTRY)} data:; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    held = ", ".join(f"{json.dumps(path)}: {answer}" for path, answer in answers.items())
    embedded = f'{{"route": {json.dumps(route)}, "answers": {{{held}}}}}'
    # Must not end the enclosing element.
    embedded = embedded.replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(escape_line(title))}</title>\n<style>{style}</style>\n"
        f'<script type="importmap">{import_map}</script>\n</head>\n<body>\n'
        f'<script type="application/json" id="embedded">{embedded}</script>\n'
        f'<div id="app"></div>\n<script type="module">{_ENTRY}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
