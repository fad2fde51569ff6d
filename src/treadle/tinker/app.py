"""The protocol's routes, of the SDK 0.34 to 0.38, over a `Service`."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.core.errors import DataError
from treadle.tinker import requests as body
from treadle.tinker.journal import Row
from treadle.tinker.service import Refused, Service

VERSIONS = "0.34 to 0.38"
"""Versions of the SDK whose protocol is served."""
MAX_BODY = 32 * 2**20
"""Largest body of a request, in bytes; the SDK sends 5 MB at most."""
POLL = 20.0
"""Seconds that a request for a result waits, less than the SDK's limit of 45."""
_PROTOBUF = "application/x-protobuf"

Handler = Callable[[Service, Request, bytes], Awaitable[Response]]


def make_app(service: Service, key: str) -> Starlette:
    """Return the application. key: what every request must carry."""
    routes = [_route(service, key, method, path, handler) for (method, path), handler in ROUTES.items()]
    unsupported = [_route(service, key, method, path, _sentence(why)) for (method, path), why in UNSUPPORTED.items()]
    app = Starlette(routes=[*routes, *unsupported], exception_handlers={HTTPException: _unknown})
    app.router.redirect_slashes = False
    return app


def _route(service: Service, key: str, method: str, path: str, handler: Handler) -> Route:
    async def answer(request: Request) -> Response:
        if not hmac.compare_digest(_key(request).encode(), key.encode()):
            return _error(401, "the API key is wrong: set TINKER_API_KEY to the key that treadle serve printed")
        try:
            return await handler(service, request, await _body(request))
        except Refused as error:
            return _error(error.status, error.message)
        except DataError as error:
            return _error(400, str(error))
        except ClientDisconnect:
            return _error(400, "the client disconnected while sending the request")

    return Route(f"/api/v1{path}", answer, methods=[method])


def _key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


async def _body(request: Request) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed requests are not taken: this server is near, and says so in its configuration")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise Refused(413, f"the request is larger than {MAX_BODY} bytes; send fewer datums at once")
        parts.append(part)
    return b"".join(parts)


def _error(status: int, message: str) -> Response:
    headers = {"retry-after": "1"} if status == 429 else None
    return JSONResponse({"detail": message}, status, headers)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}; this server has the protocol of SDK {VERSIONS}"
    return _error(error.status_code, what)


def _sentence(why: str) -> Handler:
    async def refuse(service: Service, request: Request, raw: bytes) -> Response:
        raise Refused(400, why)  # a client repeats requests that are answered by 5xx

    return refuse


def _future(ident: str, **more: Any) -> Response:
    return JSONResponse({"request_id": ident, **more})


# Service


