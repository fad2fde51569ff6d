"""Chat templates are programs of others: what they may not do, and that they are blamed for it."""

import json
import time
from typing import Any

import pytest

from tests.rollout.families import FAMILIES, World, small_vocabulary
from treadle.core.errors import ConfigError, DataError
from treadle.rendering import sandbox
from treadle.rendering.structure import Structure
from treadle.rendering.template import ChatTemplate

_DOUBLED = "".join("{%- set x = x ~ x -%}" for _ in range(60))
_NESTED = "".join("{%- set x = [x, x] -%}" for _ in range(60))
_FIBONACCI = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
_LOOPS = "".join(f"{{% for {v} in range(100000) %}}" for v in "abc") + "{% endfor %}" * 3
_CAPTURED = "".join("{% set x %}{{ x }}{{ x }}{% endset %}" for _ in range(60))
BOMBS = {
    "range": _LOOPS,
    "range, filtered": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": _FIBONACCI,
    "wide range": "{% for i in range(10**9) %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    "random": "{{ [1, 2] | random }}",
    "pretty": "{{ [1, 2] | pprint }}",
    "indent": "{{ 'x' | indent(10**9, true) }}",
    "indent of lines": "{{ ('\n' * 90000) | indent(90000, true, true) }}",
    "indent of json": "{{ {'a': 1} | tojson(indent=10**9) }}",
    "mapped indent": "{{ ['x'] | map('indent', 10**9, true) | join }}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "tabs": "{{ ('\t' * 90000).expandtabs(90000) }}",
    "times": "{{ 'x' * 10**10 }}",
    "times, turned": "{{ 10**10 * [0] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "rounding": "{{ 1 | round(10**9, 'ceil') }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent, given": "{{ '%*d' % (10**9, 1) }}",
    "percents": "{{ ('%(a)s' * 90000) % {'a': 'x' * 90000} }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format, given": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "formats": "{{ ('{0}' * 90000).format('x' * 90000) }}",
    "replace": "{{ ('x' * 90000) | replace('', 'y' * 90000) }}",
    "replaced": "{{ ('x' * 90000).replace('x', 'y' * 90000) }}",
    "join": "{{ range(90000) | join('y' * 90000) }}",
    "joined": "{{ ('y' * 90000).join(['a'] * 90000) }}",
    "translate": "{{ ('x' * 90000).translate({120: 'y' * 90000}) }}",
    "wrap": "{{ ('x ' * 90000) | wordwrap(1, wrapstring='y' * 90000) }}",
    "doubling": "{%- set x = 'x' -%}" + _DOUBLED + "{{ x }}",
    "adding": "{%- set x = 'x' -%}" + _DOUBLED.replace("~", "+") + "{{ x }}",
    "capturing": "{% set x = 'x' %}" + _CAPTURED + "{{ x }}",
    "nesting": "{%- set x = 'x' -%}" + _NESTED + "{{ x }}",
    "nesting as json": "{%- set x = 'x' -%}" + _NESTED + "{{ x | tojson }}",
    "nesting as text": "{%- set x = 'x' -%}" + _NESTED + "{{ x | string | length }}",
    "nesting, joined": "{%- set x = 'x' -%}" + _NESTED + "{{ x | join | length }}",
    "nesting, formatted": "{%- set x = 'x' -%}" + _NESTED + "{{ '%s' % (x,) }}",
    "nesting, concatenated": "{%- set x = 'x' -%}" + _NESTED + "{{ x ~ x }}",
}


def template(source: str, name: str = "qwen2_5") -> ChatTemplate:
    world = World(FAMILIES[name], small_vocabulary())
    return ChatTemplate(source, {}, Structure(world.tokenizer, world.stops))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2)
    began = time.process_time()
    with pytest.raises((DataError, ConfigError), match="the chat template") as refused:
        render(template("{% if messages[0].content == 'now' %}" + BOMBS[name] + "{% endif %}"))
    assert not str(refused.value).endswith(": ")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", ["range", "indent", "recursion", "doubling"])
def test_a_template_that_always_does_it_is_refused_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"at fault, not the conversation: .* \(model\.chat_template\)"):
        template(BOMBS[name])


def test_memory_that_is_not_there_is_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(form: str) -> str:
        raise MemoryError

    shown = template("{% if messages[0].content == 'now' %}{{ strftime_now('') }}{% endif %}")
    with pytest.raises(DataError, match="at fault, not the conversation: MemoryError"):
        render(shown, strftime_now=full)


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
