"""Turns are rewarded by how probable a frozen model finds the ground truth before and after them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import exact, full, make_step, random_groups, step_logprobs
from tests.runs import Interrupting, check_finished, resume, start, updates
from tests.training.reference import LAYOUTS, FewIds, adapted, forked_groups, make_learner
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig
from treadle.algorithms.distillation import turn_credit
from treadle.algorithms.estimators import Signals, advantages
from treadle.core.errors import ConfigError
from treadle.core.types import DropReason, Group, Task
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.packing.flat import Doubles, flatten
from treadle.training.config import OptimizerConfig, TrainingConfig, check_algorithm
from treadle.training.objective import TracedGroups
from treadle.training.teacher_prompts import Truths, load_target

RENDERER = load_chat(ModelConfig(build={"model_type": "qwen3"}, tokenizer="demo"), None)[1]
TEXT = "Ann"


def algorithm_of(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage="step_return", distillation=section(**fields))


def section(**fields: Any) -> DistillationConfig:
    return DistillationConfig(**{"teacher": "T", "form": "turns", "coef": 0.1, **fields})


def with_dropped(groups: list[Group]) -> list[Group]:
    """A step that was thrown away, and one that is too old: the first is no turn, the second is one."""
    first, *others = groups[0].trajectories
    steps = list(first.steps)
    steps[1] = replace(steps[1], dropped=DropReason.REJECTED)
    steps[2] = replace(steps[2], dropped=DropReason.STALE)
    return [replace(groups[0], trajectories=(replace(first, steps=tuple(steps)), *others)), *groups[1:]]


def known_by(model: PreTrainedModel, groups: list[Group]) -> Doubles:
    batch, truths = flatten(groups), FewIds()
    group = batch.group_of_trajectory[batch.trajectory_of_played]
    with torch.no_grad():
        asked = [
            make_step(step.prompt_ids, truths._ids(batch.groups[g].task))
            for step, g in zip(batch.played, group, strict=True)
        ]
        return np.array([full(step_logprobs(model, step)[0]).sum() for step in asked])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("policy", [exact, lambda: adapted(exact())], ids=["all weights", "adapters"])
def test_each_turn_is_credited_with_what_the_teacher_learns_from_it(
    policy: Callable[[], PreTrainedModel], layout: dict[str, Any]
) -> None:
    groups, algorithm = with_dropped(forked_groups(groups=2)), algorithm_of()
    traced = TracedGroups(share=1.0)
    training: dict[str, Any] = {"max_tokens_per_microbatch": 40, **layout}
    learner = make_learner(policy(), algorithm, traced=traced, teacher=exact(seed=5), truths=FewIds(), **training)
    (result,) = learner.train_batch(groups)
    batch, known = flatten(groups), known_by(exact(seed=5), groups)
    credit = 0.1 * turn_credit(known, batch.trajectory_of_played, repaid=True)
    expected = advantages(batch, AlgorithmConfig(advantage="step_return"), Signals(credit=credit))
    found = np.concatenate([trace.advantage for trace in result.traces])
    np.testing.assert_allclose(found[batch.mask], expected[batch.mask], rtol=1e-6, atol=1e-6)
    assert result.metrics["truth_logprob"] == pytest.approx(known.mean())
    plain = advantages(batch, AlgorithmConfig(advantage="step_return"))
    assert np.abs(expected - plain)[batch.mask].max() > 0.01


def test_the_policy_before_rl_is_a_teacher_too() -> None:
    groups = random_groups(0)
    fast = OptimizerConfig(learning_rate=1e-2)
    learner = make_learner(
        exact(), algorithm_of(teacher=None, weights="start"), truths=FewIds(), updates=3, optimizer=fast
    )
    wanted = known_by(exact(), groups).mean()
    for _ in range(2):
        (result,) = learner.train_batch(groups)
        assert result.metrics["truth_logprob"] == pytest.approx(wanted)
    assert known_by(learner.model, groups).mean() != pytest.approx(wanted, rel=1e-3)


def test_credits_of_an_attempt_are_what_the_truth_gains_by_its_turns() -> None:
    known, trajectory = np.array([-8.0, -5.0, -1.0, -8.0, -9.0]), np.array([0, 0, 0, 1, 1])
    assert turn_credit(known, trajectory, repaid=False).tolist() == [3, 4, 0, -1, 0]
    assert turn_credit(known, trajectory, repaid=True).tolist() == [3, 4, 1, -1, 9]
    assert turn_credit(known[:0], trajectory[:0], repaid=True).tolist() == []


def target(task: Task) -> str:
    return f"<answer>{task.ground_truth}</answer>"


def test_a_truth_is_text() -> None:
    batch = flatten(random_groups(0))
    task = replace(batch.groups[0].task, ground_truth=TEXT)
    batch = replace(batch, groups=tuple(replace(g, task=task) for g in batch.groups))
    assert RENDERER.decode(Truths(None, RENDERER, 99).of(batch)[0]) == TEXT
    assert RENDERER.decode(Truths(f"{__name__}:target", RENDERER, 99).of(batch)[0]) == f"<answer>{TEXT}</answer>"
    for wrong in ("", None, ["Ann"], 3):
        other = replace(batch, groups=(replace(batch.groups[0], task=replace(task, ground_truth=wrong)),))
        with pytest.raises(ConfigError, match="name a function from a task to what a reply with the right answer"):
            Truths(None, RENDERER, 99).of(other)
    truths = Truths(None, RENDERER, 3)
    with pytest.raises(ConfigError, match=r"the teacher's context is 3; lower rollout\.max_input_tokens"):
        truths.asked(batch, truths.of(batch))
    with pytest.raises(ConfigError, match=r"is called as target\(task\), but: too many positional"):
        load_target(f"{__name__}:test_a_truth_is_text")


def vowels(task: Task) -> str:
    return "aeiou"


def test_a_run_credits_turns_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    options = (
        "algorithm.advantage=step_return",
        f"algorithm.distillation={{form: turns, weights: start, coef: 0.1, target: '{__name__}:vowels'}}",
        "orchestration.checkpoint_every=2",
    )
    straight = start(tmp_path / "straight", *options, "orchestration.updates=4")
    check_finished(tmp_path / "straight")
    assert all(row["truth_logprob"] < 0 for row in updates(tmp_path / "straight"))
    plain = start(tmp_path / "plain", options[0], "orchestration.updates=4")
    assert plain["weights_sha256"] != straight["weights_sha256"]
    stopped = start(tmp_path / "run", *options, "orchestration.updates=4", progress=Interrupting(which=3))
    assert stopped["stopped_early"]
    assert resume(tmp_path / "run")["weights_sha256"] == straight["weights_sha256"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"advantage": "grpo"}, "advantage 'grpo' uses their sum alone; choose step_return"),
        ({"distillation": {"context": "tests:context"}}, "leave distillation.context out"),
        ({"distillation": {"rewards": 0.5}}, "distillation.rewards is 0.5; leave it out"),
        ({"distillation": {"teacher": None}}, "set distillation.weights to start, or name a teacher"),
        ({"distillation": {"form": "loss", "repaid": False}}, "target and repaid are of form 'turns'"),
        ({"distillation": {"form": "loss", "target": "tests:target"}}, "target and repaid are of form 'turns'"),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], reason: str) -> None:
    made = {"advantage": "step_return", **fields, "distillation": section(**fields.get("distillation", {}))}
    with pytest.raises(ConfigError, match=reason):
        check_algorithm(AlgorithmConfig(**made), TrainingConfig())
    check_algorithm(algorithm_of(), TrainingConfig())
    check_algorithm(algorithm_of(teacher=None, weights="start"), TrainingConfig())
