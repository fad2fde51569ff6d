"""From what a reply must look like to the grammar of its whole turn, in llguidance's Lark.

    thought (as the reply parser reads it)    content: a `Form`, or free text    tool calls: by schemas of strict tools

Calls are written as the reply parser reads them, so that the agent gets what was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import DataError, FormError
from treadle.core.types import Form
from treadle.rendering.grammars import Grammars, quoted
from treadle.rendering.replies import (
    CALL,
    CALL_END,
    Parser,
    ReplyParser,
    Tool,
    glm_call,
    json_call,
    llama_calls,
    parser_name,
    xml_call,
)

_GAP = r"/\n{0,2}/"
_ANY = r"/(.|\n)*/"
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a reply must look like. tools: offered to the model. choice: `auto`, `required`, or the tool to call.
    several: whether it may call more than one. begun: whether the prompt has opened a thought.
    """

    form: Form | None = None
    tools: Sequence[Tool] = ()
    choice: str = "auto"
    several: bool = True
    begun: bool = False

    @property
    def is_free(self) -> bool:
        """Return whether any text will do."""
        return not self.demands and not any(map(_is_strict, self.tools))

    @property
    def demands(self) -> bool:
        """Return whether not every text without a call will do."""
        return self.form is not None or self.choice != "auto"


def turn_grammar(turn: Turn, parse: ReplyParser, grammars: Grammars, stop_ids: Sequence[int]) -> str:
    """Return the grammar of a turn, which one of the stop tokens ends; "" if any text will do.

    Raises DataError, with the place, for a form or schema that is not valid, not satisfiable or not implemented by
    llguidance; for an unknown tool; and for a reply parser whose format of calls has no grammar here.
    """
    if turn.is_free:
        return ""
    if not isinstance(parse, Parser):
        raise DataError(
            f"there is no grammar for replies that the parser {parser_name(parse)} reads; use a built-in one "
            "(rollout.reply_parser; --parser of treadle serve), or ask for no form, strict tool or tool_choice"
        )
    writer = _Writer(grammars)
    if turn.form is not None and turn.choice == "auto" and not turn.tools:
        body = writer.form(turn.form)
    else:
        writer.rules["call"] = " | ".join(writer.calls(turn, parse))
        alone = _read(parse) is llama_calls  # a call has no tags, and is the whole reply
        opening = "" if alone else grammars.literal(CALL)
        more = f" ({_GAP} {opening} call)*" if turn.several and not alone else ""
        if turn.choice != "auto":
            body = f"{opening} call{more}"
        elif turn.form is not None:
            body = f"{writer.form(turn.form)} | {opening} call{more}"
        else:
            body = f"{writer.before_no_call()} | call" if alone else writer.text_or(CALL, f"call{more} {_GAP}")
    end = f"<[{','.join(map(str, stop_ids))}]>" if stop_ids else ""
    lines = [f"start: {writer.thought(turn, parse)} body {end}", f"body: {body}"]
    return "\n".join([*lines, *(f"{name}: {rule}" for name, rule in writer.rules.items())])


def _is_strict(tool: Tool) -> bool:
    return tool.get("function", {}).get("strict") is True


