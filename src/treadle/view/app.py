"""The viewer's routes: the pages' files, what they ask for as JSON, and files to download."""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

import treadle
from treadle.core.errors import RunError, TreadleError
from treadle.orchestration.reporting.report import count_tokens
from treadle.orchestration.store.run_directory import MetricsLog
from treadle.view import models
from treadle.view.compare import compare
from treadle.view.evaluations import compare_tasks
from treadle.view.export import export_page, static_files
from treadle.view.groups import LARGEST, GroupQuery, Split, list_groups
from treadle.view.guard import Guard
from treadle.view.recorded_run import RecordedRun, Runs
from treadle.view.timeline import activity, calls_of_update
from treadle.view.trajectories import experts_of, follow_task, search_update, view_group, view_trajectory

Number = Annotated[int, Query(ge=0, le=LARGEST)]
Key = Annotated[str, InPath(max_length=1000)]


def guarded_app(paths: Iterable[Path], token: str, hosts: Iterable[str] = ()) -> Guard:
    """Return the server's application. paths: run directories, and folders of them. hosts: names beside loopback's."""
    return Guard(make_app(paths), token, hosts)


def make_app(paths: Iterable[Path]) -> FastAPI:
    """Return the application without its guard."""
    app = FastAPI(title="Treadle viewer", docs_url=None, redoc_url=None, openapi_url=None)
    runs = Runs(list(paths))
    for error in (TreadleError, OSError):
        app.add_exception_handler(error, _problem)
    _add_static(app)
    _add_runs(app, runs)
    _add_records(app, runs)
    _add_exports(app, runs)
    return app


