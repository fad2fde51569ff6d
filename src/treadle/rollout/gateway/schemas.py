"""The OpenAPI description of the routes, made of the models that requests are validated by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

Schema = dict[str, Any]

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


class _Generator(GenerateJsonSchema):
    """Writes unions as `anyOf`: a function tells their members apart, which JSON schema cannot express."""

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Schema:
        described = super().tagged_union_schema(schema)
        described["anyOf"] = described.pop("oneOf")
        return described


def request_schemas(models: Mapping[str, type[BaseModel]]) -> tuple[dict[str, Schema], Schema]:
    """Return the schema of each route's request, and the components that they refer to."""
    found, shared = models_json_schema(
        [(model, "validation") for model in models.values()],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    return {path: found[model, "validation"] for path, model in models.items()}, shared.get("$defs", {})


def error_responses() -> dict[int | str, Schema]:
    """Return the OpenAPI descriptions of the error answers that any route may give."""
    error: Schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    body = {"application/json": {"schema": error}}
    return {status: {"description": text, "content": body} for status, text in _ERRORS.items()}


def described(request: Schema) -> Schema:
    """Return FastAPI's arguments for a POST route with this request."""
    answer: Schema = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {
        "responses": {200: {"description": "the answer", "content": answer}, **error_responses()},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": request}}}},
    }
