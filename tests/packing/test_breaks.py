"""How steps relate to what their trajectory held before, and what breaks cost."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import treadle.packing.breaks as breaks
from tests.models import make_step, ragged_groups
from treadle.core.types import BreakCause, Group, Ids, Step
from treadle.packing.breaks import Decode, Kind, Relation, calling_steps, parent_steps, relations
from treadle.packing.flat import PackedCall, flatten
from treadle.packing.layout import Packing, arrange

TRUNCATED, CHANGED, TOKENIZATION = BreakCause.TRUNCATED, BreakCause.CHANGED, BreakCause.TOKENIZATION


def call(prompt: Sequence[int], completion: Sequence[int]) -> PackedCall:
    return PackedCall(np.array([*prompt, *completion], np.int32), len(prompt), first=0)


def each_apart(ids: Ids) -> str:
    """Every id has a text of its own, and no text is two tokens."""
    return "".join(f"<{i}>" for i in ids.tolist())


def relate(*calls: tuple[Sequence[int], Sequence[int]], decode: Decode = each_apart) -> list[Relation]:
    return relations([call(*c) for c in calls], decode)


def brief(relation: Relation) -> tuple[object, ...]:
    """Kind or cause, base and shared tokens."""
    return (relation.cause or relation.kind, relation.base, relation.shared)


# --- one by one -------------------------------------------------------------------------------------------------------


def test_the_documented_example() -> None:
    """Word by word, as the module's docstring has it."""
    assert breaks.__doc__
    words: list[str] = []
    calls, said = [], []
    for line in breaks.__doc__.split("\n\n")[2].splitlines():
        recorded, _, relation = line[7:].partition("   ")
        if line[4].isdigit():
            sides = [side.split() for side in recorded.split("|")]
            words += [word for side in sides for word in side if word not in words]
            calls.append(call(*([words.index(word) for word in side] for side in sides)))
            said.append(relation.strip())
        else:
            said[-1] = relation.strip()
    found = relations(calls, lambda ids: "".join(words[i] for i in ids))
    assert len(found) == 6
    for relation_of, line in zip(found, said, strict=True):
        if relation_of.cause is not None:
            price = f"{relation_of.extra_tokens} tokens: "
            known = f"break from {relation_of.base} at token {relation_of.shared}, {relation_of.cause}, {price}"
        elif relation_of.kind is Kind.FORK:
            known = f"fork of {relation_of.base}: shares {relation_of.shared} tokens, "
        else:
            known = "opens" if relation_of.base is None else f"extends {relation_of.base}"
        assert line.startswith(known)
    assert [r.cause for r in found] == [None] * 3 + [TOKENIZATION, TRUNCATED, CHANGED]
    assert sum(r.extra_tokens for r in found[:3]) == 0


def test_a_recorded_cause_is_preferred_and_makes_a_fork_a_break() -> None:
    calls = [call([1, 2], [3, 4]), call([1, 2, 3, 9, 5, 6], [1]), call([1, 7], [8]), call([1, 7, 8], [9])]
    causes = [None, BreakCause.THINKING_STRIPPED, BreakCause.SUMMARY, BreakCause.SUMMARY]
    found = relations(calls, each_apart, causes)
    assert [brief(r) for r in found] == [
        (Kind.OPENS, None, 0),
        (BreakCause.THINKING_STRIPPED, 0, 3),
        (BreakCause.SUMMARY, 1, 1),
        (Kind.EXTENDS, 2, 3),  # whatever was recorded
    ]


HEAD, USER, MODEL = [100, 101, 102, 103], [110, 111, 112], [110, 113, 112]  # a system message and two headers
END = [120, 112]
REPLY = [31, 32, 33, 34, 35, 36, 37, 38, 39, 120]
FIRST = [*HEAD, *USER, 11, 12, 13, *END, *MODEL]


