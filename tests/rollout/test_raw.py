"""Raw prompts that carry on what was sampled keep its ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import END, PlainTokenizer, make_step, plain_ids, plain_renderer
from treadle.core.errors import DataError
from treadle.rollout.session import RawPrompts

A, B, C = (5 + ord(letter) for letter in "abc")


def prompts() -> RawPrompts:
    return RawPrompts(plain_renderer())


def test_the_longest_earlier_call_is_carried_on() -> None:
    raw = prompts()
    raw.record(make_step(plain_ids("x "), [A, B, END]))
    raw.record(make_step([*plain_ids("x "), A, B, *plain_ids(" y ")], [A, END]))
    assert raw.ids("x ab y a z").tolist() == [*plain_ids("x "), A, B, *plain_ids(" y "), A, *plain_ids(" z")]
    assert raw.ids("x ab y b").tolist() == [*plain_ids("x "), A, B, *plain_ids(" y "), *plain_ids("b")]
    assert raw.ids("x ab<|im_end|>\n").tolist() == [*plain_ids("x "), A, B, END, *plain_ids("\n")]
    assert raw.ids("other").tolist() == plain_ids("other")


def test_text_cut_by_a_stop_string_keeps_what_it_can() -> None:
    raw = prompts()
    raw.record(make_step(plain_ids("x "), [A, B, *plain_ids("STOP")]))
    assert raw.ids("x ab more").tolist() == [*plain_ids("x "), A, B, *plain_ids(" more")]


@given(st.lists(st.sampled_from([3, 4, A, B, C]), min_size=1, max_size=30), st.text("abc ", max_size=10))
def test_whatever_was_sampled_is_kept(sampled: list[int], more: str) -> None:
    raw = prompts()
    step = make_step(plain_ids("p"), sampled)
    raw.record(step)
    text = str(PlainTokenizer().decode(step.full_ids, skip_special_tokens=False)) + more
    ids = raw.ids(text)
    assert ids[: len(step.full_ids)].tolist() == step.full_ids.tolist()
    assert PlainTokenizer().decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prompt", ["", [], [-1], [2**31], [1.5], [[1]]])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(DataError):
        prompts().ids(prompt)  # type: ignore[arg-type]
