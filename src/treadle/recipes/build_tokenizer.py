"""Build a recipe's tokenizer: byte-level BPE, ChatML, one token for each name of its world.

    python -m treadle.recipes.build_tokenizer DIR             the demo's
    python -m treadle.recipes.build_tokenizer DIR sql-small   (or search-small, tools-small, look-small)

writes the three files that `transformers.AutoTokenizer.from_pretrained(DIR)` reads, and for a model that sees those of
its image processor. The copies in `recipes/*tokenizer` are frozen, because checkpoints depend on their ids; this script
shows how they were made, and a test rebuilds them.

A word with its leading space is the unit of byte-level BPE, and `VOCABULARY` leaves room to merge every word of the
training text into one token: training ends by itself, somewhat below it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle.envs import arithmetic, look, lookup
from treadle.envs.search import small as search_small
from treadle.envs.sql import small as sql_small
from treadle.envs.sql.environment import INVALID, render_table

VOCABULARY = 1200
"""Upper bound; the training text has fewer distinct words, so the tokenizer ends up smaller."""

PAD, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<search>", "</search>", "<answer>", "</answer>")
"""Added tokens that are not special: part of a message's text, so they survive decoding."""
SQL_TAGS = tuple(
    tag for name in ("think", "sql", "solution", "observation", "reminder") for tag in (f"<{name}>", f"</{name}>")
)
SEARCH_TAGS = (*TAGS, "<information>", "</information>")
LOOK_TAGS = ("<look>", "</look>", "<answer>", "</answer>")
IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
"""Special tokens that Idefics 3's processor writes for an image."""
TOOL_TAGS = (
    # Text that `templates/qwen3_keep_thoughts.jinja` writes around tools, calls and answers.
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>",
    '<tool_call>\n{"name": "',
    '", "arguments": {',
    "}}\n</tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
    # Text of a tool's schema.
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"additionalProperties": false, "properties": {',
    *(f'": {{"type": "{kind}"}}' for kind in ("string", "integer", "number", "boolean")),
    '}, "required": [',
    '], "type": "object"}}}',
    '": "',
    '"}}\n</tool_call>',
    '", "',
)
"""Texts that become one token each: a model of 0.2M parameters then has prompts of some 50 tokens, not 600."""

CHAT_TEMPLATE = """\
{%- for tool in tools or [] -%}
{%- if tool['function']['name'] != 'search' -%}
{{ raise_exception('this model knows one tool by heart, search, and cannot be told of another') }}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{ '<' + call['function']['name'] + '> ' }}
{{- arguments.values() | join(' ') if arguments is mapping else arguments }}
{{- '</' + call['function']['name'] + '>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""ChatML, with tool calls in the demo's syntax of a search: `<search> Anna</search>`. The whitespace control makes it
independent of Jinja's trimming options."""

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""ChatML."""

IMAGE_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<image>' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""ChatML with images."""

KEEP_THOUGHTS = (files("treadle.recipes") / "templates" / "qwen3_keep_thoughts.jinja").read_text(encoding="utf-8")
"""ChatML with tools, as in Qwen 3."""

WORDS = (files("treadle.recipes") / "words.txt").read_text(encoding="utf-8")
"""Words that become one token each: common ones, and names for small tools."""

IMAGE_FILES: Mapping[str, Mapping[str, Any]] = {
    "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": look.SIDE},
        "max_image_size": {"longest_edge": look.SIDE},
    },
}
"""Idefics 3's processor for pictures of `look`: 4 placeholders each, one for 8x8 pixels."""

_CORPUS = 1500  # demonstrations; enough for every name to occur hundreds of times


class Plan(NamedTuple):
    """Training text of a tokenizer, its tags, and its chat template.

    apart: whether spaces and digits are separate tokens, so that a word is the same token in any position. special:
    further special tokens. files: JSON files to write beside the tokenizer.
    """

    texts: Callable[[], Iterator[str]]
    tags: Sequence[str]
    template: str
    apart: bool = False
    special: Sequence[str] = ()
    files: Mapping[str, Mapping[str, Any]] = {}


def build(plan: Plan) -> Tokenizer:
    """Train a tokenizer, identical to the shipped one byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    apart = pre_tokenizers.Split(Regex(r"[ \d]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, byte_level]) if plan.apart else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(plan.tags) - len(plan.special),
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tags = re.compile("|".join(map(re.escape, plan.tags)))  # separate tokens
    tokenizer.train_from_iterator((tags.sub("", text) for text in plan.texts()), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in plan.tags])
    tokenizer.add_special_tokens(list(plan.special))
    return tokenizer


def write(folder: Path, plan: Plan) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and the plan's files into `folder`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": TURN_END,
        # Decoding must give back exactly what was sampled.
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": build(plan).to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": plan.template,
        **{name: json.dumps(fields, indent=2) + "\n" for name, fields in plan.files.items()},
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


def _demo_texts() -> Iterator[str]:
    yield "system\nuser\nassistant\ntool\n"
    yield lookup.NOTHING
    for index in range(_CORPUS):
        for message in arithmetic.demonstration(index, seed=0, expert=0.3):
            yield message["content"]
    yield from lookup.corpus(_CORPUS)


def _sql_texts() -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    yield from (INVALID, render_table([]), "SQL Timeout:")
    yield "Error executing SQL: no such column: name, db file: :memory:"
    yield from sql_small.corpus(_CORPUS)


def _search_texts() -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    yield from search_small.corpus(_CORPUS)


def _look_texts() -> Iterator[str]:
    yield "system\nuser\nassistant\ntool\n"
    yield from look.corpus(_CORPUS)


def _tools_texts() -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    for _ in range(20):
        yield WORDS


PLANS: Mapping[str, Plan] = {
    "demo": Plan(_demo_texts, TAGS, CHAT_TEMPLATE),
    "sql-small": Plan(_sql_texts, SQL_TAGS, PLAIN_TEMPLATE),
    "search-small": Plan(_search_texts, SEARCH_TAGS, PLAIN_TEMPLATE),
    "tools-small": Plan(_tools_texts, TOOL_TAGS, KEEP_THOUGHTS, apart=True),
    "look-small": Plan(_look_texts, LOOK_TAGS, IMAGE_TEMPLATE, special=IMAGE_TOKENS, files=IMAGE_FILES),
}
"""Plans by name in `model.tokenizer`."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a recipe's tokenizer.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, made if missing")
    parser.add_argument("name", nargs="?", choices=PLANS, default="demo", help="which one (default: demo)")
    options = parser.parse_args()
    write(options.folder, PLANS[options.name])