def test_no_call_relates_to_one_whose_answer_was_thrown_away() -> None:
    made = [call([1, 2], [3]), call([1, 2, 3, 4], [5]), call([1, 2, 3, 4, 6], [7])]
    assert [brief(r) for r in relations(made, each_apart)][2] == (CHANGED, 1, 4)
    assert [brief(r) for r in relations(made, each_apart, played=[True, False, True])] == [
        (Kind.OPENS, None, 0),
        (Kind.EXTENDS, 0, 3),
        (Kind.EXTENDS, 0, 3),
    ]


@pytest.mark.parametrize(
    ("prompt", "relation"),
    [
        ([*HEAD, *USER, 51, 52, *END, *MODEL], ("fork", 0, 7)),
        ([*HEAD, *USER, *REPLY[:-1], *END, *MODEL], ("fork", 0, 7)),  # a sub-agent is told what the model wrote
        ([*HEAD, *USER, 51, *REPLY[2:8], *END, *MODEL], ("fork", 0, 7)),
        ([*FIRST, *REPLY[3:], 112, *USER, 51, *END, *MODEL], (TRUNCATED, 0, 15)),  # its thoughts are left out
        ([*FIRST, *REPLY[:4], 120, 112, *USER, 51, *END, *MODEL], (TRUNCATED, 0, 19)),
        ([*FIRST, 120, 112, *USER, 51, *END, *MODEL], (TRUNCATED, 0, 15)),  # all of it
        ([*FIRST, 30, *REPLY[1:], 112, *USER, 51], (CHANGED, 0, 15)),
        ([*FIRST, *REPLY[:3], 51], (CHANGED, 0, 18)),
        ([*HEAD, *USER, 51, 13, *END, *MODEL, *REPLY, *USER], (CHANGED, 0, 7)),  # the question was edited
        ([*HEAD, *USER, 51, *END, *MODEL, *REPLY[:4], *USER], (CHANGED, 0, 7)),  # told by its beginning
        ([*HEAD, *USER, 51, *END, *MODEL, *REPLY[:3], *USER], ("fork", 0, 7)),
    ],
)
def test_forks_leave_replies_alone_and_breaks_do_not(prompt: list[int], relation: tuple[object, ...]) -> None:
    assert brief(relate((FIRST, REPLY), (prompt, [1]))[1]) == relation


def test_a_reply_is_told_by_its_end_once_something_followed() -> None:
    """Its thoughts are left out, and the question before it too."""
    more = [*FIRST, *REPLY, 112, *USER, 41, 42, *END, *MODEL]
    shortened = [*HEAD, *USER, 51, *END, *MODEL, *REPLY[6:], 112, *USER, 41, 52]
    assert brief(relate((FIRST, REPLY), (more, []), (shortened, [1]))[2]) == (CHANGED, 1, 7)
    assert brief(relate((FIRST, REPLY), (shortened, [1]))[1]) == ("fork", 0, 7)  # only quoted, as far as ids tell
    quoted = [*HEAD, *USER, 51, *REPLY[6:], 112, *MODEL]
    assert brief(relate((FIRST, REPLY), (more, []), (quoted, [1]))[2]) == ("fork", 1, 7)


def test_what_was_not_sampled_and_what_is_kept_is_no_reply_carried_along() -> None:
    ask = [*HEAD, *USER, 51, *END, *MODEL]
    assert brief(relate((FIRST, []), (ask, [1]))[1]) == ("fork", 0, 7)
    yes = [61, 120]  # said by both
    back = [*FIRST, *yes, 112, *USER, 52, *END, *MODEL]
    found = relate((FIRST, yes), ([*FIRST, *yes, 112, *USER, 41, *END, *MODEL], REPLY), (ask, yes), (back, [1]))
    assert brief(found[3]) == ("fork", 1, len(FIRST + yes + USER) + 1)
    edited = [*FIRST, *yes, 112, *USER, 41, *END, *MODEL, *REPLY[:3], 112, *USER, 42, *END, *MODEL, *yes, 112]
    found = relate((FIRST, yes), ([*FIRST, *yes, 112, *USER, 41, *END, *MODEL], REPLY), (ask, yes), (edited, [1]))
    assert brief(found[3]) == (CHANGED, 1, len(FIRST + yes + USER + END + MODEL) + 2 + 3)


