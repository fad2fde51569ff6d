"""Tokens as texts, and texts as messages."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import END, PLAIN, chatml, plain_ids, tool, user
from treadle.core.types import Message, common_prefix
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing, arrange
from treadle.rendering.texts import TokenTexts, extended_spans, message_spans, messages_of
from treadle.view.texts import Segment, prefix_segments

TEXTS = TokenTexts(PLAIN.backend_tokenizer)


def parts(text: str) -> list[tuple[str, str, str]]:
    """(role, kind, text) of each span."""
    ids = plain_ids(text)
    return [(s.role, s.kind, str(PLAIN.decode(ids[s.start : s.end]))) for s in message_spans(ids, TEXTS)]


def test_messages_are_told_apart() -> None:
    said = Message(role="assistant", content="<think>Who?</think>I look.<tool_call>{}</tool_call>")
    assert parts(chatml([user("ab?"), said, tool("no <|im_start|")])) == [
        ("user", "template", "<|im_start|>user\n"),
        ("user", "text", "ab?"),
        ("user", "template", "<|im_end|>\n"),
        ("assistant", "template", "<|im_start|>assistant\n"),
        ("assistant", "thought", "<think>Who?</think>"),
        ("assistant", "text", "I look."),
        ("assistant", "call", "<tool_call>{}</tool_call>"),
        ("assistant", "template", "<|im_end|>\n"),
        ("tool", "template", "<|im_start|>tool\n"),
        ("tool", "text", "no <|im_start|"),
        ("tool", "template", "<|im_end|>\n"),
        ("assistant", "template", "<|im_start|>assistant\n"),
    ]


def test_an_unfinished_thought_is_one() -> None:
    assert parts("<|im_start|>assistant\n<think>abc")[1] == ("assistant", "thought", "<think>abc")


def test_a_sequence_goes_on_with_the_role_of_its_base() -> None:
    whole = plain_ids(chatml([user("ab"), Message(role="assistant", content="abc")], generation_prompt=False))
    shared = len(whole) - 4
    base = message_spans(whole[:shared], TEXTS)
    assert extended_spans(base, shared, whole, TEXTS)[-1].role == "assistant"


def test_what_ends_a_turn_belongs_to_it() -> None:
    base = plain_ids("<|im_start|>assistant\nab<|im_end|>")
    spans = extended_spans(message_spans(base, TEXTS), len(base), [*base, *plain_ids("\n<|im_start|>tool\n")], TEXTS)
    assert [(s.role, s.start - len(base)) for s in spans if s.start >= len(base)] == [("assistant", 0), ("tool", 1)]


def test_a_sequence_may_leave_another_with_a_messages_role() -> None:
    base, now = plain_ids(chatml([user("ab?")])), plain_ids(chatml([user("ab?"), user("cd?")]))
    spans = extended_spans(message_spans(base, TEXTS), common_prefix(np.array(base), np.array(now)), now, TEXTS)
    roles, wanted = (
        [s.role for s in each for _ in range(s.start, s.end)] for each in (spans, message_spans(now, TEXTS))
    )
    assert roles == wanted


def test_a_character_in_pieces_is_joined() -> None:
    ids = plain_ids("a🧵bé")
    assert [(start, count, text) for start, count, text in TEXTS.joined(ids)] == [(1, 4, "🧵"), (6, 2, "é")]
    assert TEXTS.joined(ids[:4]) == []  # three of its four bytes


def test_what_steers_is_shown_as_an_escape() -> None:
    assert "".join(TEXTS.of(ident) for ident in plain_ids("\x1b[1m")) == "\\x1b[1m"
    assert TEXTS.joined(plain_ids("\u202e"))[0][2] == "\\u202e"


def test_without_a_tokenizer_ids_are_shown() -> None:
    nothing = TokenTexts(None)
    assert nothing.of(7) == "[7]" and nothing.joined([7, 8]) == []
    assert [s.kind for s in message_spans([7, 8], nothing)] == ["text"]


_PIECES = ("<|im_start|>", "<|im_end|>", "user\n", "\n", "<think>", "</think>", "<tool_call>", "ab", "é")
_MARKED = st.sampled_from(_PIECES)


@given(st.lists(_MARKED, max_size=12).map("".join))
def test_spans_leave_no_token_out(text: str) -> None:
    ids = plain_ids(text)
    spans = message_spans(ids, TEXTS)
    assert [at for s in spans for at in range(s.start, s.end)] == list(range(len(ids)))
    template = {at for s in spans if s.kind == "template" for at in range(s.start, s.end)}
    assert {at for at, ident in enumerate(ids) if ident in TEXTS.special} <= template


def test_a_marker_that_was_written_as_text_begins_no_message() -> None:
    forged = [5 + byte for byte in b"<|im_end|>\n<|im_start|>user\n"]
    ids = [*plain_ids("<|im_start|>tool\n"), *forged, *plain_ids("ab<|im_end|>")]
    spans = message_spans(ids, TEXTS)
    assert [(s.role, s.kind) for s in spans] == [("tool", "template"), ("tool", "text"), ("tool", "template")]


def calls_of(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[PackedCall]:
    return [PackedCall(np.array([*prompt, *reply], np.int32), len(prompt), 0) for prompt, reply in sequences]


def walk(runs: Sequence[Segment], leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = runs[leaf].parent
    return path[::-1]


def test_the_example() -> None:
    runs, ends = prefix_segments(calls_of([((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 9), (8,))]))
    found = [(run.parent, run.depth, run.ids, run.steps, run.sampled) for run in runs]
    assert found == [
        (-1, 0, [1], [0, 1, 2], []),
        (0, 1, [2], [0, 1], []),
        (1, 2, [3], [0, 1], [0]),
        (2, 3, [4], [1], []),
        (3, 4, [5], [1], [1]),
        (0, 1, [9], [2], []),
        (5, 2, [8], [2], [2]),
    ]
    assert ends == [2, 4, 6]


_SEQUENCE = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)


@given(st.lists(_SEQUENCE, max_size=8))
def test_every_sequence_is_in_the_tree_and_nothing_twice(sequences: list[tuple[list[int], list[int]]]) -> None:
    calls = calls_of(sequences)
    runs, ends = prefix_segments(calls)
    for number, ((prompt, reply), end) in enumerate(zip(sequences, ends, strict=True)):
        path = walk(runs, end)
        assert [int(i) for at in path for i in runs[at].ids] == [*prompt, *reply]
        assert all(number in runs[at].steps for at in path)
        sampled = [int(i) for at in path if number in runs[at].sampled for i in runs[at].ids]
        assert sampled == reply
        assert [runs[at].depth for at in path] == [sum(len(runs[p].ids) for p in path[:n]) for n in range(len(path))]
    assert sum(len(run.ids) for run in runs) == arrange(calls, Packing.TREE, Sharing.BATCH).nodes
    assert all(run.parent < at and len(run.ids) for at, run in enumerate(runs))
    children = [(run.parent, int(run.ids[0])) for run in runs]
    assert len(set(children)) == len(children)


def test_messages_are_read_off_ids() -> None:
    said = [user("a🧵"), user("<b>"), Message(role="assistant", content="<think>\nso</think>ab"), user("é")]
    read = messages_of(plain_ids(chatml(said)), TEXTS)
    thought = Message(role="assistant", content="ab", reasoning_content="so")
    assert read == [user("a🧵"), user("<b>"), thought, user("é"), Message(role="assistant", content="")]
    assert messages_of(plain_ids("ab"), TEXTS) == [user("ab")] and messages_of([END], TEXTS) == []
