"""Compactions: where an episode's conversation was shortened, and their cost, from recorded calls.

step     0    1    2                  3        4    5
         act  act  summary, rejected  summary  act  act
segment  0    0    0                  0        1    1

compactions(...) == [Compaction(step=4, summary=3, calls=2, ...)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.core.outcomes import was_played
from treadle.core.types import BreakCause, Ids, Step, common_prefix, seen_ids
from treadle.packing.breaks import Relation, callers
from treadle.packing.flat import PackedCall


class RecordedCall(NamedTuple):
    """The part of a step that shows how the conversation continued. number: index in its trajectory."""

    number: int
    call: PackedCall
    cause: BreakCause | None
    summary: bool
    played: bool

    @property
    def sampled(self) -> int:
        return len(self.call.token_ids) - self.call.prompt_length


def recorded_calls(steps: Sequence[Step]) -> list[RecordedCall]:
    return [
        RecordedCall(n, PackedCall(ids, len(s.prompt_ids), first=0), s.break_cause, s.summary, was_played(s))
        for n, (s, ids) in enumerate(zip(steps, seen_ids(steps), strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compaction of the main branch.

    step: first step after it, which opens a segment. summary: step that `rollout.compaction` requested; None if
    environment or agent compacted by themselves. before: length of the conversation to shorten, including the request
    for a summary, in tokens; after: length of the continuing prompt, in tokens.
    calls, sampled: number of calls for the summary, including rejected ones, and their sampled tokens. read: tokens
    newly read by them and `step` in an engine that caches an attempt's last call.
    """

    step: int
    summary: int | None
    before: int
    after: int
    calls: int
    sampled: int
    read: int


@dataclass(slots=True)
class CompactionPrice:
    """Tokens of all calls of episodes with compactions, and of the same calls without them.

    read: prompt tokens as sent. computed: sampled tokens plus those newly read by an engine that caches an attempt's
    last call. `_without` is an estimate: no summary is requested, and each later prompt of the main branch grows by the
    tokens that earlier compactions saved (`before` less `after`). A step that opens a segment newly reads as much as
    the first call for the summary did; nothing, if there was none.
    """

    trajectories: int = 0
    compactions: int = 0
    read: int = 0
    read_without: int = 0
    computed: int = 0
    computed_without: int = 0

    def add(self, calls: Sequence[RecordedCall], related: Sequence[Relation]) -> None:
        """Add the calls of one trajectory; no-op without compactions."""
        if not (found := {compaction.step: compaction for compaction in compactions(calls, related)}):
            return
        self.trajectories += 1
        self.compactions += len(found)
        new, main = _newly_read(calls), callers(related) == np.arange(len(calls))
        left_out = 0
        for at, call in enumerate(calls):
            self.read += call.call.prompt_length
            self.computed += new[at] + call.sampled
            if call.summary:
                continue
            fresh = new[at]
            if compaction := found.get(call.number):
                left_out += compaction.before - compaction.after
                fresh = new[at - compaction.calls] if compaction.calls else 0
            self.read_without += call.call.prompt_length + (left_out if main[at] else 0)
            self.computed_without += call.sampled + fresh


def compactions(calls: Sequence[RecordedCall], related: Sequence[Relation]) -> list[Compaction]:
    """Return the compactions of one trajectory, given all its calls and their relations."""
    new, main = _newly_read(calls), callers(related) == np.arange(len(calls))
    found: list[Compaction] = []
    last: RecordedCall | None = None  # of the main branch
    # The continuing step was rejected and replaced by another.
    opening = False
    for at, call in enumerate(calls):
        if call.cause is BreakCause.SUMMARY and main[at] and last is not None and not opening:
            first = at
            while first and calls[first - 1].summary:
                first -= 1
            summary = last.number if last.summary else None
            before = last.call.prompt_length if last.summary else len(last.call.token_ids)
            sampled = sum(asked.sampled for asked in calls[first:at])
            cost = (at - first, sampled, sum(new[first : at + 1]))
            found.append(Compaction(call.number, summary, before, call.call.prompt_length, *cost))
        opening = not call.played and (opening or call.cause is BreakCause.SUMMARY)
        last = call if call.played and main[at] else last
    return found


def _newly_read(calls: Sequence[RecordedCall]) -> list[int]:
    """Return per call the prompt tokens that differ from the previous call's prompt and completion."""
    before: Ids = np.empty(0, np.int32)
    new = []
    for call in (recorded.call for recorded in calls):
        new.append(call.prompt_length - common_prefix(call.token_ids[: call.prompt_length], before))
        before = call.token_ids
    return new
