"""Checks of what a datum says about its tokens against what this server sampled.

spans tile the tokens:  [prompt of sequence A, 0..17) [sampled by A, 0..5) [prompt of B, 22..30) [sampled by B, 0..7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from treadle.core.errors import DataError
from treadle.core.types import Ids
from treadle.tinker.losses import TARGETS
from treadle.tinker.wire import ForwardBackward, Span

Find = Callable[[str], tuple[Ids, Ids] | None]
"""Prompt and tokens of a sequence that was sampled here."""


def named_sequences(request: ForwardBackward, number: int) -> list[str]:
    """Return the sequences that a datum's targets were sampled in, by what it says."""
    return list(dict.fromkeys(span.sequence_id for span in request.targets[number] or () if span.sampled))


def check_provenance(request: ForwardBackward, find: Find) -> list[str]:
    """Return what is wrong with the datums' spans, a sentence for each such datum."""
    wrong = []
    for number, datum in enumerate(request.data):
        inputs, targets = request.inputs[number], request.targets[number]
        try:
            if inputs is not None:
                _check(inputs, datum.ids, find, "model_input")
            table = datum.inputs.get(TARGETS)
            if targets is not None and isinstance(table, np.ndarray) and table.ndim == 1:
                _check(targets, table, find, TARGETS)
        except DataError as error:
            wrong.append(f"datum {number}: {error}")
    return wrong


def _check(spans: Sequence[Span], ids: Ids, find: Find, field: str) -> None:
    covered = sum(span.length for span in spans)
    if covered != len(ids):
        raise DataError(f"its spans of {field} cover {covered} positions, and it has {len(ids)}")
    start = 0
    for span in spans:
        found = find(span.sequence_id)
        if found is None:
            raise DataError(f"sequence {span.sequence_id!r} was not sampled by this server")
        part, name = (found[1], "sampled") if span.sampled else (found[0], "prompt")
        said = ids[start : start + span.length]
        meant = part[span.offset : span.offset + span.length]
        if len(meant) != span.length:
            raise DataError(
                f"{field}[{start}:{start + span.length}] is said to be {name} tokens {span.offset} to"
                f" {span.offset + span.length} of sequence {span.sequence_id!r}, which has {len(part)}"
            )
        if (different := np.flatnonzero(said != meant)).size:
            at = int(different[0])
            raise DataError(
                f"{field}[{start + at}] is {said[at]}, and {name} token {span.offset + at} of sequence"
                f" {span.sequence_id!r} is {meant[at]}: it is not what was {'sampled' if span.sampled else 'sent'}"
            )
        start += span.length
