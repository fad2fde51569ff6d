"""Which steps of a trajectory are its main branch, and which step called each of the others.

Derived from ids alone, by how steps relate (`packing.breaks`): a step continues the conversation that it extends or
breaks with; a fork, or a step that shares nothing, begins one of its own. For example an agent that asks a sub-agent
twice, and then starts anew from a summary:

    step           0     1     2     3     4     5
    conversation   main  sub   sub   main  new   new
    called by      -     0     0     -     -     -

A conversation that begins while another still goes on afterwards is a sub-agent's; the one that goes on is the main
branch. One that begins when the main branch is over takes its place: a summary, or an agent whose prompt is not its
history. So an agent that only appends, or never does, is one main branch in call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treadle.core.types import Ids, Step
from treadle.packing.breaks import Kind, relations
from treadle.packing.flat import FlatBatch, Indices, PackedCall


def parent_steps(batch: FlatBatch) -> Indices:
    """Return int64[K], for each played step the step that called it; itself on its trajectory's main branch."""
    parents = np.arange(len(batch.played))
    start = np.searchsorted(batch.trajectory_of_played, np.arange(len(batch.trajectories) + 1))
    for first, end in pairwise(start.tolist()):
        parents[first:end] = first + calling_steps(batch.played[first:end])
    return parents


def calling_steps(steps: Sequence[Step]) -> Indices:
    """Return int64[T], the same for the T steps of one trajectory, in call order."""
    conversation = _conversations(steps)
    last = {name: number for number, name in enumerate(conversation)}
    parents = np.arange(len(steps))
    main = latest = 0  # the conversation, and the step, that the main branch has reached
    caller: dict[int, int] = {}  # sub-agents' conversations
    for number, name in enumerate(conversation):
        if name != main and name not in caller and last[main] > number:
            caller[name] = latest
        if name in caller:
            parents[number] = caller[name]
        else:
            main, latest = name, number
    return parents


def _conversations(steps: Sequence[Step]) -> list[int]:
    """Return for each step the first step of its conversation."""
    calls = [PackedCall(step.full_ids, len(step.prompt_ids), 0) for step in steps]
    firsts: list[int] = []
    for number, relation in enumerate(relations(calls, _no_text, [step.break_cause for step in steps])):
        base = None if relation.kind is Kind.FORK else relation.base
        firsts.append(number if base is None else firsts[base])
    return firsts


def _no_text(ids: Ids) -> str:
    """Return a text that differs wherever ids do, so that only a recorded cause makes a break one of tokenization."""
    return str(ids.tolist())