def letters(ids: Ids) -> str:
    """0..25 are letters, 26 + n is the n-th letter twice, 99 a character's first piece."""
    return "".join("\ufffd" if i == 99 else chr(97 + i % 26) * (1 + i // 26) for i in ids.tolist())


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ([0, 0], [26, 1], TOKENIZATION),
        ([26, 2], [0, 0, 1], TOKENIZATION),  # text that was changed later does not matter
        ([0], [26], TOKENIZATION),  # cut by length, and what follows is joined to it
        ([0, 1], [26, 1], CHANGED),
        ([26, 1], [0, 1], CHANGED),
        ([26, 1], [0], CHANGED),  # ends before both do in a token
        ([27], [0], CHANGED),
        ([0, 0, 0], [26, 26], TOKENIZATION),
        ([0, *[26] * 80, 1], [*[26] * 80, 2], TOKENIZATION),  # as far as is looked
        ([0, 26, 26, 1], [26, 26, 2], CHANGED),
        ([99, 1], [0, 0], CHANGED),  # an unfinished character is no text that could be the same
        ([99, 99, 1], [0, 0, 2], CHANGED),
    ],
)
def test_tokenization_is_the_same_text_up_to_a_common_token_end(
    was: list[int], now: list[int], cause: BreakCause
) -> None:
    found = relate(([5, 6], was), ([5, 6, *now], [7]), decode=letters)[1]
    assert (found.cause, found.base, found.shared) == (cause, 0, 2)


# --- against the definitions ------------------------------------------------------------------------------------------


def prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(ragged_groups(vocabulary=3, max_groups=1, max_size=1))
def test_whatever_was_recorded(groups: list[Group]) -> None:
    """Token by token, against the definitions of what is shared, extended and priced."""
    steps = groups[0].trajectories[0].steps if groups and groups[0].trajectories else ()
    prompts = [step.prompt_ids.tolist() for step in steps]
    whole = [step.full_ids.tolist() for step in steps]
    sampled: list[set[int]] = []  # positions, of the whole conversation
    taken: set[int] = set()
    for n, relation in enumerate(relate(*((s.prompt_ids.tolist(), s.completion_ids.tolist()) for s in steps))):
        free = [b for b in range(n) if b not in taken]
        shared = {b: prefix(prompts[n], whole[b]) for b in free}
        extended = [b for b in free if shared[b] == len(whole[b])]
        most = max(shared.values(), default=0)
        own = set(range(len(prompts[n]), len(whole[n])))
        if relation.base is None:
            assert relation == Relation(Kind.OPENS) and most == 0
        else:
            assert relation.shared == shared[relation.base]
        assert (relation.kind is Kind.EXTENDS) == bool(extended)
        assert (relation.kind is Kind.BREAK) == (relation.cause is not None) == (relation.was is not None)
        assert relation.cause is not TOKENIZATION
        if relation.kind is Kind.EXTENDS:
            assert relation.base in extended
            assert relation.base == n - 1 or shared[relation.base] == max(shared[b] for b in extended)
            taken.add(relation.base)
            own |= sampled[relation.base]
        if relation.kind is Kind.FORK:
            assert relation.base == max(b for b in free if shared[b] == most)
            assert most == len(prompts[n]) or most not in sampled[relation.base]
        if relation.kind is Kind.BREAK:
            assert relation.base is not None and relation.was is not None and relation.now is not None
            was, now = whole[relation.base][relation.shared :], prompts[n][relation.shared :]
            assert (list(relation.was.ids), list(relation.now.ids)) == (was[:5], now[:5])
            again = [
                at for at, _ in enumerate(zip(whole[relation.base], prompts[n], strict=False)) if at >= relation.shared
            ]
            assert relation.extra_tokens == len(again) > 0
        else:
            assert relation.extra_tokens == 0
        sampled.append(own)