async def _health(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse({"status": "ok"})


async def _client_config(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse({"sample_join_sampling_session": True})


async def _dynamic_config(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse({"sample_cancel_enabled": True})


async def _capabilities(service: Service, request: Request, raw: bytes) -> Response:
    facts = {"max_context_length": service.models.context, "trainable": True, "sampleable": True}
    return JSONResponse({"supported_models": [{"model_name": name, **facts} for name in service.names]})


async def _telemetry(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse({"status": "accepted"})


async def _metrics(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse(service.counts())


# Sessions

_NOTICE = "treadle: stable_reinforce, whose definition is not published, is computed as cispo"


async def _create_session(service: Service, request: Request, raw: bytes) -> Response:
    session = service.create_session(body.read(body.CreateSession, raw))
    return JSONResponse({"type": "create_session", "session_id": session, "info_message": _NOTICE})


async def _heartbeat(service: Service, request: Request, raw: bytes) -> Response:
    service.heartbeat(body.read(body.Heartbeat, raw).session_id)
    return JSONResponse({"type": "session_heartbeat"})


async def _finish(service: Service, request: Request, raw: bytes) -> Response:
    reason = body.read(body.Finish, raw).reason.get("type", "finished")
    service.journal.end_session(_session(service, request), reason)
    return JSONResponse({})


async def _get_session(service: Service, request: Request, raw: bytes) -> Response:
    session = _session(service, request)
    of = {name: service.journal.rows(f"SELECT {name} FROM {name}s WHERE session = ?", session)
          for name in ("model", "sampler")}  # fmt: skip
    row = service.journal.row("SELECT facts FROM sessions WHERE session = ?", session)
    facts = json.loads(row["facts"]) if row else {}
    ids = {"training_run_ids": [r["model"] for r in of["model"]], "sampler_ids": [r["sampler"] for r in of["sampler"]]}
    return JSONResponse({**ids, "user_metadata": facts["user_metadata"], "display_name": facts["display_name"]})


async def _list_sessions(service: Service, request: Request, raw: bytes) -> Response:
    rows, _ = _page(request, service.journal.rows("SELECT session FROM sessions ORDER BY created DESC"))
    return JSONResponse({"sessions": [row["session"] for row in rows]})


def _session(service: Service, request: Request) -> str:
    session = str(request.path_params["session"])
    if service.journal.row("SELECT 1 FROM sessions WHERE session = ?", session) is None:
        raise Refused(404, f"there is no session {session!r}")
    return session


# Sampling


async def _create_sampler(service: Service, request: Request, raw: bytes) -> Response:
    sampler = service.create_sampler(body.read(body.CreateSampler, raw))
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})


async def _join_sampler(service: Service, request: Request, raw: bytes) -> Response:
    sampler = body.read(body.JoinSampler, raw).sampling_session_id
    service.sampler(sampler)
    return JSONResponse({"type": "join_sampling_session", "client_counter": service.journal.join_sampler(sampler)})


async def _get_sampler(service: Service, request: Request, raw: bytes) -> Response:
    row = service.sampler(request.path_params["sampler"])
    return JSONResponse({"sampler_id": row["sampler"], "base_model": service.names[0], "model_path": row["path"]})


async def _sample(service: Service, request: Request, raw: bytes) -> Response:
    ident, sequences = service.sample(body.read(body.Sample, raw), raw)
    return _future(ident, sample_sequence_ids=sequences)


async def _cancel(service: Service, request: Request, raw: bytes) -> Response:
    service.cancel(body.read(body.Cancel, raw).request_id)
    return JSONResponse({})


# Training


async def _create_model(service: Service, request: Request, raw: bytes) -> Response:
    return _future(service.create_model(body.read(body.CreateModel, raw), raw))


async def _get_info(service: Service, request: Request, raw: bytes) -> Response:
    row = service.model(body.read(body.OfModel, raw).model_id)
    adapter, name = json.loads(row["adapter"]), service.names[0]
    data = {"arch": service.models.architecture, "model_name": name, "tokenizer_id": str(service.tokenizer)}
    facts = {"is_lora": True, "lora_rank": adapter["rank"], "model_name": name}
    return JSONResponse({"type": "get_info", "model_id": row["model"], "model_data": data, **facts})


async def _unload(service: Service, request: Request, raw: bytes) -> Response:
    model = body.read(body.OfModel, raw).model_id
    return _future(await service.unload(model), model_id=model)


async def _forward_backward(service: Service, request: Request, raw: bytes) -> Response:
    if not request.headers.get("content-type", "").startswith(_PROTOBUF):
        raise Refused(415, f"forward_backward takes protobuf only, as of SDK {VERSIONS}; upgrade tinker")
    return _future(service.forward_backward(raw))


def _ordered(name: str, kind: type[body.Ordered]) -> Handler:
    async def accept(service: Service, request: Request, raw: bytes) -> Response:
        return _future(service.ordered(name, body.read(kind, raw), raw))

    return accept


async def _load_weights(service: Service, request: Request, raw: bytes) -> Response:
    return _future(service.load_weights(body.read(body.LoadWeights, raw), raw))


async def _retrieve(service: Service, request: Request, raw: bytes) -> Response:
    ident = body.read(body.Retrieve, raw).request_id
    finished = await service.result(ident, POLL)
    if finished is None:
        return JSONResponse({"type": "try_again", "request_id": ident, "queue_state": "active"}, 408)
    return Response(finished.content, media_type=_PROTOBUF if finished.is_protobuf else "application/json")


# Checkpoints


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


_TYPES = {"weights": "training", "sampler_weights": "sampler"}


def _shown(row: Row) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}", "checkpoint_type": _TYPES[row["kind"]],
        "time": _iso(row["created"]), "tinker_path": row["path"], "size_bytes": row["size"], "public": False,
        "user_metadata": json.loads(row["facts"]), "expires_at": _iso(row["expires"]),
    }  # fmt: skip


def _page(request: Request, rows: list[Row]) -> tuple[list[Row], dict[str, int]]:
    limit, offset = (_number(request, name, default) for name, default in (("limit", 20), ("offset", 0)))
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Refused(400, f"{name}: must be a whole number of at least 0, got {text[:40]!r}")
    return int(text)


_LISTED = "SELECT * FROM checkpoints WHERE listed"


async def _list_checkpoints(service: Service, request: Request, raw: bytes) -> Response:
    rows, cursor = _page(request, service.journal.rows(f"{_LISTED} ORDER BY created DESC"))
    return JSONResponse({"checkpoints": [_shown(row) for row in rows], "cursor": cursor})


async def _list_of_run(service: Service, request: Request, raw: bytes) -> Response:
    model = service.model(request.path_params["run"])["model"]
    rows = service.journal.rows(f"{_LISTED} AND model = ? ORDER BY created DESC", model)
    return JSONResponse({"checkpoints": [_shown(row) for row in rows]})


def _run(service: Service, row: Row) -> dict[str, Any]:
    adapter, model = json.loads(row["adapter"]), row["model"]
    last = service.journal.row("SELECT max(created) AS last FROM requests WHERE owner = ?", model)
    newest = {
        kind: service.journal.row(f"{_LISTED} AND model = ? AND kind = ? ORDER BY created DESC", model, kind)
        for kind in _TYPES
    }
    return {
        "training_run_id": model, "base_model": service.names[0], "model_owner": "local", "is_lora": True,
        "lora_rank": adapter["rank"], "last_request_time": _iso((last and last["last"]) or row["created"]),
        "last_checkpoint": newest["weights"] and _shown(newest["weights"]),
        "last_sampler_checkpoint": newest["sampler_weights"] and _shown(newest["sampler_weights"]),
        "user_metadata": json.loads(row["facts"]),
    }  # fmt: skip


async def _list_runs(service: Service, request: Request, raw: bytes) -> Response:
    rows, cursor = _page(request, service.journal.rows("SELECT * FROM models ORDER BY created DESC"))
    return JSONResponse({"training_runs": [_run(service, row) for row in rows], "cursor": cursor})


async def _get_run(service: Service, request: Request, raw: bytes) -> Response:
    return JSONResponse(_run(service, service.model(request.path_params["run"])))


async def _weights_info(service: Service, request: Request, raw: bytes) -> Response:
    checkpoint = service.checkpoint(body.read(body.OfPath, raw).tinker_path)
    adapter = json.loads(service.model(checkpoint["model"])["adapter"])
    trained = {name: adapter[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return JSONResponse(
        {"base_model": service.names[0], "is_lora": True, "lora_rank": adapter["rank"], **trained}
    )  # fmt: skip


def _path(request: Request) -> str:
    return "tinker://{run}/{kind}/{name}".format(**request.path_params)


async def _delete(service: Service, request: Request, raw: bytes) -> Response:
    service.delete(_path(request))
    return Response(status_code=204)


async def _ttl(service: Service, request: Request, raw: bytes) -> Response:
    seconds = body.read(body.Ttl, raw).ttl_seconds
    service.expire(_path(request), seconds)
    return Response(status_code=204)


ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/healthz"): _health,
    ("POST", "/client/config"): _client_config,
    ("POST", "/client/dynamic_config"): _dynamic_config,
    ("GET", "/get_server_capabilities"): _capabilities,
    ("POST", "/telemetry"): _telemetry,
    ("GET", "/metrics"): _metrics,
    ("POST", "/create_session"): _create_session,
    ("POST", "/session_heartbeat"): _heartbeat,
    ("POST", "/sessions/{session}/finish"): _finish,
    ("GET", "/sessions/{session}"): _get_session,
    ("GET", "/sessions"): _list_sessions,
    ("POST", "/create_sampling_session"): _create_sampler,
    ("POST", "/join_sampling_session"): _join_sampler,
    ("GET", "/samplers/{sampler}"): _get_sampler,
    ("POST", "/asample"): _sample,
    ("POST", "/cancel_future"): _cancel,
    ("POST", "/create_model"): _create_model,
    ("POST", "/get_info"): _get_info,
    ("POST", "/unload_model"): _unload,
    ("POST", "/forward_backward"): _forward_backward,
    ("POST", "/optim_step"): _ordered("optim_step", body.OptimStep),
    ("POST", "/save_weights"): _ordered("save_weights", body.SaveWeights),
    ("POST", "/save_weights_for_sampler"): _ordered("save_for_sampler", body.SaveForSampler),
    ("POST", "/load_weights"): _load_weights,
    ("POST", "/retrieve_future"): _retrieve,
    ("GET", "/checkpoints"): _list_checkpoints,
    ("GET", "/training_runs"): _list_runs,
    ("GET", "/training_runs/{run}"): _get_run,
    ("GET", "/training_runs/{run}/checkpoints"): _list_of_run,
    ("DELETE", "/training_runs/{run}/checkpoints/{kind}/{name}"): _delete,
    ("PUT", "/training_runs/{run}/checkpoints/{kind}/{name}/ttl"): _ttl,
    ("POST", "/weights_info"): _weights_info,
}
_LOCAL = "this server has one user and one project"
UNSUPPORTED: Mapping[tuple[str, str], str] = {
    ("POST", "/auth/token"): f"{_LOCAL}; use its API key itself",
    ("POST", "/retrieve_futures"): "results are retrieved one by one here, as client/config says",
    (
        "POST",
        "/create_custom_loss",
    ): "losses are not run on the server; forward_backward_custom runs them in the client",
    ("POST", "/save_weights_external"): "checkpoints are directories in peft's format already, on this server's disk",
    ("POST", "/copy_weights"): f"{_LOCAL}; load the checkpoint by its own path",
    (
        "GET",
        "/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls",
    ): "checkpoints are on this server's disk",
    ("PUT", "/sessions/{session}/project"): _LOCAL,
    ("POST", "/sessions/search"): "sessions are not searched here; list them",
    ("GET", "/sessions/{session}/trace_export"): "traces are in the run directory: treadle export-traces",
    ("POST", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): _LOCAL,
    ("DELETE", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): _LOCAL,
    ("GET", "/audit"): f"{_LOCAL}, and no audit log",
    ("GET", "/billing/usage/events"): "nothing is billed here",
    ("POST", "/billing/usage/events"): "nothing is billed here",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed here",
    ("POST", "/billing/usage/checkpoints/current"): "nothing is billed here",
}
