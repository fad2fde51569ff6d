"""Agents of people's own: with sub-agents, installed in the sandbox, never ending, and wrong about themselves."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.harbor.trials import (
    WELL,
    Sampled,
    check_trained_once,
    harbor,
    play,
    playing,
    scripted,
    write_task,
)
from tests.integrations.libraries import KeptWorkers
from treadle.core.types import Status, Trajectory
from treadle.integrations.harbor.tasks import harbor_sums

TOUCH = "touch /app/hello.txt"


def played(kept: KeptWorkers, engine: Any, agent: str, tmp_path: Path, **rollout: Any) -> Trajectory:
    config = harbor(tmp_path / "trials", agent=f"scripted_agents:{agent}")
    if agent != "Misreporting":  # the others do not have Terminus-2's options
        config = config.model_copy(update={"trial": {}})
    [found] = kept.run(play(engine, [write_task(tmp_path / "task")], config, **rollout))
    return found


def test_a_sub_agent_is_a_branch_of_its_attempt_and_each_sampled_token_is_trained_once(
    kept: KeptWorkers, tmp_path: Path
) -> None:
    def reply(text: str) -> str:
        last = text.rsplit("<|im_start|>user", 1)[1]
        if "The sub-agent says" in last:
            return TOUCH
        return "It is right." if "Check it." in last else f"Please see to this, {len(text)}."

    engine = Sampled(scripted(reply))
    found = played(kept, engine, "Delegating", tmp_path)
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 4)
    assert engine.recorded(found)
    check_trained_once(found)


def test_a_program_that_is_installed_in_the_sandbox_trains_just_the_same(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = Sampled(scripted(playing(TOUCH, "ls /app")))
    found = played(kept, engine, "Program", tmp_path)
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 2)
    assert engine.recorded(found)
    assert found.metrics["calls_unreported"] == found.metrics["calls_misreported"] == 0  # it keeps no record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"max_steps": 2}, (Status.MAX_STEPS, 1.0)), ({"max_input_tokens": 60}, (Status.CONTEXT, 0.0))],
    ids=["steps", "context"],
)
def test_an_agent_that_raises_when_it_is_refused_met_a_limit(
    kept: KeptWorkers, limits: dict[str, int], expected: tuple[Status, float], tmp_path: Path
) -> None:
    """Of the limit on calls it is verified, though the agent may raise before the word of it comes."""
    found = played(kept, Sampled(scripted(lambda text: "ok")), "NeverEnds", tmp_path, **limits)
    assert (found.status, found.reward) == expected, found.failure
    assert len(found.steps) >= 2


@pytest.mark.slow
def test_an_agents_own_record_that_is_wrong_is_a_metric_and_a_warning(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = Sampled(scripted(playing(*WELL)))
    found = played(kept, engine, "Misreporting", tmp_path)
    assert (found.status, found.reward) == (Status.DONE, 1.0)
    assert engine.recorded(found)
    assert found.metrics["calls_misreported"] == found.metrics["calls_unreported"] == 1
    assert found.warning.startswith("the agent's own record (rollout_details) holds calls with other tokens")


def test_a_reply_with_a_zero_byte_is_wrong_and_not_a_failure(
    kept: KeptWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model says is graded: no command can hold this."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    config = harbor(tmp_path / "trials", agent="treadle_small:OneReply", trial={})
    [task] = harbor_sums("train", 1)
    [found] = kept.run(play(scripted(playing(f"<answer> {task.ground_truth}</answer>\0")), [task], config))
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 0.0, 1)