class Chat:
    """A conversation of messages whose tokens occur nowhere else, and the calls made on the way."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.fresh = itertools.count(1000)
        self.turns: list[tuple[list[int], list[int]]] = []  # (what was read, what was sampled)
        self.calls: list[PackedCall] = []

    def ids(self) -> list[int]:
        return [next(self.fresh) for _ in range(self.data.draw(st.integers(2, 6)))]

    def prompt(self) -> list[int]:
        """Of the conversation as it stands; the last turn has no reply yet."""
        turns = [[*USER, *read, *END, *MODEL, *said, *([112] if said else [])] for read, said in self.turns]
        return [*HEAD, *itertools.chain(*turns)]

    def log(self) -> None:
        self.turns.append((self.ids(), []))
        self.sample()

    def sample(self) -> None:
        prompt, said = self.prompt(), [*self.ids(), 120]
        self.calls.append(call(prompt, said))
        self.turns[-1] = (self.turns[-1][0], said)


def told(data: st.DataObject, turns: int) -> Chat:
    chat = Chat(data)
    for _ in range(turns):
        chat.log()
    return chat


@given(st.data())
def test_appending_extends(data: st.DataObject) -> None:
    """Several conversations at once: each one's calls extend its own, and a chain computes each only once."""
    chats = [told(data, data.draw(st.integers(1, 5))) for _ in range(data.draw(st.integers(1, 3)))]
    for number, chat in enumerate(chats):  # tokens of their own
        chat.calls = [
            PackedCall(np.where(c.token_ids < 1000, c.token_ids, c.token_ids + 1000 * number), c.prompt_length, 0)
            for c in chat.calls
        ]
    order = data.draw(st.permutations([n for n, chat in enumerate(chats) for _ in chat.calls]))
    rest = [iter(chat.calls) for chat in chats]
    calls = [next(rest[number]) for number in order]
    found = relations(calls, each_apart)
    for at, (number, relation) in enumerate(zip(order, found, strict=True)):
        before = [b for b in range(at) if order[b] == number]
        if before:
            assert brief(relation) == ("extends", before[-1], len(calls[before[-1]].token_ids))
        else:
            assert relation.kind is (Kind.FORK if at else Kind.OPENS)
    saved = sum(relation.shared for relation in found if relation.kind is Kind.EXTENDS)
    assert arrange(calls, Packing.CHAIN).nodes == sum(len(c.token_ids) for c in calls) - saved


def expect(chat: Chat, cause: BreakCause, at: int) -> None:
    """The last call breaks with the one before it at that token; those before all extend."""
    *appended, last = relations(chat.calls, each_apart)
    assert [r.kind for r in appended] == [Kind.OPENS, *[Kind.EXTENDS] * (len(appended) - 1)]
    assert brief(last) == (cause, len(appended) - 1, at)
    was, now = chat.calls[-2].token_ids, chat.calls[-1].token_ids[: chat.calls[-1].prompt_length]
    assert last.extra_tokens == sum(1 for place, _ in enumerate(zip(was, now, strict=False)) if place >= at)


@given(st.data(), st.integers(2, 5))
def test_a_sliding_window_truncates(data: st.DataObject, turns: int) -> None:
    chat = told(data, turns)
    del chat.turns[: data.draw(st.integers(1, turns - 1))]
    chat.log()
    expect(chat, TRUNCATED, len(HEAD + USER))


@given(st.data(), st.integers(1, 4))
def test_a_reply_cut_down_is_truncated(data: st.DataObject, turns: int) -> None:
    """Thoughts left out of the newest reply, or of all of them from some turn on."""
    chat = told(data, turns)
    first = data.draw(st.integers(0, turns - 1))
    at = len(cut(chat, first).prompt())
    for number in range(first, turns):
        read, said = chat.turns[number]
        chat.turns[number] = (read, said[data.draw(st.integers(1, len(said) - 1)) :])
    chat.log()
    expect(chat, TRUNCATED, at)


def cut(chat: Chat, number: int) -> Chat:
    """The conversation up to what was read in that turn."""
    short = Chat(chat.data)
    short.turns = [*chat.turns[:number], (chat.turns[number][0], [])]
    return short


