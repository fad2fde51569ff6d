"""Chat templates: what they may do, and the errors of those that fail."""

import json
from typing import Any

import pytest

from tests.rollout.families import FAMILIES, World, small_vocabulary
from treadle.core.errors import ConfigError, DataError
from treadle.rendering.structure import Structure
from treadle.rendering.template import ChatTemplate


def template(source: str, name: str = "qwen2_5") -> ChatTemplate:
    world = World(FAMILIES[name], small_vocabulary())
    return ChatTemplate(source, {}, Structure(world.tokenizer, world.stops))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "maximum recursion depth exceeded"),
        ("{{ messages.__class__.mro() }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    ],
)
def test_what_a_template_fails_with_is_said_and_that_it_is_the_template(source: str, why: str) -> None:
    with pytest.raises(DataError, match="the chat template refuses a conversation of user: ") as refused:
        render(template(source))
    assert why in str(refused.value)


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ {'a': [1]} | tojson(indent=1) }}"
        "{% generation %}{{ 'a' }}{% endgeneration %}{% for i in range(9) %}{% if i == 1 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}"
    )
    assert render(template(source)) == "2" + json.dumps({"a": [1]}, indent=1) + "a0"


@pytest.mark.parametrize("source", ["{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ namespace(_a=1) }}"])
def test_namespaces_lead_nowhere(source: str) -> None:
    with pytest.raises(DataError, match="the chat template refuses"):
        render(template(source))


def test_what_it_is_given_is_not_changed() -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(DataError, match="the chat template refuses"):
        template("{{ dict.update(messages[0], content='y') }}").render(messages, None, {}, generation_prompt=True)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ x | nothing }}"])
def test_one_that_cannot_be_compiled_is_refused_in_one_sentence(source: str) -> None:
    with pytest.raises(ConfigError, match="the chat template"):
        template(source)


def render(shown: ChatTemplate, **options: Any) -> str:
    return shown.render([{"role": "user", "content": "now"}], None, options, generation_prompt=True)
