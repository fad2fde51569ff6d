"""Requests and answers, independent of the dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from treadle.core.errors import TreadleError
from treadle.core.types import Form, FunctionCall, Message, Step, StopReason, ToolCall, arguments_text
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import Tool
from treadle.rollout.config import ImagesConfig
from treadle.rollout.session import CallOptions, OtherReply, Reply

AnyReply = Reply | OtherReply
Json = dict[str, Any]


class ApiError(TreadleError, ValueError):
    """Raised for a request to be answered by an error. param: field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, in any dialect.

    instructions: a system message before all others, not repeated by requests that continue this one. prompts: prompts
    of raw completions, each text or ids; messages and tools are then ignored. choices: samples per prompt. previous: id
    of an earlier response that the messages follow. thoughts: whether the answer shows them. left_out: types of tools
    not described to the model. echoed: fields that the answer repeats.
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    instructions: str = ""
    prompts: tuple[str | Sequence[int], ...] | None = None
    options: CallOptions = field(default_factory=CallOptions)
    choices: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    previous: str | None = None
    thoughts: bool = True
    left_out: tuple[str, ...] = ()
    echoed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The record for answering a request and its retries. created: seconds since 1970."""

    ident: str
    created: int
    request: CompletionRequest
    replies: Sequence[AnyReply]
    renderer: ChatRenderer

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, counting each distinct prompt once."""
        return sum(reply.prompt_tokens for reply in self.replies[:: self.request.choices])

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    def bytes_of(self, reply: AnyReply) -> list[bytes]:
        """Return the bytes of each sampled token."""
        return self.renderer.token_bytes.of(step_of(reply).completion_ids.tolist())

    def ids_of(self, reply: AnyReply) -> Json:
        """Return the fields with the ids of prompt and completion, if requested."""
        if not self.request.token_ids:
            return {}
        step = step_of(reply)
        return {"prompt_token_ids": step.prompt_ids.tolist(), "token_ids": step.completion_ids.tolist()}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Translates one API. prefix: prefix of its answers' ids.

    read: validates and converts a body, with such images, or raises ApiError. write: builds the body of the response,
    events: the same as server-sent events. error: builds the body of an error, error_event: an error within a started
    stream.
    """

    prefix: str
    read: Callable[[Json, ImagesConfig], CompletionRequest]
    write: Callable[[Answer], Json]
    events: Callable[[Answer], Iterator[str]]
    error: Callable[[ApiError], Json]
    error_event: Callable[[ApiError], str]


def step_of(reply: AnyReply) -> Step:
    """Return the token-level record; requests for it are refused if a model does not provide one."""
    assert reply.step is not None
    return reply.step


def finish_reason(reply: AnyReply) -> str:
    """Return OpenAI's finish reason of a completion."""
    if reply.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def add_thought(message: Message, thought: str) -> None:
    message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), thought]))


def tool_call(ident: str, name: str, arguments: Any) -> ToolCall:
    return ToolCall(id=ident, type="function", function=FunctionCall(name=name, arguments=arguments_text(arguments)))


def named_event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


M = TypeVar("M", bound="RequestModel")
T = TypeVar("T")

_COLDEST = 0.01  # division by less overflows; 0 itself is greedy
_NEUTRAL: dict[str, Any] = {
    **{"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0},
    **{"stop_token_ids": [], "allowed_token_ids": [], "bad_words": [], "logits_processors": []},
    **{"ignore_eos": False, "use_beam_search": False},
}
"""Sampling options unsupported by all engines here, with their neutral values."""
_ID = re.compile("[0-9]{1,9}")
_KINDS = {
    "tuple_type": "Input should be an array",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "Input should be an object"),
    "too_short": "Array should not be empty",
}
_NO_VALUE = ("missing", "union_tag_invalid", "union_tag_not_found", "request")  # errors that do not show the value


class RequestModel(BaseModel):
    """Base of objects in requests. Unknown fields are ignored; null counts as missing."""

    model_config = {"extra": "ignore", "frozen": True}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {key: value for key, value in data.items() if value is not None}


def read(model: type[M], body: Json, images: ImagesConfig | None = None) -> M:
    """Validate a request. images: which it may have. Raises ApiError (400), naming the first wrong field."""
    try:
        return model.model_validate(body, context=images)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = _KINDS.get(first["type"], first["msg"])  # pydantic names Python's types
        text = text if first["type"] in _NO_VALUE else f"{text}, got {shown(first['input'])}"
        discriminator = first.get("ctx", {}).get("discriminator", "").strip("'")  # field of a union's wrong tag
        param = _path(body, first["loc"] + ((discriminator,) if discriminator else ()))
        raise ApiError(400, f"{param}: {text}", param) from error


def _path(value: Any, location: tuple[int | str, ...]) -> str:
    """Format `messages[0].content`. Keys missing in the body name members of unions, except the last one."""
    path = ""
    for at, key in enumerate(location):
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and (key in value or at == len(location) - 1):
            path, value = f"{path}.{key}", value.get(str(key))
    return path.removeprefix(".")


def problem(text: str) -> PydanticCustomError:
    """Make an error with this exact text, to raise in a validator."""
    return PydanticCustomError("request", "{text}", {"text": text})