@given(st.data(), st.integers(1, 4), st.booleans())
def test_an_edit_is_a_change(data: st.DataObject, turns: int, of_reply: bool) -> None:
    chat = told(data, turns)
    number = data.draw(st.integers(0, turns - 1))
    read, said = chat.turns[number]
    kept = data.draw(st.integers(0, len(said) - 2 if of_reply else len(read) - 1))
    short = cut(chat, number)
    if of_reply:
        at = len(short.prompt()) + kept
        chat.turns[number] = (read, [*said[:kept], *chat.ids(), *said[kept + 1 :]])
    else:
        at = len(short.prompt()) - len(END + MODEL) - len(read) + kept
        chat.turns[number] = ([*read[:kept], *chat.ids(), *read[kept + 1 :]], said)
    chat.log()
    expect(chat, CHANGED, at)


@given(st.data(), st.integers(1, 4))
def test_beginning_anew_going_back_and_asking_again_are_forks(data: st.DataObject, turns: int) -> None:
    """Whatever replies are dropped at the end, none is written anew."""
    chat = told(data, turns)
    del chat.turns[data.draw(st.integers(0, turns - 1)) :]
    chat.turns.append((chat.ids(), []))
    chat.sample()
    last = relations(chat.calls, each_apart)[-1]
    kept = len(HEAD) + sum(len(USER + read + END + MODEL + said) + 1 for read, said in chat.turns[:-1]) + len(USER)
    assert brief(last) == ("fork", turns - 1, kept) and last.extra_tokens == 0
    again = [*chat.calls[:-1], chat.calls[0]]
    assert brief(relations(again, each_apart)[-1]) == ("fork", turns - 1, chat.calls[0].prompt_length)


# --- real tokenizers --------------------------------------------------------------------------------------------------


@cache
def load(name: str) -> Tokenizer:
    if name == "shipped":
        return Tokenizer.from_file(str(Path(breaks.__file__).parents[1] / "recipes" / "tokenizer" / "tokenizer.json"))
    root = os.environ.get("TREADLE_TEST_DATA")
    if root is None:
        pytest.skip("TREADLE_TEST_DATA, which holds tokenizers/qwen, is not set")
    return Tokenizer.from_file(str(Path(root) / "tokenizers" / "qwen" / "tokenizer.json"))


def codec(tokenizer: Tokenizer) -> tuple[Callable[[str], list[int]], Decode]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode, lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def text_of(ids: Sequence[int], decode: Decode) -> str:
    return decode(np.array(ids, np.int32))


each_tokenizer = pytest.mark.parametrize("name", ["shipped", "qwen"])
texts = st.one_of(st.text("ab c\n.<>é€", max_size=12), st.text(max_size=8))


@each_tokenizer
@given(data=st.data())
def test_a_history_tokenized_again_breaks_by_tokenization(name: str, data: st.DataObject) -> None:
    """Replies of any ids, pieces of characters among them; each prompt is the text so far, tokenized anew."""
    encode, decode = codec(load(name))
    ids = st.integers(0, load(name).get_vocab_size() - 1)
    pieces = st.one_of(st.lists(ids, max_size=6), texts.map(lambda t: [i for c in t for i in encode(c)]))
    text, calls = "<|im_start|>user\nbegin<|im_end|>\n<|im_start|>assistant\n", []
    for _ in range(data.draw(st.integers(2, 4))):
        prompt = encode(text)
        assume(text_of(prompt, decode) == text)  # a tokenizer that normalizes its text changes it
        calls.append(call(prompt, data.draw(pieces)))
        text = decode(calls[-1].token_ids) + data.draw(texts) + "<|im_end|>\n<|im_start|>assistant\n"
    for n, relation in enumerate(relations(calls, decode)[1:], 1):
        now, before = calls[n].token_ids[: calls[n].prompt_length], calls[n - 1].token_ids
        appended = now[: len(before)].tolist() == before.tolist()
        assert (relation.kind is Kind.EXTENDS, relation.cause is TOKENIZATION) == (appended, not appended)


