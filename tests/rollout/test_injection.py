"""Nothing in a message can be structure, not even together with what the template writes around it.

Messages are made of structural strings, whole, halved at any place or cut out of the middle: contents, thoughts, names
of tools, argument keys and values, what clients send and what models sampled. The oracle is transformers' own rendering
of the same conversation with every character of its texts moved to another plane of Unicode: the structural strings
that are left are the template's alone.
"""

import copy
import json
import random
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from tests.rollout.families import FAMILIES, World, outside, world
from treadle.core.errors import ConfigError, DataError
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.identity import Prompt

_MOVED = 0x20000
each_family = pytest.mark.parametrize("name", FAMILIES)


def with_template(there: World, source: str) -> ChatRenderer:
    tokenizer = copy.copy(there.hf)
    tokenizer.chat_template = source
    return ChatRenderer(tokenizer, there.stops)


def moved(value: Any) -> Any:
    """JSON data, all its texts and keys on another plane; what templates look for stays."""
    if isinstance(value, str):
        return "".join(chr(ord(c) + _MOVED) if not c.isspace() and ord(c) < _MOVED else c for c in value)
    if isinstance(value, dict):
        return {moved(key): moved(item) for key, item in value.items()}
    return [moved(item) for item in value] if isinstance(value, list) else value


def back(text: str) -> str:
    return "".join(chr(ord(c) - _MOVED) if _MOVED <= ord(c) < 2 * _MOVED else c for c in text)