def shown(value: Any, limit: int = 60) -> str:
    """Format a value for an error message, cut to `limit` characters (before formatting: it may be huge)."""
    if isinstance(value, str):
        text = repr(_cut(value, limit))
    elif isinstance(value, list | tuple):
        text = repr([_cut(each, limit) if isinstance(each, str) else each for each in value[:limit]])
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = f"{value!r:.{limit}}" if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _cut(text: str, limit: int) -> str:
    """Cut a text; of a data URL, keep its type alone."""
    return f"{text[:limit].partition(',')[0]},..." if text[:5].lower() == "data:" else text[:limit]


def _unsupported(value: Any) -> Any:
    if value:
        raise problem(f"not supported here, got {shown(value)}; leave it out")
    return value


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict()]
Object = dict[str, Any]
Unsupported = Annotated[Any, AfterValidator(_unsupported)]
"""A feature unsupported by all engines here; only null, false and empty values are allowed."""
Length = Annotated[Integer, Field(ge=1, le=2**31)]
Choices = Annotated[Integer, Field(ge=1, le=128)]
Several = Annotated[tuple[T, ...], Field(fail_fast=True)]
SomeOf = Annotated[tuple[T, ...], Field(min_length=1, fail_fast=True)]
StopStrings = Annotated[
    Several[Annotated[Text, Field(min_length=1)]],
    Field(max_length=64),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


AS_PARTS = BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)
"""Parse a text as a list of one part."""


def _parsed(value: Any) -> Any:
    """Parse a schema that is sent as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise problem(f"is not JSON: {error}") from error


Schema = Annotated[Object, BeforeValidator(_parsed)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]


class TextFormat(RequestModel):
    type: Literal["text"]


class ObjectFormat(RequestModel):
    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """JSON by a schema. It is followed whether or not `strict` is set."""

    type: Literal["json_schema"]
    content: Annotated[Object, Field(alias="schema")]


class NamedSchema(RequestModel):
    content: Annotated[Object, Field(alias="schema")]


class NamedSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


AnyFormat = TextFormat | ObjectFormat | SchemaFormat | NamedSchemaFormat
Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
ChatFormat = Annotated[TextFormat | ObjectFormat | NamedSchemaFormat, Field(discriminator="type")]


def form_of(answer: AnyFormat | None, where: str) -> Form | None:
    """Return the form that a field asks for. where: its name."""
    match answer:
        case ObjectFormat():
            return Form.json({"type": "object"}, where)
        case SchemaFormat():
            return Form.json(answer.content, f"{where}.schema")
        case NamedSchemaFormat():
            return Form.json(answer.json_schema.content, f"{where}.json_schema.schema")
    return None


class StructuredOutputs(RequestModel):
    """vLLM's; one of its fields."""

    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: Flag = False
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None


class StreamOptions(RequestModel):
    include_usage: Flag = False


class SamplingRequest(RequestModel):
    """Fields common to all dialects: the model to call, and sampling options."""

    model: Text = ""
    stream: Flag = False
    return_token_ids: Flag = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=2**20)] = {}
    # vLLM's extensions
    min_tokens: Any = None
    stop_token_ids: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    ignore_eos: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Schema | None = None  # its older names
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    prompt_logprobs: Unsupported = None

    def form(self, *others: Form | None) -> Form | None:
        """Return what the answer must look like; others: by the dialect's own fields. Raises ApiError for several."""
        asked, where = self.structured_outputs, "structured_outputs"
        forms = [
            *others,
            *_forms(asked.json_schema, asked.regex, asked.choice, asked.grammar, f"{where}."),
            Form.json({"type": "object"}, f"{where}.json_object") if asked.json_object else None,
            *_forms(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_"),
        ]
        first, *more = [*(form for form in forms if form is not None), None]
        if first is not None and more[0] is not None:
            raise ApiError(
                400, f"{more[0].where}: the answer must already follow {first.where}; give one", more[0].where
            )
        return first

    def overrides(self, max_tokens: int | None, stop: tuple[str, ...]) -> dict[str, Any]:
        """Collect the fields of SamplingParams set by the client, and options unknown to engines here."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),  # some clients send -1 for all
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed % 2**63,
            "max_tokens": max_tokens,
            "stop": stop or None,
        }
        overrides = {name: value for name, value in fields.items() if value is not None}
        if 0 < overrides.get("temperature", 0) < _COLDEST:
            overrides["temperature"] = _COLDEST
        if bias := {token: by for token, by in self.logit_bias.items() if by != 0}:
            others = (
                f"{by:g} for {token!r:.20}" for token, by in bias.items() if by != -100 or not _ID.fullmatch(token)
            )
            other = next(others, None)
            overrides["logit_bias"] = tuple(sorted(map(int, bias))) if other is None else other
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) not in (None, neutral):
                overrides[name] = shown(value)
        return overrides


def _forms(
    schema: Object | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None, prefix: str
) -> Iterator[Form]:
    """Yield the forms of vLLM's fields. prefix: of their names."""
    if schema is not None:
        yield Form.json(schema, f"{prefix}json")
    if regex is not None:
        yield Form("regex", regex, f"{prefix}regex")
    if choice is not None:
        yield Form.choice(choice, f"{prefix}choice")
    if grammar is not None:
        yield Form("grammar", grammar, f"{prefix}grammar")