@each_tokenizer
@given(data=st.data())
def test_an_edit_of_tokenized_text_is_no_matter_of_tokenization(name: str, data: st.DataObject) -> None:
    """Both histories are tokenized as a whole, as most agents do; the texts differ somewhere."""
    encode, decode = codec(load(name))
    before, was, now, after = (data.draw(texts) for _ in range(4))
    prompt = encode("<|im_start|>assistant\n")
    reply, rest = encode(f"{before}{was}{after}<|im_end|>"), encode(f"{before}{now}{after}<|im_end|>")
    assume(not f"{before}{now}{after}<|im_end|>".startswith(text_of(reply, decode)))
    assume(text_of(rest, decode) != text_of(reply, decode))
    found = relations([call(prompt, reply), call([*prompt, *rest, *encode("\n")], [1])], decode)[1]
    assert found.cause in (CHANGED, TRUNCATED)


MAIN, SUB, OTHER = list(range(10, 20)), list(range(30, 40)), list(range(50, 60))
SAMPLED = list(range(70, 76))


def after(step: Step, *ids: int) -> Step:
    return make_step([*step.full_ids.tolist(), *ids], SAMPLED)


def of(*steps: Step) -> list[int]:
    found: list[int] = calling_steps(steps).tolist()
    return found


opening = make_step(MAIN, SAMPLED)
sub = make_step(SUB, SAMPLED)


def test_a_sub_agents_steps_are_called_by_the_main_step_before_its_first() -> None:
    again = after(sub, 1)
    back = after(opening, 2)
    later = make_step(OTHER, SAMPLED)
    assert of(opening, sub, again, back, later, after(back, 3)) == [0, 0, 0, 3, 3, 5]


def test_a_sub_agent_that_runs_beside_the_main_branch_stays_one() -> None:
    back = after(opening, 2)
    assert of(opening, sub, back, after(sub, 1), after(back, 3), after(after(sub, 1), 4)) == [0, 0, 2, 0, 4, 0]


def test_sub_agents_of_a_sub_agent_are_called_from_the_main_branch() -> None:
    inner = make_step(OTHER, SAMPLED)
    assert of(opening, sub, inner, after(sub, 1), after(opening, 2)) == [0, 0, 0, 0, 4]


def test_a_conversation_after_which_the_old_one_never_goes_on_takes_its_place() -> None:
    summary = make_step(SUB, SAMPLED)
    assert of(opening, after(opening, 1), summary, after(summary, 2)) == [0, 1, 2, 3]
    states = [make_step([*MAIN[:4], *state], SAMPLED) for state in (SUB, OTHER, SUB, MAIN)]
    assert of(*states) == [0, 1, 2, 3]  # the prompt is the state, not the history


def test_a_break_goes_on_with_the_conversation_it_rewrites() -> None:
    edited = replace(make_step([*MAIN[:5], 99, *SAMPLED, 98], SAMPLED), break_cause=BreakCause.HISTORY_EDITED)
    assert of(opening, edited, sub, after(edited, 1)) == [0, 1, 1, 3]


def test_samples_of_one_prompt_are_called_by_the_step_whose_reply_is_kept() -> None:
    """Best of three: the first is carried on."""
    again = make_step(MAIN, [*SAMPLED[:2], 90])
    assert of(opening, again, again, after(opening, 1)) == [0, 0, 0, 3]


@given(ragged_groups(vocabulary=3))
def test_whoever_calls_is_an_earlier_step_of_the_main_branch_of_the_same_trajectory(groups: list[Group]) -> None:
    batch = flatten(groups)
    found = parent_steps(batch)
    assert (found <= np.arange(len(found))).all()
    assert (found[found] == found).all()
    assert (batch.trajectory_of_step[found] == batch.trajectory_of_step).all()
    first = np.flatnonzero(np.diff(batch.trajectory_of_step, prepend=-1))
    assert (found[first] == first).all()
