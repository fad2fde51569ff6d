import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

from treadle.core.types import Message
from treadle.envs import arithmetic, lookup
from treadle.models.model_files import SHIPPED_TOKENIZERS
from treadle.recipes import build_tokenizer

with as_file(files("treadle.recipes")) as _recipes:
    FOLDERS = {name: Path(_recipes) / folder for name, folder in SHIPPED_TOKENIZERS.items()}
FOLDER = FOLDERS["demo"]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=False)
    return text


def chatml(messages: tuple[Message, ...]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@pytest.mark.quick(2)
@pytest.mark.parametrize("words", [[], ["demo"], ["sql-small"], ["search-small"], ["tools-small"], ["look-small"]])
@pytest.mark.parametrize("seed", ["1", "2"])
def test_building_anew_gives_the_shipped_files_byte_for_byte(tmp_path: Path, seed: str, words: list[str]) -> None:
    if words == ["search-small"]:
        pytest.importorskip("bm25s")  # the demonstrations show what a search finds
    if words == ["look-small"]:
        pytest.importorskip("PIL")  # ... and pictures
    shipped = FOLDERS[words[0] if words else "demo"]
    subprocess.run(
        [sys.executable, "-m", "treadle.recipes.build_tokenizer", str(tmp_path / "new" / "folder"), *words],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == sorted(path.name for path in shipped.iterdir())
    for name in names:
        assert (tmp_path / "new" / "folder" / name).read_bytes() == (shipped / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "size", "tags"),
    [
        ("demo", 726, build_tokenizer.TAGS),
        ("sql-small", 588, build_tokenizer.SQL_TAGS),
        ("search-small", 735, build_tokenizer.SEARCH_TAGS),
        ("tools-small", 988, build_tokenizer.TOOL_TAGS),
        ("look-small", 382, (*build_tokenizer.LOOK_TAGS, *build_tokenizer.IMAGE_TOKENS)),
    ],
)
def test_ids_are_frozen(name: str, size: int, tags: Sequence[str]) -> None:
    """A checkpoint is meaningless under other ids."""
    tokenizer = Tokenizer.from_file(str(FOLDERS[name] / "tokenizer.json"))
    assert set(build_tokenizer.PLANS) == set(SHIPPED_TOKENIZERS)
    assert tokenizer.get_vocab_size() == size < build_tokenizer.VOCABULARY
    assert [tokenizer.token_to_id(token) for token in build_tokenizer.SPECIAL] == [0, 1, 2]
    assert [tokenizer.token_to_id(token) for token in tags] == list(range(size - len(tags), size))
    assert encode("<search> Anna</search><|im_end|>") == [722, 538, 723, 2]


def test_a_name_with_its_leading_space_is_one_token_of_its_own() -> None:
    names = [*lookup.ENTITIES, *map(str, range(19))]
    ids = [encode(f" {name}") for name in names]
    assert {len(name_ids) for name_ids in ids} == {1} and len(set(map(tuple, ids))) == len(names)


@given(index=st.integers(0, 10**6), seed=st.integers(0, 100))
def test_demonstrations_survive_the_round_trip(index: int, seed: int) -> None:
    for messages in (lookup.demonstration(index, seed), arithmetic.demonstration(index, seed)):
        text = chatml(messages)
        assert decode(encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert decode(encode(text)) == text


@given(index=st.integers(0, 10**6))
def test_a_conversation_encodes_as_its_messages_do_alone(index: int) -> None:
    """Warm-start targets equal what the model is to sample: nothing merges across a reply's borders."""
    messages = lookup.demonstration(index, 0)
    pieces = [piece for m in messages for piece in (f"<|im_start|>{m['role']}\n", m["content"], "<|im_end|>\n")]
    assert encode(chatml(messages)) == [token for piece in pieces for token in encode(piece)]


@pytest.mark.parametrize("name", [name for name in SHIPPED_TOKENIZERS if name != "tools-small"])  # it has Qwen's
@pytest.mark.parametrize("trim", [False, True])
def test_the_template_is_chatml_under_any_trimming(trim: bool, name: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    source = (FOLDERS[name] / "chat_template.jinja").read_text()
    template = jinja2.Environment(trim_blocks=trim, lstrip_blocks=trim).from_string(source)
    messages: tuple[Message, ...] = (
        {"role": "system", "content": " a\n"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": " Paris"},
    )
    assert template.render(messages=messages) == chatml(messages)
    asked = template.render(messages=messages, add_generation_prompt=True)
    assert asked == chatml(messages) + "<|im_start|>assistant\n"


def test_transformers_loads_the_same_tokenizer() -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(FOLDER))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 0, 726)
    messages = lookup.demonstration(0, 0)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    assert text == chatml(messages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True).count("<search>") == text.count("<search>") > 0


def test_a_tool_a_call_and_a_word_take_few_tokens() -> None:
    """A word is the same token in a question, a call and an answer; digits are tokens of their own."""
    tokenizer = Tokenizer.from_file(str(FOLDERS["tools-small"] / "tokenizer.json"))

    def tokens(text: str) -> list[str]:
        return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text).ids]

    assert tokens("What does tea cost? 42") == ["What", " ", "does", " ", "tea", " ", "cost", "?", " ", "4", "2"]
    call = ['<tool_call>\n{"name": "', "price", '", "arguments": {', '"', "item", '": "', "tea", '"}}\n</tool_call>']
    assert tokens("".join(call)) == call