async def _problem(_: Request, error: Exception) -> Response:
    """Answer 404 for what is not there, 409 for what cannot be read."""
    return JSONResponse({"detail": _text(str(error))}, 404 if type(error) is RunError else 409)


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _json(answer: BaseModel) -> str:
    """Return an answer as JSON. Infinities and NaN become null; lone surrogates are replaced."""
    try:
        return answer.model_dump_json()
    except PydanticSerializationError:  # text that UTF-8 cannot write
        return json.dumps(_clean(answer.model_dump()), ensure_ascii=False)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {_clean(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _text(value) if isinstance(value, str) else value


def _answer(answer: BaseModel) -> Response:
    return Response(_json(answer), media_type="application/json")


def _add_static(app: FastAPI) -> None:
    static = static_files()

    def file(name: str) -> Response:
        if name not in static:
            return PlainTextResponse("no such file\n", 404)
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return Response(static[name], media_type="text/javascript" if name.endswith(".js") else kind)

    @app.get("/")
    def index() -> Response:
        return file("index.html")

    @app.get("/static/{name:path}")
    def static_file(name: str) -> Response:
        return file(name)


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def list_runs() -> Response:
        roots = [_text(str(root)) for root in runs.roots]
        return _answer(models.Runs(runs=runs.summaries(), roots=roots, version=treadle.__version__))

    @app.get("/api/changes")
    def changes() -> Response:
        return _answer(
            models.Changes(runs={run.key: models.Change(version=run.signature(), now=run.now()) for run in runs.all()})
        )

    @app.get("/api/compare")
    def compare_runs(run: Annotated[list[str], Query(max_length=100)]) -> Response:
        return _answer(compare([runs.get(key) for key in dict.fromkeys(run)]))

    @app.get("/api/tasks")
    def tasks(before: str, after: str, first: str | None = None, second: str | None = None) -> Response:
        return _answer(compare_tasks(runs.get(before), runs.get(after), first, second))

    @app.get("/api/runs/{key}")
    def run_detail(key: Key) -> Response:
        return _answer(runs.get(key).detail())

    @app.get("/api/runs/{key}/counts")
    def counts(key: Key) -> Response:
        return _answer(runs.get(key).counts())

    @app.get("/api/runs/{key}/metrics")
    def metrics(key: Key, generation: str = "", after: Number = 0) -> Response:
        return _answer(_rows_after(runs.get(key).metrics(), generation, after))

    @app.get("/api/runs/{key}/intervals")
    def intervals(key: Key, generation: str = "", after: Number = 0) -> Response:
        return _answer(_rows_after(runs.get(key).intervals(), generation, after))

    @app.get("/api/runs/{key}/calls")
    def calls(key: Key, update: Number) -> Response:
        return _answer(calls_of_update(runs.get(key), update))

    @app.get("/api/runs/{key}/activity")
    def activity_of(key: Key, span: Annotated[list[str], Query(max_length=200)]) -> Response:
        return _answer(activity(runs.get(key), [_span(text) for text in span]))

    @app.get("/api/runs/{key}/breaks")
    def breaks(key: Key) -> Response:
        run = runs.get(key)
        return _answer(run.kept("breaks", run.signature(), lambda: _breaks(run)))


def _span(text: str) -> tuple[float, float, int]:
    """Return the (start, end, parts) of `1700000000.5,1700000060,100`. Raises RequestValidationError."""
    try:
        numbers = text.split(",")
        start, end, parts = float(numbers[0]), float(numbers[1]), int(numbers[2])
        if len(numbers) != 3 or not (-math.inf < start <= end < math.inf and 0 < parts <= 5000):
            raise ValueError
    except (ValueError, IndexError):
        raise RequestValidationError(
            [{"loc": ("query", "span"), "msg": f"{text!r} is no start,end,parts", "type": "value_error"}]
        ) from None
    return start, end, parts


def _rows_after(lines: tuple[str, MetricsLog], generation: str, after: int) -> models.Metrics:
    """Return the rows that a page does not have yet. generation, after: of the rows that it has."""
    now, log = lines
    start = min(after, len(log.rows)) if generation == now else 0
    return models.Metrics(generation=now, start=start, rows=log.rows[start:])


def _breaks(run: RecordedRun) -> models.Breaks:
    texts, problem = run.texts()
    decode = None if problem else texts.decode
    found = count_tokens(run.directory.rollouts, run.ledger, decode, problem)
    updates = [{"update": run.update_of(row["version"]), **row} for row in found.pop("by_version")]
    return models.Breaks(**found, updates=[row for row in updates if row["update"] is not None])


def _add_records(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{key}/groups")
    def groups(key: Key, query: Annotated[GroupQuery, Query()]) -> Response:
        return _answer(list_groups(runs.get(key), query))

    @app.get("/api/runs/{key}/groups/{group_id}")
    def group(key: Key, group_id: Key) -> Response:
        return _answer(view_group(runs.get(key), group_id))

    @app.get("/api/runs/{key}/trajectories/{trajectory_id}")
    def trajectory(key: Key, trajectory_id: Key) -> Response:
        return _answer(view_trajectory(runs.get(key), trajectory_id))

    @app.get("/api/runs/{key}/trajectories/{trajectory_id}/experts")
    def experts(key: Key, trajectory_id: Key, step: Number, token: Number) -> Response:
        return _answer(experts_of(runs.get(key), trajectory_id, step, token))

    @app.get("/api/runs/{key}/search")
    def search(key: Key, update: Number, text: Annotated[str, Query(min_length=1, max_length=200)]) -> Response:
        return _answer(search_update(runs.get(key), update, text))

    @app.get("/api/runs/{key}/task")
    def task(key: Key, task_id: Annotated[str, Query(max_length=1000)], split: Split = "held_out") -> Response:
        return _answer(follow_task(runs.get(key), task_id, split))


def _add_exports(app: FastAPI, runs: Runs) -> None:
    @app.get("/export/{key}/trajectory/{trajectory_id}")
    def export_trajectory(key: Key, trajectory_id: Key) -> Response:
        run = runs.get(key)
        path, answer = _trajectory_answer(run, trajectory_id)
        return _download(
            run, trajectory_id, f"run/{_in_path(run.key)}/trajectory/{_in_path(trajectory_id)}", {path: answer}
        )

    @app.get("/export/{key}/group/{group_id}")
    def export_group(key: Key, group_id: Key) -> Response:
        run = runs.get(key)
        found = view_group(run, group_id)
        answers = {f"runs/{_in_path(run.key)}/groups/{_in_path(group_id)}": _json(found)}
        answers |= dict(_trajectory_answer(run, attempt.trajectory_id) for attempt in found.group.attempts)
        return _download(run, group_id, f"run/{_in_path(run.key)}/group/{_in_path(group_id)}", answers)


def _trajectory_answer(run: RecordedRun, trajectory_id: str) -> tuple[str, str]:
    """Return the path by which a page asks for a trajectory, and the answer."""
    path = f"runs/{_in_path(run.key)}/trajectories/{_in_path(trajectory_id)}"
    return path, _json(view_trajectory(run, trajectory_id))


def _in_path(name: str) -> str:
    """Return a name as JavaScript's `encodeURIComponent` writes it."""
    return quote(name, safe="!'()*")


def _download(run: RecordedRun, name: str, route: str, answers: dict[str, str]) -> Response:
    page = export_page(f"{name} · {run.path.name}", route, answers)
    file = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in f"{run.key}-{name}")
    headers = {"content-disposition": f'attachment; filename="{file}.html"'}
    return Response(page.encode("utf-8", "replace"), media_type="text/html", headers=headers)
