"""Build the demo's tokenizer: byte-level BPE, ChatML, one token for each name of the lookup world.

    python -m treadle.recipes.build_tokenizer DIR

writes the three files that `transformers.AutoTokenizer.from_pretrained(DIR)` reads. The copy in
`recipes/tokenizer` is frozen, because its ids are what a checkpoint means; this script is how it came about,
and a test builds it anew.

A word with its leading space is the unit of byte-level BPE, and `VOCABULARY` leaves room to merge every word
of the training text into one token: training ends by itself, somewhat below it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle.envs import arithmetic, lookup

VOCABULARY = 800
"""Most tokens; the training text has fewer distinct words, so the tokenizer ends up smaller."""

PAD, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<search>", "</search>", "<answer>", "</answer>")
"""Added tokens that are not special: part of a message's text, so they survive decoding."""

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
"""ChatML; a tool call as the demo writes a search: `<search> Anna</search>`. The whitespace control keeps it the same
under any Jinja trimming options."""

_CORPUS = 1500  # demonstrations; enough for every name to occur hundreds of times


def build() -> Tokenizer:
    """Train and return the tokenizer. It is deterministic: equal to the shipped one, byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def write(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`, made if missing."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": TURN_END,
        "clean_up_tokenization_spaces": False,  # decoding must give back exactly what was sampled
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": build().to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


def _texts() -> Iterator[str]:
    """Yield the texts of the two demo environments, without the tags: those are tokens of their own."""
    yield "system\nuser\nassistant\ntool\n"
    yield lookup.NOTHING
    for index in range(_CORPUS):
        for message in arithmetic.demonstration(index, seed=0, expert=0.3):
            yield _without_tags(message["content"])
    for text in lookup.corpus(_CORPUS):
        yield _without_tags(text)


def _without_tags(text: str) -> str:
    for tag in TAGS:
        text = text.replace(tag, "")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, whose one argument is the folder to write."""
    parser = argparse.ArgumentParser(description="Build the demo's tokenizer.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, made if missing")
    write(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
