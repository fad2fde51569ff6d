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
        ("{{ messages[0].tools[0] }}", "'dict object' has no attribute 'tools'"),
        ("{{ nothing.content }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ messages + 1 }}", "can only concatenate list"),
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


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'x' | center(5) }}|{{ 'x'.ljust(3) }}|{{ 'x'.zfill(3) }}", "  x  |x  |00x"),
        ("{{ '%5.1f' % 2 }}{{ '%s-%s' % (1, 'a') }}{{ '{:>3}'.format(1) }}{{ '%d' | format(3) }}", "  2.01-a  13"),
        ("{{ 3 * 'ab' }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 1 + 2 }}{{ [1] + [2] }}", "ababab833[1, 2]"),
        ("{{ messages | map(attribute='role') | join(', ') }}{{ ', '.join(['a', 'b']) }}", "usera, b"),
        ("{{ messages | join(attribute='role') }}{{ 'a' ~ 1 ~ none }}", "usera1None"),
        (
            "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
            "1/3,2/3,3/3",
        ),
        ("{% for i in [1, [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "12"),
        ("{% for a in [] %}{% else %}none{% endfor %}{% for a in x %}{% endfor %}", "none"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(b=1) | tojson }}", '2{"b": 1}'),
        ("{% generation %}{{ 'a' | upper | replace('A', 'b') }}{% endgeneration %}", "b"),
        ("{{ {'a': [1]} | tojson(indent=1) }}", json.dumps({"a": [1]}, indent=1)),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "02",
        ),
    ],
)
def test_what_templates_do_stays_as_it_was(source: str, written: str) -> None:
    assert render(template(source)) == written


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
