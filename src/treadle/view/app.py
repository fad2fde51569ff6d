"""The viewer's routes: the pages' files, what they ask for as JSON, and files to take along."""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

import treadle
from treadle.core.errors import Cause, RunError, TreadleError
from treadle.core.types import DropReason, Status
from treadle.orchestration.reporting.report import count_tokens
from treadle.orchestration.store.run_directory import MetricsLog
from treadle.view import models
from treadle.view.compare import compare
from treadle.view.evaluations import compare_tasks
from treadle.view.export import export_page, static_files
from treadle.view.fates import all_rules
from treadle.view.groups import PRESETS, SORTS, list_groups
from treadle.view.guard import Guard
from treadle.view.recorded_run import RecordedRun, Runs
from treadle.view.timeline import activity, calls_of_update
from treadle.view.trajectories import experts_of, follow_task, search_update, view_group, view_trajectory

_LARGEST = 2**31 - 1
Number = Annotated[int, Query(ge=0, le=_LARGEST)]
Key = Annotated[str, InPath(max_length=1000)]
Preset = Literal["failed", "dropped", "stale", "zero_advantage", "mixed", "unsolved", "warning", "blocked"]
Sort = Literal["group", "update", "task", "reward", "spread", "steps", "tokens", "failed", "seconds", "component"]
Split = Literal["train", "held_out"]
assert set(Preset.__args__) == PRESETS.keys() and set(Sort.__args__) == set(SORTS)  # type: ignore[attr-defined]


def guarded_app(paths: Iterable[Path], token: str, hosts: Iterable[str] = ()) -> Guard:
    """Return the server's application. paths: run directories, and folders of them. hosts: names beside loopback's."""
    return Guard(make_app(paths), token, hosts)


def make_app(paths: Iterable[Path]) -> FastAPI:
    """Return the application without its guard."""
    app = FastAPI(title="Treadle viewer", docs_url=None, redoc_url=None, openapi_url=None)
    runs = Runs(list(paths))
    _handle_errors(app)
    _add_static(app)
    _add_runs(app, runs)
    _add_records(app, runs)
    _add_exports(app, runs)
    return app