def _read(parse: Parser) -> Callable[..., Any] | None:
    """Return the reader of a parser's calls: of the function itself, or in its tags."""
    return getattr(parse.calls, "keywords", {}).get("read", parse.calls)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes parts of one grammar, as expressions in Lark. rules: those that they refer to, by name."""

    grammars: Grammars
    rules: dict[str, str] = field(default_factory=dict)

    def thought(self, turn: Turn, parse: Parser) -> str:
        if not parse.thoughts:
            return ""
        opening, closing = parse.tags
        rest = f"{self.until(closing)} {_GAP}"
        return rest if turn.begun else f"({self.grammars.literal(opening)} {rest})?"

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that; without the tokenizer's other added tokens."""
        if self.grammars.is_token(end.strip()):
            return f"{self._rule(_ANY)} {self.grammars.literal(end.strip())}"
        return self._rule(rf"/(.|\n)*{_regex(re.escape(end))}/", lazy=True)

    def text_or(self, begin: str, then: str) -> str:
        """Any text without `begin`, or text up to it and what follows."""
        free = _ANY if self.grammars.is_token(begin) else rf"{_ANY} & ~/(.|\n)*{_regex(re.escape(begin))}(.|\n)*/"
        return f"{self._rule(free)} | {self.until(begin)} {then}"

    def before_no_call(self) -> str:
        """Any text that is not read as a call for its first character."""
        return self._rule(r"/([ \n]*[^ \n{](.|\n)*)?/")

    def _rule(self, expression: str, lazy: bool = False) -> str:
        known = (name for name, rule in self.rules.items() if rule == expression)
        name = next(known, f"{'until' if lazy else 'TEXT'}{len(self.rules)}{'[lazy]' if lazy else ''}")
        self.rules[name] = expression
        return name.removesuffix("[lazy]")

    def form(self, form: Form) -> str:
        match form.kind:
            case "json":
                return self.schema(json.loads(form.text), form.where)
            case "regex":
                return self._checked(f"/{_regex(form.text)}/", form.where)
            case "choice":
                return "(" + " | ".join(map(self.grammars.literal, json.loads(form.text))) + ")"
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            lark = any_to_lark(form.text)
        except GbnfToLarkError as error:
            raise FormError(form.where, str(error)) from error
        return self._checked(f"%lark {{\n{lark}\n}}", form.where)

    def _checked(self, rule: str, where: str) -> str:
        if problem := self.grammars.problem(f"start: {rule}"):
            raise FormError(where, problem)
        return rule

    def schema(self, schema: Any, where: str) -> str:
        """A JSON schema. Raises DataError with the path of the innermost one that is wrong."""

        def problem(part: Any) -> str:
            return self.grammars.problem(f"start: %json {json.dumps(part)}")

        if not isinstance(schema, dict):
            raise FormError(where, f"a JSON schema must be an object, got {json.dumps(schema)[:60]}")
        part, wrong = schema, problem(schema)
        known = {name: schema[name] for name in _DEFINITIONS if name in schema}
        while wrong:
            inner = ((at, each, problem({**known, **each})) for at, each in _parts(part))
            at, part, why = next((found for found in inner if found[2]), ("", {}, ""))
            if not why:
                reason = wrong.partition("JSON schema: ")[2].partition("\n   1 |")[0]
                raise FormError(where, reason or wrong)
            where, wrong = where + at, why
        return f"%json {json.dumps(schema)}"

    def calls(self, turn: Turn, parse: Parser) -> list[str]:
        """The alternatives of a call, after its opening tag."""
        functions = [tool.get("function", {}) for tool in turn.tools]
        named = [function for function in functions if turn.choice in ("auto", "required", function.get("name"))]
        if not named:
            names = ", ".join(repr(function.get("name")) for function in functions) or "none"
            raise FormError("tool_choice", f"{turn.choice!r:.60} is not among the tools: {names}")
        write = _WRITERS.get(_read(parse))
        if write is None:
            raise DataError(
                f"there is no grammar for tool calls that the parser {parse.name} reads; use hermes, qwen_xml, glm or "
                "llama (rollout.reply_parser; --parser of treadle serve)"
            )
        return [write(self, function) for function in named]

    def json_call(self, function: Mapping[str, Any], key: str) -> str:
        """`{"name": NAME, KEY: ...}`; the arguments of a tool that is not strict are any."""
        name, parameters = function["name"], function.get("parameters") or {"type": "object"}
        if function.get("strict") is not True:
            parameters = {"type": "object"}
        opening = f'{{"name": {json.dumps(name)}, "{key}": '
        return f"{quoted(opening)} {self.schema(parameters, f'tools.{name}.parameters')} {quoted('}')}"

    def hermes(self, function: Mapping[str, Any]) -> str:
        return f"{_GAP} {self.json_call(function, 'arguments')} {_GAP} {self.grammars.literal(CALL_END)}"

    def llama(self, function: Mapping[str, Any]) -> str:
        return self.json_call(function, "parameters")

    def xml(self, function: Mapping[str, Any]) -> str:
        inner = self._arguments(function, "<parameter={}>\n", "\n</parameter>")
        begin, end = map(self.grammars.literal, (f"<function={function['name']}>\n", "</function>"))
        return " ".join([_GAP, begin, *inner, end, _GAP, self.grammars.literal(CALL_END)])

    def glm(self, function: Mapping[str, Any]) -> str:
        inner = self._arguments(function, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>")
        return " ".join([quoted(f"{function['name']}\n"), *inner, self.grammars.literal(CALL_END)])

    def _arguments(self, function: Mapping[str, Any], opening: str, closing: str) -> Iterator[str]:
        """Yield each declared argument between tags: texts as they are, other values as JSON."""
        parameters, where = function.get("parameters") or {}, f"tools.{function['name']}.parameters"
        self.schema(parameters, where)
        known = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
        for key, schema in parameters.get("properties", {}).items():
            texts = schema.get("enum", [schema["const"]] if "const" in schema else [None])
            if all(isinstance(text, str) for text in texts):
                value = f"({' | '.join(map(self.grammars.literal, texts))}) {self.grammars.literal(closing)}"
            elif schema.get("type") == "string":
                value = self.until(closing)
            else:
                value = self.schema({**known, **schema}, f"{where}.properties.{key}")
                value = f"{value} {self.grammars.literal(closing)}"
            written = f"{self.grammars.literal(opening.format(key))} {value} {_GAP}"
            yield written if key in parameters.get("required", ()) else f"({written})?"


_WRITERS: dict[Any, Callable[[_Writer, Mapping[str, Any]], str]] = {
    json_call: _Writer.hermes,
    llama_calls: _Writer.llama,
    xml_call: _Writer.xml,
    glm_call: _Writer.glm,
}
"""From the reader of a parser's calls to the writer of their grammar."""


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and content of each schema in a schema."""
    for key, value in schema.items():
        if key in ("const", "default", "enum", "examples"):
            continue
        if key in _NAMED and isinstance(value, dict):
            parts = {f".{key}.{name}": part for name, part in value.items()}
        else:
            several = value if isinstance(value, list) else []
            parts = {f".{key}": value} | {f".{key}[{at}]": part for at, part in enumerate(several)}
        yield from ((at, part) for at, part in parts.items() if isinstance(part, dict))
