"""Structural tokens in all kinds of tokenizer pipelines: pieces with private names are the encoding of the whole."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.rollout.families import FAMILIES, TEMPLATES, World, small_vocabulary
from tests.worlds import PLAIN
from treadle.core.errors import ConfigError, DataError
from treadle.rendering.structure import Structure, TokenBytes, offsets
from treadle.rendering.template import ChatTemplate

NAMES = ("<s>", "</s>", "<|u|>", "<|a|>", "<|e|>")
CORPUS = [path.read_text() for path in sorted(TEMPLATES.glob("qwen3*.jinja"))]
PREPEND = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
GPT4 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Metaspace, ByteLevel = pre_tokenizers.Metaspace, pre_tokenizers.ByteLevel


def bpe(pre: Any = None, normalizer: Any = None, **options: Any) -> Callable[[list[str]], Tokenizer]:
    """A trained BPE with these names in its vocabulary."""

    def build(names: list[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **options))
        if pre is not None:
            tokenizer.pre_tokenizer = pre
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        alphabet = ByteLevel.alphabet() if isinstance(pre, ByteLevel) else []
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
        trainer = trainers.BpeTrainer(
            vocab_size=900, show_progress=False, special_tokens=["<unk>", *bytes_, *names], initial_alphabet=alphabet
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer

    return build


def unigram(names: list[str]) -> Tokenizer:
    """As SentencePiece has it: control symbols score 0, better than any text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>", *names], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words(names: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(show_progress=False, special_tokens=["<unk>", *names])
    )
    return tokenizer


def word_pieces(names: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>", *names])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def merged(names: list[str]) -> Tokenizer:
    """A vocabulary in which merges lead to a structural token, as converted SentencePiece models have it."""
    tokens = ["<unk>", *"</s>|uae xyz\n", *names, *({"</", "s>", "</s>", "xy"} - set(names))]
    vocabulary = {token: ident for ident, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocabulary, [("<", "/"), ("s", ">"), ("</", "s>"), ("x", "y")], unk_token="<unk>"))


PIPELINES: dict[str, Callable[[list[str]], Tokenizer]] = {
    "byte level": bpe(ByteLevel(add_prefix_space=False)),
    "byte level, prefix space": bpe(ByteLevel(add_prefix_space=True), normalizers.NFC()),
    "whole words first": bpe(ByteLevel(add_prefix_space=False), ignore_merges=True),
    "metaspace first": bpe(Metaspace(prepend_scheme="first")),
    "metaspace always": bpe(Metaspace(prepend_scheme="always")),
    "metaspace never": bpe(Metaspace(prepend_scheme="never")),
    "metaspace whole": bpe(Metaspace(prepend_scheme="first", split=False), byte_fallback=True, fuse_unk=True),
    "prepend": bpe(normalizer=PREPEND, byte_fallback=True),
    "split": bpe(pre_tokenizers.Split(Regex(GPT4), "isolated"), normalizers.NFKC()),
    "digits": bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(), Metaspace()]), normalizers.Lowercase()),
    "strip": bpe(Metaspace(), normalizers.Strip()),
    "unigram": unigram,
    "words": words,
    "word pieces": word_pieces,
    "merged": merged,
}
each_pipeline = pytest.mark.parametrize("name", PIPELINES)
each_kind = pytest.mark.parametrize("strips", ["", "lstrip", "rstrip", "both"])
each_place = pytest.mark.parametrize("inside", [True, False])


@cache
def trained(name: str, inside: bool) -> str:
    return str(PIPELINES[name](list(NAMES) if inside else []).to_str())


def structure(name: str, strips: str = "", inside: bool = True) -> tuple[Tokenizer, Structure]:
    """inside: the structural tokens are in the model's vocabulary too."""
    tokenizer = Tokenizer.from_str(trained(name, inside))
    left, right = strips in ("lstrip", "both"), strips in ("rstrip", "both")
    tokenizer.add_tokens([AddedToken("<tag>", lstrip=left, rstrip=right, normalized=False)])
    added = [AddedToken(name, special=True, normalized=False, lstrip=left, rstrip=right) for name in NAMES]
    tokenizer.add_special_tokens(added)
    end = tokenizer.token_to_id("<|e|>")
    assert end is not None
    return tokenizer, Structure(tokenizer, [end])


def encoded(built: Structure, text: str) -> list[int]:
    """Ids of text that is all a template's own."""
    return ids(built, built.claim(text))


def ids(built: Structure, text: str) -> list[int]:
    return [int(i) for piece in built.encode(text) for i in piece]


