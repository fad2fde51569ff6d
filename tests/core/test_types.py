"""Records are checked at construction and cannot change afterwards."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.errors import Cause, DataError
from treadle.core.types import (
    Failure,
    SamplingParams,
    Status,
    Step,
    StopReason,
    Task,
    Trajectory,
    as_messages,
    common_prefix,
)

GREEDY = SamplingParams(temperature=0.0)
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "policy_versions", "mask")


def make_step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "prompt_ids": [1, 17, 4],
        "completion_ids": [9, 12],
        "logprobs": [-0.3, -1.2],
        "policy_versions": [4, 5],
        "sampling": SamplingParams(),
        "stop_reason": StopReason.STOP,
    }
    return Step(**{**fields, **changes})


def make_trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "g000000.0",
        "task_id": "t",
        "attempt": 0,
        "steps": (make_step(),),
        "reward": 0.0,
        "status": Status.DONE,
    }
    return Trajectory(**{**fields, **changes})


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_only_copies(name: str) -> None:
    given_array = np.array(getattr(make_step(), name))
    step = make_step(**{name: given_array})
    before = getattr(step, name).copy()
    given_array[0] = not given_array[0] if name == "mask" else given_array[0] - 1
    assert np.array_equal(getattr(step, name), before)
    with pytest.raises(ValueError, match="read-only"):
        getattr(step, name)[0] = 0


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copies_and_pickles_are_equal_and_read_only(clone: Any) -> None:
    step = make_step(mask=[True, False], reward=0.5, seconds=1.5)
    twin = clone(step)
    for name in ARRAYS:
        assert np.array_equal(getattr(twin, name), getattr(step, name))
        assert not getattr(twin, name).flags.writeable
    assert (twin.reward, twin.seconds, twin.sampling) == (0.5, 1.5, step.sampling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"completion_ids": [9.0, 12.0]}, "completion_ids must hold int32"),
        ({"completion_ids": [9, -1]}, r"completion_ids must lie in \[0, 2\*\*31\), got -1"),
        ({"completion_ids": [9, 2**31]}, r"completion_ids must lie in .*2147483648"),
        ({"completion_ids": [[9, 12]]}, r"one dimension, got shape \(1, 2\)"),
        ({"completion_ids": [9, 12, 3]}, "logprobs has 2 entries for 3 completion tokens"),
        ({"logprobs": [-0.3]}, "logprobs has 1 entries for 2"),
        ({"logprobs": [-1, -2]}, "logprobs must hold float32"),
        ({"logprobs": [-0.3, float("nan")]}, "finite and <= 0, got nan"),
        ({"logprobs": [-0.3, -1e300]}, "finite and <= 0, got -inf"),
        ({"logprobs": [0.25, -0.3]}, "finite and <= 0, got 0.25"),
        ({"policy_versions": [4, -1]}, "policy_versions must lie in"),
        ({"mask": [1, 0]}, "mask must hold bool"),
        ({"mask": [True, False], "sampling": GREEDY}, "greedy"),
        ({"reward": float("nan")}, "reward must be a finite number, .* got nan"),
    ],
)
def test_a_step_that_breaks_the_contract_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_step(**changes)


def test_greedy_tokens_are_never_trainable() -> None:
    assert not make_step(sampling=GREEDY).mask.any()
    assert not make_step(sampling=GREEDY, mask=[False, False]).mask.any()


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e30, 0.0), st.integers(0, 2**31 - 1), st.booleans())))
def test_whatever_was_sampled_is_recorded_unchanged(tokens: list[tuple[int, float, int, bool]]) -> None:
    ids, logprobs, versions, mask = ([token[i] for token in tokens] for i in range(4))
    step = make_step(completion_ids=ids, logprobs=logprobs, policy_versions=versions, mask=np.array(mask, np.bool_))
    assert step.completion_ids.tolist() == ids
    assert step.policy_versions.tolist() == versions
    assert step.mask.tolist() == mask
    assert np.array_equal(step.logprobs, np.array(logprobs, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"stop": ("</a>", "")}, "stop string"),
    ],
)
def test_impossible_sampling_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SamplingParams(**changes)


FAILURE = Failure(Cause.ENVIRONMENT, "broke")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": None}, "status done with reward None"),
        ({"reward": None, "status": Status.FAILED}, "status failed with failure None"),
        ({"reward": 0.0, "status": Status.FAILED, "failure": FAILURE}, "status failed with reward 0.0"),
        ({"failure": FAILURE}, "status done with failure"),
        ({"reward": float("inf")}, "reward must be a finite number, .* got inf"),
    ],
)
def test_a_missing_reward_and_a_failure_come_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_trajectory(**changes)


def test_messages_from_outside_are_copied() -> None:
    source = [{"role": "user", "content": "hi", "name": "Anna"}]
    messages = as_messages(source, "row 3")
    source[0]["content"] = "changed"
    assert messages == ({"role": "user", "content": "hi", "name": "Anna"},)


def test_tool_calls_come_in_with_their_arguments_as_json_text() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    [message] = as_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], "row 3")
    made = {"id": "", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [made]}


@pytest.mark.parametrize("arguments", ["", " ", None, [], "null", "[]", {}])
def test_arguments_that_are_none_are_an_empty_object(arguments: Any) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    [message] = as_messages([{"role": "assistant", "tool_calls": [call]}], "row 3")
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_content_may_be_text_parts_and_an_assistants_may_be_missing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [("user", parts), ("assistant", parts), ("assistant", None)]
    rows: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in said]
    assert [message["content"] for message in as_messages(rows, "row 3")] == ["a\nb", "ab", ""]
    with pytest.raises(DataError, match="needs string role and content"):
        as_messages([{"role": "user", "content": [{"type": "input_audio"}]}], "row 3")


@pytest.mark.parametrize(
    "value",
    [
        *("hi", {"role": "user", "content": "hi"}, ["hi"], [{"role": "user"}], [{"role": "user", "content": None}]),
        [{"role": "user", "content": "hi", "contents": "ho"}],
        [{"role": "tool", "content": "hi", "tool_call_id": 3}],
        [{"role": "assistant", "content": "", "tool_calls": ["add"]}],
    ],
)
def test_malformed_messages_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(DataError, match="row 3"):
        as_messages(value, "row 3")


def test_a_task_is_plain_json_data_with_checked_messages() -> None:
    with pytest.raises(DataError, match="task t: 'ground_truth' is of type object, which is not plain JSON data"):
        Task("t", ground_truth=object())
    with pytest.raises(DataError, match="task t: prompt: message 0 needs 'role' and 'content'"):
        Task("t", prompt=[{"role": "user"}])  # type: ignore[typeddict-item]
    assert Task("t", prompt=[{"role": "user", "content": "x"}]).prompt == ({"role": "user", "content": "x"},)


ROUTING = [[[0, 3], [1, 2]], [[3, 1], [0, 1]]]


def test_routing_is_kept_as_int16_read_only_and_through_pickling() -> None:
    for routing in (ROUTING, ROUTING[:1], np.empty((0, 2, 2), np.int64)):
        step = make_step(routing=np.array(routing))
        for one in (step, pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
            assert one.routing is not None and one.routing.dtype == np.int16 and not one.routing.flags.writeable
            assert np.array_equal(one.routing, routing)
    assert make_step().routing is None


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (ROUTING * 2, r"at most 2 tokens, got shape \(4, 2, 2\)"),
        (ROUTING[0], r"\[tokens, layers, experts\] of at most 2 tokens, got shape \(2, 2\)"),
        ([[[0, -1]]], r"experts in \[0, 2\*\*15\), got int64 -1 .. 0"),
        ([[[0, 2**15]]], r"got int64 0 .. 32768"),
        *(([[[0.0, 1.0]]], "got float64"), ([[[0, 1], [2, 2]]], "an expert twice")),
    ],
)
def test_routing_that_no_model_could_have_chosen_is_refused(routing: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_step(routing=np.array(routing))


ids = st.lists(st.integers(0, 1), max_size=8)


@given(ids, ids)
def test_it_counts_leading_ids_that_agree(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected
