"""The grammar of a turn allows what the reply parser reads, in its form, and nothing else."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from treadle.core.errors import DataError
from treadle.core.types import Form, SamplingParams
from treadle.rendering import replies
from treadle.rendering.forms import Turn, turn_grammar
from treadle.rendering.grammars import Grammars
from treadle.rendering.replies import Parser

END = "<|im_end|>"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"who": {"type": "string"}, "n": {"type": "integer"}, "how": {"enum": ["x", "y"]}},
    "required": ["who", "n"],
    "additionalProperties": False,
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"who": WHO, "n": N}}\n</tool_call>',
    "llama": '{"name": "look", "parameters": {"who": WHO, "n": N}}',
    "qwen_xml": "<tool_call>\n<function=look>\n<parameter=who>\nWHO\n</parameter>\n<parameter=n>\nN\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>look\n<arg_key>who</arg_key>\n<arg_value>WHO</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>N</arg_value>\n</tool_call>",
}
VOCABULARIES = ["tokenizer", "sql_tokenizer"]  # tags of thoughts as text, as tokens


@cache
def backend(vocabulary: str) -> Tokenizer:
    return Tokenizer.from_file(str(files("treadle.recipes") / vocabulary / "tokenizer.json"))


@cache
def grammars(vocabulary: str) -> Grammars:
    return Grammars(backend(vocabulary))


def tool(strict: bool = True, name: str = "look") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": PARAMETERS}}


def grammar(turn: Turn, parser: str, vocabulary: str = VOCABULARIES[0]) -> str:
    parse = getattr(replies, parser)
    return turn_grammar(turn, parse, grammars(vocabulary), backend(vocabulary).encode(END).ids)


def follows(turn: Turn, parser: str, text: str, vocabulary: str = VOCABULARIES[0]) -> bool:
    ids = np.array(backend(vocabulary).encode(text, add_special_tokens=False).ids, np.int32)
    try:
        grammars(vocabulary).check(SamplingParams(grammar=grammar(turn, parser, vocabulary)), ids)
    except DataError:
        return False
    return True


def call(parser: str, who: str, n: int | str) -> str:
    shown = who if parser in ("qwen_xml", "glm") else json.dumps(who, ensure_ascii=False)
    return CALLS[parser].replace("WHO", shown).replace("N", str(n))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("parser", CALLS)
def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(parser: str, vocabulary: str) -> None:
    turn, good = Turn(tools=(tool(),)), call(parser, "Anna B", 3)
    parse: Parser = getattr(replies, parser)
    [made] = parse(good, turn.tools)["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"who": "Anna B", "n": 3}
    assert follows(turn, parser, good + END, vocabulary)
    assert follows(turn, parser, "I do not know." + END, vocabulary)
    assert not follows(turn, parser, call(parser, "Anna", "three") + END, vocabulary)
    assert not follows(turn, parser, good.replace("look", "book") + END, vocabulary)
    assert not follows(turn, parser, good[:-5] + END, vocabulary)


@pytest.mark.parametrize("parser", CALLS)
def test_a_required_call_is_made(parser: str) -> None:
    turn = Turn(tools=(tool(strict=False), tool(strict=False, name="book")), choice="required")
    good = call(parser, "Anna", 3)
    other = good.replace("look", "book")
    assert follows(turn, parser, good + END) and follows(turn, parser, other + END)
    assert not follows(turn, parser, "no" + END)
    named = Turn(tools=turn.tools, choice="book")
    assert follows(named, parser, other + END) and not follows(named, parser, good + END)
    if parser != "llama":  # whose call is the whole reply
        assert follows(turn, parser, f"{good}\n{other}{END}")
        one = Turn(tools=turn.tools, choice="required", several=False)
        assert follows(one, parser, good + END) and not follows(one, parser, f"{good}\n{other}{END}")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_form_is_for_the_content_and_comes_after_the_thought(vocabulary: str) -> None:
    for form, good, bad in (
        (Form.json({"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}), '{"q": 5}', "{}"),
        (Form.choice(["yes", 'n"o']), 'n"o', "no"),
        (Form("regex", r"[a-c]+/\d"), "ab/7", "ab/"),
        (Form("grammar", 'start: "a" b\nb: "x" | "y"'), "ay", "a"),
        (Form("grammar", 'root ::= "a" ("x" | "y")'), "ax", "az"),
    ):
        turn = Turn(form)
        assert follows(turn, "plain", good + END, vocabulary) and not follows(turn, "plain", bad + END, vocabulary)
        assert follows(turn, "thinking", f"<think>hm</think>\n\n{good}{END}", vocabulary)
        assert follows(turn, "thinking", good + END, vocabulary)
        assert not follows(turn, "thinking", f"<think>{good}{END}", vocabulary)
        begun = Turn(form, begun=True)
        assert follows(begun, "thinking", f"hm</think>\n{good}{END}", vocabulary)
        assert not follows(begun, "thinking", good + END, vocabulary)


@pytest.mark.parametrize("strict", [True, False])
def test_a_form_and_tools_are_either_or(strict: bool) -> None:
    turn = Turn(Form.choice(["yes"]), tools=(tool(strict),))
    assert follows(turn, "hermes", "yes" + END) and follows(turn, "hermes", call("hermes", "a", 1) + END)
    assert not follows(turn, "hermes", "no" + END)


@pytest.mark.parametrize("parser", ["qwen_xml", "glm"])
@given(who=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8))
@settings(max_examples=30, deadline=None)
def test_texts_between_tags_are_any(parser: str, who: str) -> None:
    made = call(parser, who, 1) + END
    if not any(mark in who for mark in "<>"):
        assert follows(Turn(tools=(tool(),)), parser, made)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json", "{a", "needs JSON, got '{a'"),
        ("choice", "yes", "needs JSON, got 'yes'"),
        ("choice", "[]", "needs a list of texts, got '\\[\\]'"),
        ("choice", "[1]", "needs a list of texts"),
        ("jso", "{}", "the kind of a form is 'jso'; known: json, regex, choice, grammar"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_where_it_is_made(kind: Any, text: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        Form(kind, text)


@pytest.mark.parametrize("turn", [Turn(), Turn(tools=(tool(strict=False),))])
def test_what_is_free_has_no_grammar(turn: Turn) -> None:
    assert grammar(turn, "hermes") == grammar(turn, "harmony") == ""


@pytest.mark.parametrize(
    ("schema", "where", "why"),
    [
        ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items", "Unimplemented"),
        ({"anyOf": [{"type": "string"}, {"type": "objec"}]}, ".anyOf[1]", "Invalid type: objec"),
        ({"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}, ".$defs.x", "Unimplemented"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "", "Unsatisfiable schema"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(schema: Any, where: str, why: str) -> None:
    with pytest.raises(DataError, match="response_format") as refused:
        grammar(Turn(Form.json(schema, "response_format")), "plain")
    assert str(refused.value).startswith(f"response_format{where}: {why}")
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    with pytest.raises(DataError) as refused:
        grammar(Turn(tools=(strict,)), "hermes")
    assert str(refused.value).startswith(f"tools.f.parameters{where}: {why}")


@pytest.mark.parametrize(
    ("turn", "parser", "why"),
    [
        (Turn(Form("regex", "a(")), "plain", "unclosed group"),
        (Turn(Form("grammar", "start: x")), "plain", 'unknown name: "x"'),
        (Turn(Form("grammar", "nothing")), "plain", "Expected ::= at line 1"),
        (Turn(tools=(tool(),), choice="book"), "hermes", "'book' is not among the tools: 'look'"),
        (Turn(choice="required"), "hermes", "'required' is not among the tools: none"),
        (Turn(tools=(tool(),)), "thinking", "the parser thinking reads"),
        (Turn(Form.choice(["a"])), "harmony", "the parser harmony reads"),
    ],
)
def test_what_cannot_be_followed_is_refused(turn: Turn, parser: str, why: str) -> None:
    with pytest.raises(DataError, match=why.replace("(", r"\(")):
        grammar(turn, parser)
