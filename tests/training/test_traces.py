"""Traces: which groups have them, and that they hold what each update computed, by an independent computation."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.models import exact, full, make_group, random_groups, same_bits, step_logprobs, tiny, weights_of
from tests.training import reference
from tests.training.reference import LAYOUTS, LOSSES, forked_groups
from treadle.algorithms import losses
from treadle.algorithms.config import AlgorithmConfig, PpoClipConfig
from treadle.core.trainer import StepTrace
from treadle.core.types import DropReason, Group, Step
from treadle.packing.flat import flatten
from treadle.training.config import OptimizerConfig
from treadle.training.objective import TracedGroups

ALL = TracedGroups(share=1.0)
FAST = OptimizerConfig(learning_rate=0.1)  # so that ratios leave their bounds


make_learner = partial(reference.make_learner, optimizer=FAST)


def batch_of_two() -> list[Group]:
    """Two groups of two tasks, with forks, masks and temperatures; a cancelled step, and an attempt that failed."""
    first, second = forked_groups(1)
    trajectory = first.trajectories[0]
    steps = [replace(s, dropped=DropReason.CANCELLED if n == 1 else None) for n, s in enumerate(trajectory.steps)]
    first = replace(first, trajectories=(replace(trajectory, steps=tuple(steps)), *first.trajectories[1:]))
    failed = make_group([(forked_groups(2)[0].trajectories[0].steps, None)], 7).trajectories
    return [first, replace(second, trajectories=(*failed, *second.trajectories))]


def trained(group: Group) -> Iterator[tuple[str, int, Step, float]]:
    """(trajectory, number of the step in it, the step, GRPO's advantage by its definition) of what is trained."""
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    for trajectory in group.trajectories:
        for number, step in enumerate(trajectory.steps):
            if trajectory.reward is not None and step.dropped is None:
                yield trajectory.trajectory_id, number, step, (trajectory.reward - mean) / (std + 1e-6)


def test_each_update_is_traced_as_a_plain_forward_pass_of_each_step_computes_it() -> None:
    """Two updates in each of two epochs: the ratio is to the policy at the batch's start, the rest of each update."""
    groups, model = batch_of_two(), exact()
    training: dict[str, Any] = {"updates_per_batch": 2, "epochs_per_batch": 2}
    results = make_learner(model, traced=ALL, **training).train_batch(groups)
    follower = make_learner(model, **training)
    batches = [flatten([group]) for group in groups]
    starts = [follower.scores(batch) for batch in batches]
    clip, some_clipped = PpoClipConfig(), 0
    for number, result in enumerate(results):
        now = copy.deepcopy(follower.model)
        follower.update(batches[number % 2], starts[number % 2])
        expected = list(trained(groups[number % 2]))
        assert [(t.update, t.trajectory_id, t.step) for t in result.traces] == [
            (number + 1, trajectory, step) for trajectory, step, *_ in expected
        ]
        masked = []
        for trace, (_, _, step, advantage) in zip(result.traces, expected, strict=True):
            (new, entropy), (old, _) = step_logprobs(now, step), step_logprobs(model, step)
            ratio = np.where(step.mask, np.exp(full(new) - full(old)), 1.0)
            cut = (ratio > 1 + clip.eps_high) if advantage > 0 else (ratio < 1 - clip.eps_low)
            assert trace.ratio is not None and trace.clipped is not None
            np.testing.assert_allclose(trace.logprobs, full(new), rtol=1e-6)
            np.testing.assert_allclose(trace.entropy, full(entropy), rtol=1e-6)
            np.testing.assert_allclose(trace.ratio, ratio, rtol=1e-6)
            np.testing.assert_allclose(trace.advantage[step.mask], advantage, rtol=1e-6)
            assert (trace.clipped == cut).all()
            masked.append((trace.clipped[step.mask], trace.entropy[step.mask], trace.ratio[step.mask]))
        clipped, entropies, ratios = (np.concatenate(column) for column in zip(*masked, strict=True))
        assert result.metrics["clip_fraction"] == pytest.approx(clipped.mean())
        assert result.metrics["entropy"] == pytest.approx(entropies.mean(), rel=1e-6)
        assert result.metrics["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-6)
        some_clipped += int(clipped.sum())
    assert some_clipped


def _ratio(name: str, step: Step, new: NDArray[np.float64], old: NDArray[np.float64], unit: float) -> Any:
    """By each loss's definition. unit: mean log-ratio of the trajectory's trainable tokens."""
    match name:
        case "ppo_clip" | "cispo" | "sapo":
            return np.where(step.mask, np.exp(new - old), 1.0)
        case "gspo":
            return np.full(len(new), math.exp(unit))
        case "dppo" | "importance_sampling":
            return np.where(step.mask, np.exp(new - step.logprobs.astype(np.float64)), 1.0)
        case _:
            assert losses.by_name(name).ratio is None, f"name the ratio of {name} here"
            return None


@pytest.mark.parametrize("name", LOSSES)
def test_the_ratio_is_the_one_that_the_loss_is_a_function_of(name: str) -> None:
    groups, model = batch_of_two(), exact()
    algorithm = AlgorithmConfig(policy_loss=name)
    learner = make_learner(model, algorithm, traced=ALL, epochs_per_batch=2)
    _, second = learner.train_batch(groups)
    follower = make_learner(model, algorithm, epochs_per_batch=2)
    batch = flatten(groups)
    follower.update(batch, follower.scores(batch) if follower._compares_with_old() else None)
    steps = [step for group in groups for *_, step, _ in trained(group)]
    new = [full(step_logprobs(follower.model, step)[0]) for step in steps]
    old = [full(step_logprobs(model, step)[0]) for step in steps]
    units: dict[str, list[float]] = {}
    for trace, step, a, b in zip(second.traces, steps, new, old, strict=True):
        units.setdefault(trace.trajectory_id, []).extend((a - b)[step.mask])
    for trace, step, a, b in zip(second.traces, steps, new, old, strict=True):
        ratio = _ratio(name, step, a, b, float(np.mean(units[trace.trajectory_id])))
        if ratio is None:
            assert trace.ratio is None and trace.clipped is None
        else:
            assert trace.ratio is not None
            np.testing.assert_allclose(trace.ratio, ratio, rtol=1e-6)
    assert (second.traces[0].clipped is None) == ("clip_fraction" not in second.metrics)


def test_traces_do_not_depend_on_the_layout() -> None:
    groups = batch_of_two()
    found = {
        name: make_learner(exact(), traced=ALL, max_tokens_per_microbatch=16, **layout).train_batch(groups)[0].traces
        for name, layout in LAYOUTS.items()
    }
    first, *others = found.values()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a.trajectory_id, a.step) == (b.trajectory_id, b.step)
            np.testing.assert_allclose(_table(a), _table(b), rtol=1e-6)


def _table(trace: StepTrace) -> NDArray[np.float64]:
    return np.array([trace.logprobs, trace.entropy, trace.advantage, trace.ratio, trace.clipped], np.float64)


def test_tracing_changes_no_bit_of_what_is_trained() -> None:
    groups = random_groups(3)
    with_traces, without = (make_learner(tiny(), traced=traced) for traced in (ALL, TracedGroups()))
    results = [[learner.train_batch(groups)[0] for _ in range(2)] for learner in (with_traces, without)]
    assert same_bits(weights_of(with_traces.model), weights_of(without.model))
    assert all(a.metrics == b.metrics and a.advantage == b.advantage for a, b in zip(*results, strict=True))
    assert results[0][0].traces and not results[1][0].traces


# Which groups


def placed(epoch: int, position: int) -> Group:
    return replace(make_group([]), epoch=epoch, position=position)


@given(
    st.integers(0, 2**48 - 1),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**20)), min_size=1, max_size=8),
)
def test_a_group_is_drawn_by_seed_epoch_and_task_alone(
    seed: int, share: float, places: Sequence[tuple[int, int]]
) -> None:
    traced = TracedGroups(seed, share)
    together = traced.among([placed(*place) for place in places]).tolist()
    assert together == [bool(traced.among([placed(*place)])[0]) for place in places]


def test_the_share_is_kept_over_tasks_epochs_and_seeds() -> None:
    groups = [placed(epoch, position) for epoch in range(4) for position in range(1000)]
    drawn = [TracedGroups(seed, 0.1).among(groups) for seed in (0, 1)]
    for own in drawn:
        assert own.mean() == pytest.approx(0.1, abs=0.02)
        by_epoch = own.reshape(4, 1000)
        assert len({tuple(epoch) for epoch in by_epoch.tolist()}) == 4
    assert (drawn[0] != drawn[1]).any()
    assert not TracedGroups(0, 0.0).among(groups).any() and TracedGroups(0, 1.0).among(groups).all()