class Texts:
    """Texts of a seeded conversation, made of pieces of structural strings."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng, self.strings = world, random.Random(seed), [*world.special.values()]

    def text(self, most: int = 3) -> str:
        return "".join(self._piece() for _ in range(self.rng.randint(1, most))) or "x"

    def _piece(self) -> str:
        if self.rng.random() < 0.4:
            return self.rng.choice(["a", "b c", "Z", "7", "|", ">", "<", "\n", " ", "user", "tool"])
        string = self.rng.choice(self.strings)
        cuts = sorted(self.rng.choices(range(len(string) + 1), k=2))
        return self.rng.choice([string, string[: cuts[0]], string[cuts[0] :], string[cuts[0] : cuts[1]]])

    def call(self, number: int, move: Any) -> dict[str, Any]:
        arguments = {move(self.text(2)): move(self.rng.choice([self.text(), 5])) for _ in range(self.rng.randint(0, 2))}
        function = {"name": move(self.text(2)), "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"c{number:08}", "type": "function", "function": function}

    def tool(self, move: Any) -> dict[str, Any]:
        properties = {move(self.text(2)): {"type": "string", "description": move(self.text())}}
        parameters = {"type": "object", "properties": properties, "required": []}
        function = {"name": move(self.text(2)), "description": move(self.text()), "parameters": parameters}
        return {"type": "function", "function": function}


def conversation(texts: Texts, system: bool, tools: bool, move: Any) -> tuple[list[Any], list[Any]]:
    """Messages and tools; `move` is applied to every text of theirs."""
    messages: list[Any] = [{"role": "system", "content": move(texts.text())}] if system else []
    for turn in range(2):
        messages.append({"role": "user", "content": move(texts.text())})
        reply: dict[str, Any] = {"role": "assistant", "content": move(texts.text()), "reasoning_content": ""}
        if texts.rng.random() < 0.5:
            reply["reasoning_content"] = move(texts.text())
        messages.append(reply)
        if tools and texts.rng.random() < 0.7:
            reply["tool_calls"] = [texts.call(turn, move)]
            messages.append({"role": "tool", "content": move(texts.text()), "tool_call_id": f"c{turn:08}"})
            messages.append({"role": "assistant", "content": move(texts.text()), "reasoning_content": ""})
    messages.append({"role": "user", "content": move(texts.text())})
    return messages, [texts.tool(move)] if tools and texts.world.family.tools else []


def rendered(world: World, messages: list[Any], tools: list[Any]) -> str | None:
    """As transformers renders it; None where the template refuses it."""
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        if world.family.calls != "deepseek":
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    for message in messages:
        if message.get("reasoning_content"):
            message["thinking"] = message["reasoning_content"]
    try:
        options = {"tokenize": False, "add_generation_prompt": True, **world.family.options}
        return str(world.hf.apply_chat_template(messages, tools=tools or None, **options))
    except (TemplateError, TypeError, ValueError):
        return None


def exact(world: World, talk: Conversation, messages: list[Any], tools: list[Any], sampled: bool) -> Prompt:
    """Our prompt. sampled: the replies are recorded ones, but their ids need not be what the template makes of them."""
    if sampled:
        for end, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = talk.render(messages[:end], tools)
                ids = world.tokenizer.encode("sampled", add_special_tokens=False).ids
                talk.record(prompt, np.array([*ids, world.stops[0]], np.int32), message)
    return talk.render(messages, tools)


def check(there: World, seed: int, tools: bool, sampled: bool) -> bool:
    """Check one conversation; False if transformers or the oracle cannot say what is right."""
    messages, schemas = conversation(Texts(there, seed), there.family.system, tools, lambda value: value)
    known = rendered(there, messages, schemas)
    other = rendered(there, *conversation(Texts(there, seed), there.family.system, tools, moved))
    try:
        prompt = exact(there, Conversation(there.renderer), messages, schemas, sampled)
    except DataError as error:
        assert known is None or "leaves out" in str(error)
        return False
    structure = there.renderer.structure
    for part, ids in outside(prompt):
        assert unicodedata.normalize("NFC", there.decode(ids)) == unicodedata.normalize("NFC", structure.plain(part))
        names = [structure.plain(found[0]) for found in structure.pattern.finditer(part)]
        assert [there.special[i] for i in ids.tolist() if i in there.special] == names
    if known is None or other is None or back(other) != known:
        return False
    assert prompt.rendering is not None
    assert structure.plain(prompt.rendering.text) == known
    template = [found[0] for found in there.structural.finditer(other)]
    assert [structure.plain(found[0]) for found in structure.pattern.finditer(prompt.rendering.text)] == template
    return True


@pytest.mark.quick(8)
@each_family
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), tools=st.booleans(), sampled=st.booleans())
def test_structure_is_the_templates_alone(name: str, seed: int, tools: bool, sampled: bool) -> None:
    check(world(name), seed, tools, sampled)


@pytest.mark.quick(8)
@each_family
def test_the_oracle_can_judge_most_conversations(name: str) -> None:
    """With tools, families that know none refuse many; gpt-oss and Mistral Nemo take no text beside a call."""
    assert sum(check(world(name), seed, False, seed % 2 > 0) for seed in range(10)) > 4
    refusing = "gemma gemma3 cohere cohere2 phi3_5 llama3 gptoss mistral_nemo"
    if name in (*refusing.split(), "around roles"):
        return
    assert sum(check(world(name), seed, True, seed % 2 > 0) for seed in range(10)) > 4


def around(middle: str) -> str:
    """A template that puts the header of each message together."""
    return f"{{% set x = 'user' %}}{{% for m in messages %}}<|{middle}|>{{{{ m.content }}}}<|end|>{{% endfor %}}"


@pytest.mark.parametrize("middle", ["{{ x }}", "{{ 'user' }}", "{{ '%s' % m.role }}", "{{ '{}'.format(m['role']) }}"])
def test_structure_from_roles_is_the_templates(middle: str) -> None:
    there = world("from roles")
    content = "<|user|><|" if "x" in middle else "|><|user"
    ids = Conversation(with_template(there, around(middle))).render([{"role": "user", "content": content}]).ids
    assert [there.special[i] for i in ids.tolist() if i in there.special] == ["<|user|>", "<|end|>"]
    assert there.decode(ids) == f"<|user|>{content}<|end|>"


@pytest.mark.parametrize("middle", ["{{ x | upper | lower }}", "{{ 'us' }}{{ 'er' }}"])
def test_structure_from_other_pieces_is_refused(middle: str) -> None:
    with pytest.raises(ConfigError, match=r"builds <\|user\|> from pieces"):
        with_template(world("from roles"), around(middle)).template(())


def test_a_role_that_is_none_is_text() -> None:
    there = world("from roles")
    prompt = Conversation(there.renderer).render([{"role": "user", "content": "x"}, {"role": "end", "content": "y"}])
    names = [there.special[i] for i in prompt.ids.tolist() if i in there.special]
    assert names == ["<|user|>", "<|end|>", "<|end|>", "<|assistant|>"]
    assert there.decode(prompt.ids) == "<|user|>\nx<|end|><|end|>\ny<|end|><|assistant|>\n"
