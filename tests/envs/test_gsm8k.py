"""GSM8K against the published environments, by tables of scripted replies, and over the whole data set."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.gsm8k_cases import ATTEMPTS, REPLIES, RIGHT, WRONG, Attempt, Reply
from treadle.core.errors import ConfigError, DataError
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, load_tasks
from treadle.envs.base import EnvStep
from treadle.envs.gsm8k import Gsm8kMultiTurn, answer_of, reward

PROMPT = (Message(role="user", content="How many clips?"),)
SIZES = {"train": 7473, "test": 1319}


def task(truth: Any = "72") -> Task:
    return Task("clips", PROMPT, ground_truth=truth)


@pytest.mark.parametrize("case", REPLIES.values(), ids=REPLIES.keys())
def test_rewards_are_the_published_ones(case: Reply) -> None:
    assert reward(task(case.golden), case.text) == case.reward
    assert reward(task(f"A <<1+1=2>>solution.\n#### {case.golden}"), case.text) == case.reward


@pytest.mark.parametrize("case", ATTEMPTS.values(), ids=ATTEMPTS.keys())
async def test_turns_are_the_published_ones(case: Attempt) -> None:
    environment = Gsm8kMultiTurn(max_turns=case.max_turns)
    assert await environment.reset(task()) == PROMPT
    steps = [await environment.step(text) for text in case.replies]
    assert [total(step) for step in steps] == case.rewards
    assert [dict(message) for step in steps for message in step.observations] == [
        {"role": "user", "content": text} for text in case.shown
    ]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]


def total(step: EnvStep) -> float:
    assert isinstance(step.reward, Reward)
    return step.reward.total()


async def test_components_and_metrics() -> None:
    environment = Gsm8kMultiTurn()
    await environment.reset(task())
    steps = [await environment.step(text) for text in ("Hm.", WRONG, RIGHT)]
    given = [step.reward.by_name for step in steps if isinstance(step.reward, Reward)]
    assert given == [{}, {"format": 0.04}, {"answer": 1.0}]
    assert [step.info["no_answer"] for step in steps] == [True, False, False]


@given(st.text(), st.integers(-(10**12), 10**12), st.text())
def test_a_number_with_commas_is_found_again(before: str, number: int, after: str) -> None:
    if answer_of(before) is None and after[:1] not in {*"0123456789.,"}:
        assert answer_of(f"{before}#### {number:,}{after}") == str(number)


@pytest.mark.parametrize("truth", [None, 72, 72.0, "", "seventy-two", "72 clips", "$72", ["72"], {"target": "72"}])
async def test_a_ground_truth_that_no_reply_could_equal_is_refused(truth: Any) -> None:
    with pytest.raises(DataError, match=r"task clips of GSM8K: .*data\.columns\.ground_truth"):
        reward(task(truth), RIGHT)
    with pytest.raises(DataError, match="task clips of GSM8K"):
        await Gsm8kMultiTurn().reset(task(truth))


@pytest.mark.parametrize("turns", [0, -1, 2.5, "5", None])
def test_turns_that_are_none_are_refused(turns: Any) -> None:
    with pytest.raises(ConfigError, match=rf"max_turns must be a whole number above 0, got {turns!r}"):
        Gsm8kMultiTurn(max_turns=turns)


# The data set.


def load(file: Path, **options: Any) -> list[Task]:
    section = SourceConfig(source="gsm8k_questions", options={"file": str(file), **options})
    return list(load_tasks(section, "train", LoadContext()))


def test_the_prompts_are_the_published_ones(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "How many clips?", "answer": "48+24 = 1,272.\n#### 1,272"}))
    [single], [several] = load(file), load(file, multi_turn=True)
    step_by_step = "How many clips? Let's think step by step and output"
    assert single.prompt == (Message(role="user", content=f'{step_by_step} the final answer after "####".'),)
    tentative = f'{step_by_step} a tentative numeric answer after "####".'
    assert several.prompt == (Message(role="user", content=tentative),)
    assert (single.ground_truth, single.task_id) == (several.ground_truth, several.task_id) == ("1272", "train-000001")


@pytest.mark.parametrize("answer", ["72", "#### seventy", 72, None])
def test_a_row_without_an_answer_is_refused(tmp_path: Path, answer: Any) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "How many clips?", "answer": answer}))
    with pytest.raises(DataError, match=r"train\.jsonl:1: answer is .*; it must end with '#### ANSWER'"):
        load(file)


@pytest.fixture(params=SIZES)
def rows(request: pytest.FixtureRequest) -> tuple[Path, list[dict[str, str]]]:
    file = Path(os.environ.get("TREADLE_TEST_DATA", "nowhere"), "datasets", "gsm8k", f"{request.param}.jsonl")
    if not file.is_file():
        pytest.skip("TREADLE_TEST_DATA, which holds datasets/gsm8k, is not set")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(found) == SIZES[request.param]
    return file, found


def corrupted(solution: str, golden: str) -> dict[str, str]:
    """What is no right answer any more, of a solution that is."""
    steps, _, _ = solution.rpartition("#### ")
    return {
        "one more": f"{steps}#### {int(golden) + 1}",
        "one less": f"{steps}#### {int(golden) - 1}",
        "a digit more": f"{solution}0",
        "the other sign": f"{steps}#### {golden[1:] if golden.startswith('-') else f'-{golden}'}",
        "decimals": f"{solution}.0",
        "a full stop": f"{solution}.",
        "dollars": f"{steps}#### ${golden}",
        "no marker": f"{steps}{golden}",
        "no space": f"{steps}####{golden}",
        "no answer": steps,
        "cut off": f"{steps}####",
        "another answer first": f"#### {int(golden) + 1}\n{solution}",
    }


def test_every_golden_answer_is_right_and_corrupted_ones_are_wrong(rows: tuple[Path, list[dict[str, str]]]) -> None:
    file, found = rows
    tasks = load(file)
    for made, row in zip(tasks, found, strict=True):
        golden = row["answer"].split("####")[-1].strip().replace(",", "")
        assert made.ground_truth == golden
        plain = Task(made.task_id, made.prompt, ground_truth=row["answer"])
        for asked in (made, plain):
            assert reward(asked, row["answer"]) == reward(asked, f"#### {golden}") == 1
        for kind, text in corrupted(row["answer"], golden).items():
            assert reward(made, text) == 0, (made.task_id, kind)