WORD = st.sampled_from([*" \n\t", "  ", "x", "xy", "messages", "é", "日本", "\ufb01", "12", "<tag>", "Tool", "<", ">"])
CONTENT = st.lists(WORD, max_size=6).map("".join)
TEXT = st.lists(st.one_of(st.sampled_from(NAMES), CONTENT), max_size=8).map("".join)


@pytest.mark.quick(8)
@each_place
@each_kind
@each_pipeline
def test_pieces_are_the_encoding_of_the_whole(name: str, strips: str, inside: bool) -> None:
    tokenizer, built = structure(name, strips, inside)

    @settings(max_examples=25)
    @given(TEXT)
    def check(text: str) -> None:
        assert encoded(built, text) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.quick(6)
@each_place
@each_pipeline
def test_content_is_never_structural(name: str, inside: bool) -> None:
    tokenizer, built = structure(name, inside=inside)
    structural = [tokenizer.token_to_id(name) for name in NAMES]

    @settings(max_examples=40)
    @given(st.lists(TEXT, min_size=2, max_size=2))
    def check(contents: list[str]) -> None:
        begin, end, last = map(built.claim, ("<s>", "<|e|>", "</s>"))
        text = begin + end.join(contents) + last
        found = [i for i in ids(built, text) if i in structural]
        assert found == [tokenizer.token_to_id(name) for name in ("<s>", "<|e|>", "</s>")]
        assert built.plain(text) == "<s>" + "<|e|>".join(contents) + "</s>"

    check()


def test_what_a_tokenizer_was_set_to_truncate_or_pad_is_encoded_whole() -> None:
    tokenizer, _ = structure("byte level")
    whole = tokenizer.encode("<s>messages", add_special_tokens=False).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    assert encoded(Structure(tokenizer, []), "<s>messages") == whole
    assert json.loads(tokenizer.to_str())["truncation"]["max_length"] == 3


# Chat templates: what they may do, and the errors of those that fail


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


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ x | nothing }}"])
def test_one_that_cannot_be_compiled_is_refused_in_one_sentence(source: str) -> None:
    with pytest.raises(ConfigError, match="the chat template"):
        template(source)


def render(shown: ChatTemplate, **options: Any) -> str:
    return shown.render([{"role": "user", "content": "now"}], None, options, generation_prompt=True)


# The bytes of tokens are together those of the text, wherever characters are cut


@cache
def tokenizer(kind: str) -> Any:
    if kind == "byte level":
        return small_vocabulary()
    if kind == "plain":
        return PLAIN.backend_tokenizer
    words = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "\u2581\u2581"]
    letters = {word: 256 + number for number, word in enumerate(words)}
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581")]
    made = Tokenizer(models.BPE({**fallback, **letters}, merges, byte_fallback=True, unk_token=None, fuse_unk=False))
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama 2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence(decoding)
    return made


@pytest.mark.parametrize("kind", ["byte level", "plain", "sentencepiece", "llama 2"])
@given(
    text=st.text(max_size=20) | st.sampled_from([" the  the", "日本語 the é", "e\u0301", "🙂 the"]),
    cut=st.integers(0, 9),
)
def test_together_they_are_the_text(kind: str, text: str, cut: int) -> None:
    """Also where the tokens begin or end within a character, for which the text has a replacement."""
    backend = tokenizer(kind)
    cut = (
        0 if kind in ("sentencepiece", "llama 2") else cut
    )  # whose decoder writes several bytes that are no text in its own way
    ids = backend.encode(text, add_special_tokens=False).ids[cut:]
    pieces = TokenBytes(backend).of(ids)
    assert len(pieces) == len(ids)
    assert b"".join(pieces).decode(errors="replace") == backend.decode(ids, skip_special_tokens=False)


@given(st.lists(st.binary(max_size=3)) | st.text().map(lambda text: [bytes([byte]) for byte in text.encode()]))
def test_offsets_are_places_in_the_text(pieces: list[bytes]) -> None:
    found, text = offsets(pieces), b"".join(pieces).decode(errors="replace")
    assert len(found) == len(pieces) and found == sorted(found)
    for number, at in enumerate(found):
        begun = b"".join(pieces[:number]).decode(errors="ignore")
        assert 0 <= at <= len(text) and at >= len(begun)
        if pieces[number : number + 1] != [b""] and not 0x80 <= pieces[number][0] < 0xC0:
            assert at == len(b"".join(pieces[:number]).decode(errors="replace"))


def test_a_character_that_is_cut_has_one_place() -> None:
    assert offsets([b"a", b"\xc3", b"\xa9", b"b"]) == [0, 1, 1, 2]
    assert offsets([b"\xed\xa0", b"b"]) == [0, 2]  # half a surrogate is no character, and so two
