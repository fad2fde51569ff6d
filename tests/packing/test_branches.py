"""The main branch of a trajectory and who called the rest, told from ids."""

from dataclasses import replace

import numpy as np
from hypothesis import given

from tests.models import make_step, ragged_groups
from treadle.core.types import BreakCause, Group, Step
from treadle.packing.breaks import calling_steps, parent_steps
from treadle.packing.flat import flatten

MAIN, SUB, OTHER = list(range(10, 20)), list(range(30, 40)), list(range(50, 60))
REPLY = list(range(70, 76))


def after(step: Step, *ids: int) -> Step:
    return make_step([*step.full_ids.tolist(), *ids], REPLY)


def of(*steps: Step) -> list[int]:
    found: list[int] = calling_steps(steps).tolist()
    return found


opening = make_step(MAIN, REPLY)
sub = make_step(SUB, REPLY)


def test_a_sub_agents_steps_are_called_by_the_main_step_before_its_first() -> None:
    again = after(sub, 1)
    back = after(opening, 2)
    later = make_step(OTHER, REPLY)
    assert of(opening, sub, again, back, later, after(back, 3)) == [0, 0, 0, 3, 3, 5]


def test_a_sub_agent_that_runs_beside_the_main_branch_stays_one() -> None:
    back = after(opening, 2)
    assert of(opening, sub, back, after(sub, 1), after(back, 3), after(after(sub, 1), 4)) == [0, 0, 2, 0, 4, 0]


def test_sub_agents_of_a_sub_agent_are_called_from_the_main_branch() -> None:
    inner = make_step(OTHER, REPLY)
    assert of(opening, sub, inner, after(sub, 1), after(opening, 2)) == [0, 0, 0, 0, 4]


def test_a_conversation_after_which_the_old_one_never_goes_on_takes_its_place() -> None:
    summary = make_step(SUB, REPLY)
    assert of(opening, after(opening, 1), summary, after(summary, 2)) == [0, 1, 2, 3]
    states = [make_step([*MAIN[:4], *state], REPLY) for state in (SUB, OTHER, SUB, MAIN)]
    assert of(*states) == [0, 1, 2, 3]  # the prompt is the state, not the history


def test_a_break_goes_on_with_the_conversation_it_rewrites() -> None:
    edited = replace(make_step([*MAIN[:5], 99, *REPLY, 98], REPLY), break_cause=BreakCause.HISTORY_EDITED)
    assert of(opening, edited, sub, after(edited, 1)) == [0, 1, 1, 3]


def test_samples_of_one_prompt_are_called_by_the_step_whose_reply_is_kept() -> None:
    """Best of three: the first is carried on."""
    again = make_step(MAIN, [*REPLY[:2], 90])
    assert of(opening, again, again, after(opening, 1)) == [0, 0, 0, 3]


@given(ragged_groups(vocabulary=3))
def test_whoever_calls_is_an_earlier_step_of_the_main_branch_of_the_same_trajectory(groups: list[Group]) -> None:
    batch = flatten(groups)
    found = parent_steps(batch)
    assert (found <= np.arange(len(found))).all()
    assert (found[found] == found).all()
    assert (batch.trajectory_of_step[found] == batch.trajectory_of_step).all()
    first = np.flatnonzero(np.diff(batch.trajectory_of_step, prepend=-1))
    assert (found[first] == first).all()
