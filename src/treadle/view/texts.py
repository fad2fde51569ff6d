"""Display of tokens: their prefix tree, and values of sampled ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from treadle.core.text import escape_text
from treadle.packing.flat import PackedCall
from treadle.packing.tree import depth_first

Json = dict[str, Any]
_MESSAGE = 2000  # characters


class Segment(BaseModel):
    """Consecutive tokens of the prefix tree without a fork, all read or all sampled.

    parent: index of the preceding segment; -1 at a root. depth: number of tokens before it. steps: indices of the steps
    it is part of. sampled: the steps that sampled it; the others read it. joined: (start, count, text) of tokens that
    are pieces of a character.
    """

    parent: int
    depth: int
    ids: list[int]
    steps: list[int] = []
    sampled: list[int] = []
    joined: list[tuple[int, int, str]] = []


def clipped(text: str, limit: int = _MESSAGE) -> str:
    """Return a message for a table, escaped, and truncated if it is very long."""
    if len(text) <= limit:
        return escape_text(text)
    return f"{escape_text(text[:limit])} … ({len(text):,} characters)"


def prefix_segments(calls: Sequence[PackedCall]) -> tuple[list[Segment], list[int]]:
    """Return the segments in depth-first order, and for each call the segment in which it ends.

    For example, `a b | c`, `a b c d | e` and `a x | y` give: `a`, `b`, `c` (sampled by the first), `d`, `e`, `x`, `y`.
    """
    order, indices = depth_first(calls, [0] * len(calls))
    shared = indices.tolist()
    segments: list[Segment] = []
    last = [0] * len(calls)
    # Calls order[first:stop] share `depth` tokens, up to the end of `parent`.
    pending = [(0, len(order), 0, -1)]
    while pending:
        first, stop, depth, parent = pending.pop()
        while first < stop and len(calls[order[first]].token_ids) == depth:
            last[order[first]] = parent
            first += 1
        forks = [at for at in range(first + 1, stop) if shared[at] == depth]
        if forks:
            parts = list(pairwise([first, *forks, stop]))
            pending += [(start, end, depth, parent) for start, end in reversed(parts)]
        elif first < stop:
            group = order[first:stop]
            ends = [e for n in group for e in (calls[n].prompt_length, len(calls[n].token_ids)) if e > depth]
            end = min(ends + shared[first + 1 : stop])
            sampled = sorted(n for n in group if calls[n].prompt_length <= depth)
            ids = calls[group[0]].token_ids[depth:end].tolist()
            segments.append(Segment(parent=parent, depth=depth, ids=ids, steps=sorted(group), sampled=sampled))
            pending.append((first, stop, end, len(segments) - 1))
    return segments, last


COLUMNS = (
    ("logprob", "log-prob, engine", "low", "log-probability in the distribution that it was sampled from"),
    ("learner_logprob", "log-prob, learner", "low", "log-probability by the learner, before the update"),
    ("ratio", "ratio", "around_one", "probability by the learner over the one that the loss compares with"),
    ("clipped", "clipped", "flag", "whether the loss bounded the ratio"),
    ("advantage", "advantage", "diverging", "weight of the token in the loss; none if masked"),
    ("mask", "mask", "flag", "whether the token may be trained"),
    ("policy_version", "version", "steps", "version of the policy that sampled the token"),
    ("entropy", "entropy", "high", "entropy of the learner's distribution for the token, in nats"),
    ("possible", "could be sampled", "high", "number of ids that filters or a grammar left; none: all"),
    ("reward", "token reward", "diverging", "reward for this token alone"),
)
"""(name, label, scale, help) of all values of a sampled token. Traces are recorded only for a share of the groups.

scale: highlighted values. low: small log-probabilities; high: large values; around_one: ratios far from 1; diverging:
both signs; steps: distinct whole numbers; flag: yes.
"""

OF_TRACES = ("learner_logprob", "ratio", "clipped", "entropy")


def columns_of(recorded: Iterable[str], split: str) -> list[Json]:
    """Return the columns to show, given the names recorded for any step.

    In training, columns that could have been recorded are shown as missing; few runs have filters or reward tokens.
    """
    names = set(recorded)
    return [
        {"name": name, "label": label, "help": text, "scale": scale, "is_recorded": name in names}
        for name, label, scale, text in COLUMNS
        if name in names or (split == "train" and name not in ("reward", "possible"))
    ]
