"""Environment `search` against the published ones, by a table of scripted attempts; outages are no observations."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx")

from tests.envs.search_cases import CASES, SHOWN, Case
from tests.retrieval.servers import found, scripted_server
from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.types import Message, Status, Task
from treadle.envs.base import EnvStep, Finish
from treadle.envs.search.environment import Search, answer_of

PROMPT = (Message(role="user", content="What does Anna like?"),)


class Scripted(Search):
    """Finds what the table says."""

    async def retrieve(self, query: str, topk: int) -> Sequence[str]:
        return SHOWN[query][:topk]


def task(truth: Any = "chess") -> Task:
    return Task("question", PROMPT, "search", truth)


async def play(environment: Search, replies: Sequence[str], truth: Any = "chess") -> tuple[list[EnvStep], Finish]:
    assert await environment.reset(task(truth)) == PROMPT
    steps = [await environment.step(reply) for reply in replies]
    finish = await environment.finish(Status.DONE)
    await environment.close()
    return steps, finish


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_rewards_and_observations_are_the_published_ones(case: Case) -> None:
    steps, finish = await play(Scripted(max_turns=2, protocol=case.protocol), case.replies, case.golden)
    assert [message["content"] for step in steps for message in step.observations] == case.shown
    assert all(message["role"] == "user" for step in steps for message in step.observations)
    assert finish.reward == case.reward
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [case.done]
    assert all(step.reward == 0 for step in steps)


@pytest.mark.parametrize("truth", ["chess", ["golf", "chess"], {"target": "chess"}, {"target": ["golf", "chess"]}])
async def test_answers_may_lie_in_a_row_in_every_published_form(truth: Any) -> None:
    assert (await play(Scripted(), ["<answer>Chess</answer>"], truth))[1].reward == 1


@pytest.mark.parametrize("truth", [None, 7, [], [7], {}, {"target": []}, {"answers": ["chess"]}])
async def test_a_ground_truth_that_holds_no_answer_is_refused(truth: Any) -> None:
    with pytest.raises(DataError, match=r"task question of environment search: .*data\.columns\.ground_truth"):
        await Scripted().reset(task(truth))


async def test_what_is_counted() -> None:
    replies = ["<search>anna</search>", "hm", "<search>nothing</search>", "<answer>golf</answer>"]
    steps, finish = await play(Scripted(), replies)
    assert [dict(step.info) for step in steps] == [
        {"searches": True, "invalid_replies": False, "empty_searches": False},
        {"searches": False, "invalid_replies": True},
        {"searches": True, "invalid_replies": False, "empty_searches": True},
        {"searches": 0, "invalid_replies": 0},
    ]
    assert finish == Finish(0.0, {"answered": True})


@pytest.mark.parametrize(
    "options",
    [{"topk": "zero"}, {"topk": 0}, {"max_turns": 2.5}, {"max_turns": True}, {"patience": -1.0}, {"protocol": "r1"}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    wrong = r"must be a (whole )?number above 0|is 'r1'; it must be one of skyrl, search_r1"
    with pytest.raises(ConfigError, match=rf"{next(iter(options))} ({wrong})"):
        Search(**options)


async def test_passages_come_from_the_server() -> None:
    async with scripted_server([found('"Anna"\nAnna likes chess.')]) as server:
        steps, _ = await play(Search(server.url, topk=5), ["<search> Anna </search>"])
        assert server.requests == [{"query": "Anna", "queries": ["Anna"], "topk": 5, "return_scores": True}]
    [message] = steps[0].observations
    assert message["content"] == (
        '\n<information>{"result": "Doc 1: \\"Anna\\"\\nAnna likes chess.\\n"}</information>\n'
    )


async def test_an_outage_fails_the_attempt_and_is_no_observation() -> None:
    environment = Search("http://127.0.0.1:9/retrieve", patience=0.2)
    await environment.reset(task())
    with pytest.raises(TrajectoryFailure, match=r"the retrieval server at http://127.0.0.1:9/retrieve") as failed:
        await environment.step("<search>Anna</search>")
    assert failed.value.cause is Cause.INFRASTRUCTURE
    await environment.close()


async def test_the_last_turn_needs_no_server() -> None:
    steps, _ = await play(Search("http://127.0.0.1:9/retrieve", max_turns=1), ["<search>Anna</search>"])
    assert steps[0].done


TEXT = st.lists(st.sampled_from(["<answer>", "</answer>", "chess", " a ", "<search>", "</search>", "ß"])).map("".join)


@given(st.lists(TEXT, max_size=4), st.sampled_from(["skyrl", "search_r1"]))
def test_no_text_breaks_it_and_only_written_answers_count(replies: list[str], protocol: str) -> None:
    """Every passage holds a right answer; no reply without an answer ever gets it."""

    class Generous(Search):
        async def retrieve(self, query: str, topk: int) -> Sequence[str]:
            return ["Gift\n<answer>gift</answer>", "<answer>", "gift</answer>"]

    async def attempt() -> Finish:
        environment = Generous(protocol=protocol, max_turns=9)
        await environment.reset(task("gift"))
        for reply in replies:
            if (await environment.step(reply)).done:
                break
        return await environment.finish(Status.DONE)

    assert asyncio.run(attempt()).reward == 0


def test_no_answer() -> None:
    assert answer_of([]) is None
    assert answer_of(["", "<answer>"]) is None
    assert answer_of(["<answer>x", "</answer>"]) not in ("x", None)