def _handle_errors(app: FastAPI) -> None:
    async def not_readable(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": _text(str(error))}, 404 if type(error) is RunError else 409)

    async def no_such_run(_: Request, error: Exception) -> Response:
        return JSONResponse(
            {"detail": f"no run {_text(str(error.args[0]))!r} here; the list of runs has them all"}, 404
        )

    app.add_exception_handler(TreadleError, not_readable)
    app.add_exception_handler(OSError, not_readable)
    app.add_exception_handler(_NoSuchRun, no_such_run)


class _NoSuchRun(Exception):
    """Says that no run has this key."""


def _find(runs: Runs, key: str) -> RecordedRun:
    try:
        return runs.get(key)
    except KeyError:
        raise _NoSuchRun(key) from None


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _json(answer: BaseModel) -> str:
    """Return an answer as JSON; infinities and what is no number are null, lone surrogates are replaced."""
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

    @app.get("/api/rules")
    def rules() -> Response:
        return _answer(all_rules())

    @app.get("/api/changes")
    def changes() -> Response:
        return _answer(
            models.Changes(runs={run.key: models.Change(version=run.signature(), now=run.now()) for run in runs.all()})
        )

    @app.get("/api/compare")
    def compare_runs(run: Annotated[list[str], Query(max_length=100)]) -> Response:
        return _answer(compare([_find(runs, key) for key in dict.fromkeys(run)]))

    @app.get("/api/tasks")
    def tasks(before: str, after: str, first: str | None = None, second: str | None = None) -> Response:
        return _answer(compare_tasks(_find(runs, before), _find(runs, after), first, second))

    @app.get("/api/runs/{key}")
    def run_detail(key: Key) -> Response:
        return _answer(_find(runs, key).detail())

    @app.get("/api/runs/{key}/counts")
    def counts(key: Key) -> Response:
        return _answer(_find(runs, key).counts())

    @app.get("/api/runs/{key}/metrics")
    def metrics(key: Key, generation: str = "", after: Number = 0) -> Response:
        return _answer(_rows_after(_find(runs, key).metrics(), generation, after))

    @app.get("/api/runs/{key}/intervals")
    def intervals(key: Key, generation: str = "", after: Number = 0) -> Response:
        return _answer(_rows_after(_find(runs, key).intervals(), generation, after))

    @app.get("/api/runs/{key}/calls")
    def calls(key: Key, update: Number) -> Response:
        return _answer(calls_of_update(_find(runs, key), update))

    @app.get("/api/runs/{key}/activity")
    def activity_of(key: Key, span: Annotated[list[str], Query(max_length=200)]) -> Response:
        return _answer(activity(_find(runs, key), [_span(text) for text in span]))

    @app.get("/api/runs/{key}/breaks")
    def breaks(key: Key) -> Response:
        run = _find(runs, key)
        return _answer(run.kept("breaks", run.signature(), lambda: _breaks(run)))


def _span(text: str) -> tuple[float, float, int]:
    """Return the (start, end, parts) of `1700000000.5,1700000060,100`. Raises RequestValidationError."""
    try:
        start, end, parts = text.split(",")
        found = float(start), float(end), int(parts)
        if not (math.isfinite(found[0]) and math.isfinite(found[1]) and found[0] <= found[1] and 0 < found[2] <= 5000):
            raise ValueError
    except ValueError:
        raise RequestValidationError(
            [{"loc": ("query", "span"), "msg": f"{text!r} is no start,end,parts", "type": "value_error"}]
        ) from None
    return found


def _rows_after(found: tuple[str, MetricsLog], generation: str, after: int) -> models.Metrics:
    """Return the rows that a page does not have yet. generation, after: of those that it has."""
    now, log = found
    start = min(after, len(log.rows)) if generation == now else 0
    return models.Metrics(generation=now, start=start, rows=log.rows[start:], unreadable=log.unreadable)


def _breaks(run: RecordedRun) -> models.Breaks:
    texts, problem = run.texts()
    decode = None if problem else texts.decode
    found = count_tokens(run.directory.rollouts, run.ledger.query, run.shards(), decode, problem)
    updates = [{"update": run.update_of(row["version"]), **row} for row in found.pop("by_version")]
    return models.Breaks(**found, updates=[row for row in updates if row["update"] is not None])


def _add_records(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs/{key}/groups")
    def groups(
        key: Key,
        split: Split | None = None,
        preset: Preset | None = None,
        reason: DropReason | None = None,
        cause: Cause | None = None,
        status: Status | None = None,
        search: Annotated[str, Query(max_length=200)] = "",
        update: Annotated[int | None, Query(ge=0, le=_LARGEST)] = None,
        sort: Sort = "group",
        component: Annotated[str, Query(max_length=200)] = "",
        descending: bool = True,
        offset: Number = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 100,
        around: Annotated[str | None, Query(max_length=1000)] = None,
    ) -> Response:
        found = list_groups(
            _find(runs, key),
            split=split,
            preset=preset,
            reason=reason,
            cause=cause,
            status=status,
            search=search,
            update=update,
            sort=sort,
            component=component,
            descending=descending,
            offset=offset,
            limit=limit,
            around=around,
        )
        return _answer(found)

    @app.get("/api/runs/{key}/groups/{group_id}")
    def group(key: Key, group_id: Key) -> Response:
        return _answer(view_group(_find(runs, key), group_id))

    @app.get("/api/runs/{key}/trajectories/{trajectory_id}")
    def trajectory(key: Key, trajectory_id: Key) -> Response:
        return _answer(view_trajectory(_find(runs, key), trajectory_id))

    @app.get("/api/runs/{key}/trajectories/{trajectory_id}/experts")
    def experts(key: Key, trajectory_id: Key, step: Number, token: Number) -> Response:
        return _answer(experts_of(_find(runs, key), trajectory_id, step, token))

    @app.get("/api/runs/{key}/search")
    def search(key: Key, update: Number, text: Annotated[str, Query(min_length=1, max_length=200)]) -> Response:
        return _answer(search_update(_find(runs, key), update, text))

    @app.get("/api/runs/{key}/task")
    def task(key: Key, task_id: Annotated[str, Query(max_length=1000)], split: Split = "held_out") -> Response:
        return _answer(follow_task(_find(runs, key), task_id, split))


def _add_exports(app: FastAPI, runs: Runs) -> None:
    @app.get("/export/{key}/trajectory/{trajectory_id}")
    def export_trajectory(key: Key, trajectory_id: Key) -> Response:
        run = _find(runs, key)
        path, answer = _trajectory_answer(run, trajectory_id)
        return _download(
            run, trajectory_id, f"run/{_in_path(run.key)}/trajectory/{_in_path(trajectory_id)}", {path: answer}
        )

    @app.get("/export/{key}/group/{group_id}")
    def export_group(key: Key, group_id: Key) -> Response:
        run = _find(runs, key)
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
