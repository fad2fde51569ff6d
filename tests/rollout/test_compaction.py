"""Conversations that are made shorter: by a summary that the policy writes, or by their environment."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.packing.tries import readings, readings_of_tree
from tests.rollout.test_finish import Finishing
from tests.worlds import (
    DONE,
    END,
    HELLO,
    MORE,
    PLAIN,
    Told,
    addresses,
    chatml,
    make_group,
    one,
    plain_ids,
    plain_rollouts,
    play,
    saying,
    tool,
    user,
)
from treadle.core.draws import Stream
from treadle.core.outcomes import as_played, computed_tokens
from treadle.core.types import (
    BreakCause,
    DropReason,
    Ids,
    Message,
    SamplingParams,
    Status,
    StopReason,
    Task,
    Trajectory,
)
from treadle.envs.base import INTRODUCTION, EnvStep, Finish
from treadle.packing.flat import calls, flatten
from treadle.packing.layout import Packing, arrange, micro_batches
from treadle.report.metrics import trajectory_metrics
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.history import History
from treadle.testing import FakeEngine

ASK = "Sum up."
REQUEST = plain_ids(chatml([user(ASK)]))


def saying_in_turn(*summaries: str, acts: str = "abcdef") -> FakeEngine:
    """Acts "a", "b", ...; a text of `summaries` where it is asked for one, the last of them again and again."""
    asked = 0

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        nonlocal asked
        if prompt.tolist()[-len(REQUEST) :] != REQUEST:
            acted = len(engine.calls) - asked - 1
            return [*plain_ids(acts[acted % len(acts)]), END]
        asked += 1
        return [*plain_ids(summaries[min(asked, len(summaries)) - 1]), END]

    engine = FakeEngine(reply)
    return engine


def compacting(**more: Any) -> dict[str, Any]:
    """Settings with which a conversation of more than three turns of `MORE` is summed up."""
    compaction = {"at": len(plain_ids(chatml([*HELLO, *turns("abc")]))), "prompt": ASK, "keep_last": 0, "max_tokens": 8}
    return {"compaction": {**compaction, **more}, "max_steps": 12}


def turns(replies: str) -> list[Message]:
    return [m for reply in replies for m in (assistant(reply), tool("more"))]


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def prompts(trajectory: Trajectory) -> list[str]:
    return [str(PLAIN.decode(step.prompt_ids)) for step in trajectory.steps]


def fates(trajectory: Trajectory) -> str:
    """One letter a step: an act, a summary; upper case: rejected."""
    letters = ("s" if step.summary else "a" for step in trajectory.steps)
    return "".join(
        letter.upper() if step.dropped is DropReason.REJECTED else letter
        for letter, step in zip(letters, trajectory.steps, strict=True)
    )


# A summary that the policy writes


@pytest.mark.parametrize(("keep_last", "kept"), [(0, ""), (1, "d"), (2, "d"), (3, "cd")])
def test_a_conversation_that_is_too_long_goes_on_from_task_summary_and_last_turns(keep_last: int, kept: str) -> None:
    opening = [Message(role="system", content="be brief"), *HELLO]
    mark = len(plain_ids(chatml([*opening, *turns("abc")])))
    settings = compacting(keep_last=keep_last, at=mark)
    trajectory = one(Told(*[MORE] * 4, DONE, opening=opening), saying_in_turn("notes"), **settings)
    assert (trajectory.status, trajectory.reward, fates(trajectory)) == (Status.DONE, 2.0, "aaaasa")
    assert [step.reward for step in trajectory.steps] == [0.25] * 4 + [0.0, 1.0]
    whole = [*opening, *turns("abcd")]
    assert prompts(trajectory)[4:] == [
        chatml([*whole, user(ASK)]),
        chatml([*opening, user(INTRODUCTION + "notes"), *turns(kept)]),
    ]
    assert [step.break_cause for step in trajectory.steps] == [None] * 5 + [BreakCause.SUMMARY]
    assert [step.sampling.max_tokens for step in trajectory.steps[3:]] == [16, 8, 16]


def test_it_goes_on_to_be_summed_up_and_the_last_summary_stays() -> None:
    trajectory = one(Told(*[MORE] * 9, DONE), saying_in_turn("one", "two"), **compacting(at=130))
    steps, texts = trajectory.steps, prompts(trajectory)
    summaries = [n for n, step in enumerate(steps) if step.summary]
    assert len(summaries) > 2 and trajectory.reward == 3.25
    assert [n for n, step in enumerate(steps) if step.break_cause] == [n + 1 for n in summaries]
    assert texts[summaries[1] + 1] == chatml([*HELLO, user(INTRODUCTION + "two")])
    row = trajectory_metrics([make_group(0, trajectory)], 1, 1.0, 0)
    assert row["compactions_mean"] == len(summaries)
    assert row["summary_tokens_mean"] == 4 * len(summaries)
    assert (row["steps_mean"], row["rejected_share"]) == (len(steps), 0.0)


def test_a_summary_that_is_cut_or_empty_is_rejected_and_drawn_again() -> None:
    engine = saying_in_turn("too long a text", " ", "notes")
    trajectory = one(Told(*[MORE] * 4, DONE), engine, **compacting(attempts=3))
    assert (fates(trajectory), trajectory.reward) == ("aaaaSSsa", 2.0)
    cut, empty, accepted = trajectory.steps[4:7]
    assert (cut.stop_reason, empty.stop_reason) == (StopReason.LENGTH, StopReason.STOP)
    assert len({step.sampling.seed for step in (cut, empty, accepted)}) == 3
    assert cut.prompt_ids.tolist() == empty.prompt_ids.tolist() == accepted.prompt_ids.tolist()
    assert len(as_played(trajectory).steps) == 6
    row = trajectory_metrics([make_group(0, trajectory)], 1, 1.0, 0)
    assert (row["rejected_share"], row["rejected_tokens"], row["dropped_rejected"]) == (2 / 8, 8 + 2, 2)
    assert (row["steps_mean"], row["compactions_mean"], row["summary_tokens_mean"]) == (6, 1, 6)


@pytest.mark.parametrize(
    ("summary", "settings", "fate"),
    [
        ("too long a text", {}, "aaaaSS"),
        ("notes", {"max_input_tokens": len(plain_ids(chatml([*HELLO, *turns("abcd"), user(ASK)]))) - 1}, "aaaa"),
        ("n" * 120, {"max_tokens": 199, "keep_last": 2, "max_input_tokens": 190}, "aaaas"),
    ],
    ids=["no summary accepted", "no room to ask", "does not fit even so"],
)
def test_an_attempt_without_a_way_out_ends_as_one_whose_context_is_full(
    summary: str, settings: dict[str, Any], fate: str
) -> None:
    limit = {"max_input_tokens": settings.pop("max_input_tokens", 1024)}
    world = Finishing(*[MORE] * 9, last=Finish(0.5))
    trajectory = one(world, saying_in_turn(summary), **{**compacting(**settings), **limit})
    assert (trajectory.status, fates(trajectory), world.ended) == (Status.CONTEXT, fate, [Status.CONTEXT])
    assert [step.reward for step in trajectory.steps] == [0.25] * 3 + [0.75] + [0.0] * (len(fate) - 4)
    assert trajectory.reward == 1.5


def test_max_steps_counts_turns_and_not_summaries() -> None:
    trajectory = one(Told(*[MORE] * 9), saying_in_turn("x", "notes"), **{**compacting(max_tokens=5), "max_steps": 5})
    assert (trajectory.status, fates(trajectory)) == (Status.MAX_STEPS, "aaaasa")


def test_tokens_of_a_whole_attempt_have_a_limit() -> None:
    settings = compacting()
    whole = one(Told(*[MORE] * 9, DONE), saying_in_turn("notes"), **settings)
    used = [computed_tokens(whole.steps[:n]) for n in range(len(whole.steps) + 1)]
    assert used[2] == len(whole.steps[1].full_ids)  # read once, while nothing is replaced
    assert used[6] - used[5] > len(whole.steps[5].completion_ids) + len(plain_ids(INTRODUCTION))  # read again
    for limit, steps in ((used[3], 3), (used[3] + 1, 4), (used[4], 4), (used[5], 5)):
        world = Finishing(*[MORE] * 9, DONE, last=Finish(0.5))
        trajectory = one(world, saying_in_turn("notes"), max_total_tokens=limit, **settings)
        assert (trajectory.status, len(trajectory.steps)) == (Status.MAX_STEPS, steps)
        assert world.ended == [Status.MAX_STEPS]
        assert trajectory.reward == 0.5 + 0.25 * min(steps, 4)


def test_a_reply_that_the_task_begins_is_no_part_of_what_stays() -> None:
    opening = [*HELLO, assistant("The sum is")]
    trajectory = one(Told(*[MORE] * 4, DONE, opening=opening), saying_in_turn("notes"), **compacting())
    assert chatml([*HELLO, user(INTRODUCTION + "notes")]) in prompts(trajectory)


def test_no_summary_takes_the_place_of_nothing() -> None:
    """The first turn is kept: there is nothing to sum up, however long it is."""
    trajectory = one(Told(EnvStep([tool("x" * 200)]), DONE), saying_in_turn("notes"), **compacting(keep_last=2))
    assert (fates(trajectory), trajectory.status) == ("aa", Status.DONE)


@pytest.mark.parametrize(
    ("roles", "last", "kept"),
    [
        ("atatat", 0, ""),
        ("atatat", 1, "at"),
        ("atatat", 2, "at"),
        ("atatat", 3, "atat"),
        ("atattt", 1, "attt"),  # the answers of one turn's calls
        ("atattt", 5, None),
        ("at", 2, None),
        ("uatat", 2, "at"),  # after an earlier summary
        ("uat", 2, None),
        ("uat", 0, ""),
        ("u", 0, None),
    ],
)
def test_whole_turns_are_kept(roles: str, last: int, kept: str | None) -> None:
    names = {"a": "assistant", "t": "tool", "u": "user"}
    history = History(HELLO)
    history.messages += [Message(role=names[role], content=str(n)) for n, role in enumerate(roles)]
    found = history.kept(last)
    assert (None if found is None else "".join(message["role"][0] for message in found)) == kept


@pytest.mark.parametrize("stream", [Stream.TRAIN, Stream.EVALUATE])
async def test_summaries_may_be_played_and_not_trained(stream: Stream) -> None:
    rollouts = plain_rollouts(
        saying_in_turn("too long a text", "notes"), lambda: Told(*[MORE] * 4, DONE), **compacting(trained=False)
    )
    [playing] = rollouts.start("g0", Task("t", environment="world"), addresses(stream=stream))
    trajectory = await playing
    masked = DropReason.MASKED if stream is Stream.TRAIN else None
    assert [step.dropped for step in trajectory.steps] == [None] * 4 + [DropReason.REJECTED, masked, None]
    assert len(as_played(trajectory).steps) == 6
    batch = flatten([make_group(0, trajectory)])
    assert len(batch.steps) == (5 if masked else 6) and batch.played_rewards.sum() == trajectory.reward == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"conversation": "single_message"}, "compaction needs a conversation of several messages"),
        ({"at": 1}, "compaction.at is 1, which leaves nothing of max_input_tokens 1024"),
        ({"at": 1024}, "compaction.at is 1024, which leaves nothing"),
        ({"at": 1.5}, "1.5 is neither a share below 1 nor a number of tokens"),
        ({"at": 0}, "greater than 0"),
        ({"prompt": ""}, "at least 1 character"),
    ],
)
def test_compaction_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    rollout = {"conversation": settings.pop("conversation", "turns")}
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(compaction=settings, **rollout)  # type: ignore[arg-type]


def test_the_mark_is_a_share_of_the_context_or_tokens() -> None:
    marks = [
        RolloutConfig(max_input_tokens=1000, compaction={"at": at}).compaction_mark  # type: ignore[arg-type]
        for at in (0.5, 999)
    ]
    assert marks == [500, 999]
    assert RolloutConfig(max_input_tokens=10, compaction={"at": 5, "max_tokens": 300}).longest_call == 310  # type: ignore[arg-type]


# Environments that do it themselves


def test_an_environment_may_replace_the_conversation() -> None:
    replaced = EnvStep([tool("now")], history=[*HELLO, user("so far: a, b")])
    trajectory = one(Told(MORE, replaced, MORE, DONE), saying_in_turn())
    last = [*HELLO, user("so far: a, b"), tool("now")]
    assert prompts(trajectory)[2:] == [chatml(last), chatml([*last, *turns("c")])]
    assert [step.break_cause for step in trajectory.steps] == [None, None, BreakCause.SUMMARY, None]
    assert trajectory.reward == 1.5


@pytest.mark.parametrize(
    ("history", "cause"),
    [
        ([*HELLO, user("notes"), *turns("b")], BreakCause.SUMMARY),
        ([*HELLO, *turns("b")], BreakCause.TRUNCATED),
        ([*HELLO, user("x"), user("y"), *turns("b")], BreakCause.HISTORY_EDITED),
        ([*HELLO, *turns("ab")], None),
        ([*HELLO, *turns("a")], None),  # back to where it was
    ],
)
def test_the_cause_is_what_became_of_the_messages(history: list[Message], cause: BreakCause | None) -> None:
    trajectory = one(Told(MORE, EnvStep(history=history), DONE), saying_in_turn())
    assert prompts(trajectory)[2] == chatml(history)
    assert trajectory.steps[2].break_cause is cause


def test_a_rejected_reply_leaves_the_conversation_as_if_it_had_not_been_given() -> None:
    again = EnvStep([user("again:")], rejected=True)
    world = Finishing(MORE, again, EnvStep(rejected=True), MORE, again, last=Finish(0.5))
    trajectory = one(world, saying_in_turn(), max_steps=5)
    assert fates(trajectory) == "aAAaA"
    before = [*HELLO, *turns("a")]
    asked = [*before, user("again:")]
    assert prompts(trajectory)[1:] == [chatml(before), chatml(asked), chatml(asked), chatml([*asked, *turns("d")])]
    assert [step.reward for step in trajectory.steps] == [0.25, 0.0, 0.0, 0.75, 0.0]
    assert (trajectory.status, trajectory.reward) == (Status.MAX_STEPS, 1.0)
    assert {step.break_cause for step in trajectory.steps} == {None}


def test_the_cause_of_a_rejected_call_is_that_of_the_call_in_its_place() -> None:
    replaced = EnvStep(history=[*HELLO, user("notes")])
    trajectory = one(Told(MORE, replaced, EnvStep(rejected=True), DONE), saying_in_turn())
    assert [step.break_cause for step in trajectory.steps] == [None, None, BreakCause.SUMMARY, BreakCause.SUMMARY]


@pytest.mark.parametrize(
    ("answer", "settings", "message"),
    [
        (EnvStep([tool("x")], 0.5, rejected=True), {}, "rejected a reply and gave the reward 0.5"),
        (EnvStep(done=True, rejected=True), {}, "rejected a reply and gave done"),
        (EnvStep(rejected=None), {}, "rejected=None; it must be true or false"),  # type: ignore[arg-type]
        (EnvStep(history=[]), {}, "step: history gave no messages"),
        (EnvStep(history=[{"role": "user"}]), {}, "step: history must give messages"),
        (EnvStep(rejected=True), {"conversation": "single_message"}, "set rollout.conversation to 'turns'"),
        (EnvStep(rejected=True), {"max_steps": 1}, "the environment used none of the model's 1 replies"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_the_attempt(answer: EnvStep, settings: Any, message: str) -> None:
    trajectory = one(Told(answer), **settings)
    assert trajectory.failure is not None and message in trajectory.failure.message


# Whatever happens


ANSWERS = st.sampled_from(["go on", "go on", "rejected", "replaced"])


def _answer(kind: str, reward: float) -> EnvStep:
    match kind:
        case "rejected":
            return EnvStep([user("again")], rejected=True)
        case "replaced":
            return EnvStep([tool("now")], reward, history=[*HELLO, user("so far")])
    return EnvStep([tool("more")], reward)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(ANSWERS, st.sampled_from([0.0, 0.25, -1.0])), min_size=1, max_size=9),
    st.lists(st.sampled_from(["notes", "", "far too long"]), min_size=1, max_size=5),
    st.integers(40, 150),
    st.integers(0, 3),
)
def test_each_accepted_token_is_trained_once_and_none_of_a_rejected_call(
    answers: Sequence[tuple[str, float]], summaries: Sequence[str], at: int, keep_last: int
) -> None:
    worlds = [Told(*[_answer(*each) for each in answers], EnvStep(reward=1.0, done=True)) for _ in range(2)]
    limits = {**compacting(at=at, keep_last=keep_last), "max_input_tokens": 220}
    attempts = play([lambda world=world: world for world in worlds], saying_in_turn(*summaries), **limits)  # type: ignore[misc]
    group = make_group(0, *attempts)
    batch = flatten([group])
    graded = [t for t in attempts if t.reward is not None]
    accepted = [step for t in graded for step in t.steps if step.dropped is not DropReason.REJECTED]
    assert [*batch.steps] == accepted
    assert batch.rewards.tolist() == [sum(step.reward for step in t.steps) for t in graded]
    assert all(step.reward == 0 for t in attempts for step in t.steps if step.dropped or step.summary)
    wanted = readings(calls(batch))
    assert sorted(wanted) == list(range(sum(len(step.completion_ids) for step in accepted)))
    for packing in Packing:
        trees = micro_batches(arrange(calls(batch), packing), 64)
        read = [pair for tree in trees for pair in readings_of_tree(tree).items()]
        assert len(read) == len(wanted) and dict(read) == wanted


def test_without_compaction_no_summary_is_asked_for() -> None:
    engine = saying("a")
    trajectory = one(Told(*[MORE] * 9), engine, max_input_tokens=150, max_steps=20)
    assert trajectory.status is Status.CONTEXT
    assert not any(step.summary or step.dropped for step in trajectory.steps)
