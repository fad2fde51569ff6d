"""What the routes take and give, for the OpenAPI description. Requests are checked by their dialects, not by this."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


_PARTS: Schema = {"oneOf": [_TEXT, _array(_object(["type", "text"], type={"const": "text"}, text=_TEXT))]}
_IDS = _array(_number(0, 2**31 - 1, "integer"), 1)
_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": _number(0, 2),
    "top_p": _number(0.01, 1),
    "return_token_ids": _FLAG,
}
_LENGTH = _number(1, 2**20, "integer")
_STOP: Schema = {"oneOf": [{"type": "string", "minLength": 1}, _array({"type": "string", "minLength": 1})]}
_FUNCTION = _object(["name"], name=_TEXT, description=_TEXT, parameters=_OBJECT)
_CHOICE: Schema = {"enum": ["auto", "none", "required"]}

REQUESTS: dict[str, Schema] = {
    "/chat/completions": _object(
        ["messages"],
        messages=_array(_object(["role"], role={"enum": ["system", "user", "assistant", "tool"]}, content=_PARTS), 1),
        tools=_array(_object(["type", "function"], type={"const": "function"}, function=_FUNCTION)),
        tool_choice=_CHOICE,
        max_tokens=_LENGTH,
        stop=_STOP,
        n=_number(1, 4, "integer"),
        logprobs=_FLAG,
        **_SAMPLING,
    ),
    "/completions": _object(
        ["prompt"],
        prompt={"oneOf": [{"type": "string", "minLength": 1}, _IDS]},
        max_tokens=_LENGTH,
        stop=_STOP,
        n=_number(1, 4, "integer"),
        logprobs=_number(0, 1, "integer"),
        **_SAMPLING,
    ),
    "/responses": _object(
        ["input"],
        input={"oneOf": [_TEXT, _array(_object(["role", "content"], role={"enum": ["user"]}, content=_PARTS), 1)]},
        instructions=_TEXT,
        tools=_array({"allOf": [_FUNCTION, _object(["type"], type={"const": "function"})]}),
        tool_choice=_CHOICE,
        max_output_tokens=_LENGTH,
        previous_response_id=_TEXT,
        **_SAMPLING,
    ),
    "/messages": _object(
        ["messages", "max_tokens"],
        messages=_array(_object(["role", "content"], role={"enum": ["user", "assistant"]}, content=_PARTS), 1),
        system=_PARTS,
        tools=_array(_object(["name", "input_schema"], name=_TEXT, description=_TEXT, input_schema=_OBJECT)),
        max_tokens=_LENGTH,
        stop_sequences=_array({"type": "string", "minLength": 1}),
        **_SAMPLING,
    ),
}
REQUESTS["/messages/count_tokens"] = {**REQUESTS["/messages"], "required": ["messages"]}

_ERRORS = {
    400: "a request that cannot be answered",
    401: "an API key that opens no session",
    404: "a session that there is not, or not any more",
    405: "another method",
    408: "a request that stopped on its way",
    413: "too large a request",
    429: "too many requests, or bytes of them, in flight",
    503: "too many bytes in flight of all sessions, or an engine that failed",
}


def error_responses() -> dict[int | str, Schema]:
    """The error answers of any route."""
    body = {"application/json": {"schema": _object(["error"], error=_OBJECT)}}
    return {status: {"description": text, "content": body} for status, text in _ERRORS.items()}


def described(path: str) -> Schema:
    """FastAPI's arguments for a POST route."""
    answer: Schema = {"application/json": {"schema": _OBJECT}, "text/event-stream": {}}
    return {
        "responses": {200: {"description": "the answer", "content": answer}, **error_responses()},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": REQUESTS[path]}}},
        },
    }
