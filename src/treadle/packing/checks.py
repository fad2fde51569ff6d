"""Requirements of recorded steps for training with this model; only failing trajectories are left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from treadle.core.outcomes import as_trained, leave_out, step_drop_reason
from treadle.core.types import DropReason, Group, Step, Trajectory


def split_untrainable(
    groups: Sequence[Group],
    vocabulary: int,
    context: int | None,
    routing: tuple[int, int, int] | None = None,
    least: int = 1,
    probabilities: bool = False,
) -> tuple[list[Group], dict[str, str]]:
    """Leave out untrainable trajectories; return the groups and trajectory_id -> message naming task, trajectory and
    step.


    vocabulary: the model's number of token ids. context: its longest sequence in tokens, if limited. routing: its
    number of layers with experts, experts per token and experts per layer, if routing is replayed. least: attempts a
    group needs. probabilities: whether the sampler's are needed.

    A trajectory with a faulty step enters no baseline and no loss; its siblings train as if it had failed while
    playing, or are left out, too, if they are fewer than `least`.
    """
    faults: dict[str, str] = {}
    fault = partial(_fault, vocabulary=vocabulary, context=context, routing=routing, probabilities=probabilities)
    for group in groups:
        graded = [t for t in group.trajectories if as_trained(t).reward is not None]
        unfit = {t.trajectory_id: why for t in graded if (why := fault(t)) is not None}
        if unfit and (fit := len(graded) - len(unfit)) < least:
            why = f"only {fit} of its group can be trained, training.min_group_size is {least}"
            unfit = {t.trajectory_id: unfit.get(t.trajectory_id, why) for t in graded}
        faults |= {ident: f"task {group.task.task_id}, trajectory {ident}, {why}" for ident, why in unfit.items()}
    return [leave_out(group, DropReason.REFUSED, faults) for group in groups] if faults else list(groups), faults


def _fault(
    trajectory: Trajectory,
    vocabulary: int,
    context: int | None,
    routing: tuple[int, int, int] | None,
    probabilities: bool,
) -> str | None:
    for number, step in enumerate(trajectory.steps):
        fault = None if step_drop_reason(trajectory, step) else _step_fault(step, vocabulary, context, probabilities)
        # Dropped steps, too: later steps inherit their routing.
        if fault is None and routing is not None:
            fault = _routing_fault(step, *routing)
        if fault is not None:
            return f"step {number}: {fault}"
    return None


def _routing_fault(step: Step, layers: int, top_k: int, experts: int) -> str | None:
    recorded = step.routing
    if recorded is None or not len(recorded) or (recorded.shape[1:] == (layers, top_k) and recorded.max() < experts):
        return None
    return (
        f"its routing has {recorded.shape[1]} layers and {recorded.shape[2]} experts up to "
        f"{recorded.max(initial=0)}, the model has {layers} layers with {top_k} of {experts} experts; was it "
        "recorded with another model?"
    )


def _step_fault(step: Step, vocabulary: int, context: int | None, probabilities: bool) -> str | None:
    length = len(step.prompt_ids) + len(step.completion_ids)
    if not len(step.completion_ids):
        return "the completion is empty; there is nothing to train"
    if context is not None and length > context:
        return f"{length} tokens do not fit the model's context of {context}; lower rollout.max_input_tokens"
    for name, ids in (("prompt", step.prompt_ids), ("completion", step.completion_ids)):
        if ids.max() >= vocabulary:
            at = int(np.argmax(ids >= vocabulary))
            return (
                f"token {at} of the {name} has id {ids[at]}, the model's vocabulary has {vocabulary}; "
                "was it recorded with another tokenizer?"
            )
    recorded = 0 if step.probabilities is None else step.probabilities.of.counts
    if probabilities and (unknown := step.mask & (recorded == 0)).any():
        return (
            f"the sampler's probabilities of token {int(np.argmax(unknown))} were not recorded; sample with an engine "
            "that reports them, as engine.kind=torch, or set algorithm.centered_scores=off"
        )
    return None
