"""Where conversations were made shorter, and what that costs, by hand."""

from dataclasses import replace

from tests.cli.worlds import compacted
from tests.worlds import make_step
from treadle.core.types import BreakCause, Step
from treadle.packing.breaks import relations
from treadle.packing.compactions import Compaction, CompactionPrice, compactions, recorded_calls


def found_in(steps: list[Step]) -> tuple[list[Compaction], CompactionPrice]:
    calls, price = recorded_calls(steps), CompactionPrice()
    related = relations(
        [call.call for call in calls], str, [call.cause for call in calls], [call.played for call in calls]
    )
    price.add(calls, related)
    return compactions(calls, related), price


def test_a_summary_and_a_conversation_that_was_replaced() -> None:
    """Prompts of 21, 43, 84 (cut off), 84 (summary); 43, 57; 27 (rejected) and 27 tokens."""
    found, price = found_in(compacted())
    assert found == [
        Compaction(step=4, summary=3, before=84, after=43, calls=2, sampled=3 + 8, read=39 + 0 + 24),
        Compaction(step=6, summary=None, before=57 + 2, after=27, calls=0, sampled=0, read=26),
    ]
    assert price == CompactionPrice(
        trajectories=1,
        compactions=2,
        read=21 + 43 + 84 + 84 + 43 + 57 + 27 + 27,
        read_without=21 + 43 + 84 + (57 + 41) + (27 + 41 + 32) + (27 + 41 + 32),
        computed=(21 + 20 + 39 + 0 + 24 + 11 + 26 + 0) + (2 + 2 + 3 + 8 + 3 + 2 + 3 + 2),
        computed_without=(21 + 20 + 39 + 11 + 0 + 0) + (2 + 2 + 3 + 2 + 3 + 2),
    )


def test_the_history_of_a_sub_agent_was_never_longer() -> None:
    goes_on = BreakCause.SUMMARY
    steps = [
        make_step([1, 2, 3, 4, 5, 6], [7]),
        replace(make_step([1, 2, 3, 4, 5, 6, 7, 8], [9]), summary=True),
        replace(make_step([1, 2, 9], [10]), break_cause=goes_on),  # 5 tokens were left out
        make_step([50, 51], [52]),
        make_step([1, 2, 9, 10, 11], [12]),
    ]
    found, price = found_in(steps)
    assert [(compaction.step, compaction.before - compaction.after) for compaction in found] == [(2, 5)]
    assert price.read_without == 6 + (3 + 5) + 2 + (5 + 5)


def test_a_conversation_that_only_grows_costs_nothing() -> None:
    assert found_in([make_step([1], [2]), make_step([1, 2, 3], [4])]) == ([], CompactionPrice())
