"""Why a prompt does not carry on the ids of the call that its messages continue, judged from messages."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.core.types import BreakCause
from treadle.rendering.identity import Value, common


def agents_change(known: Sequence[Value], sent: Sequence[Value]) -> BreakCause | None:
    """Return how the agent changed a conversation that it continues; None if it only left out its end.

    known: a call's messages and its reply. sent: the messages of the new call, which do not begin with all of `known`.
    A conversation that goes on without any of the replies after the change is a new one (a fork), not a broken one:
    None.
    """
    at = common(known, sent)
    was, now = known[at:], sent[at:]
    first = {message: n for n, message in reversed([*enumerate(was)])}  # where each stood
    if len(now) > 1 and was and now[0][0] == was[0][0] == "assistant" and now[0] not in first:
        return BreakCause.HISTORY_EDITED  # the reply itself
    carried = next((n for n, message in enumerate(now) if message in first and _says_something(message)), None)
    if carried is None:
        return None
    if now[0] in first:
        return BreakCause.TRUNCATED
    return BreakCause.SUMMARY if carried < first[now[carried]] else BreakCause.HISTORY_EDITED


def _says_something(message: Value) -> bool:
    """Return whether it is an assistant message with content or tool calls, by which to recognise it."""
    role, content, calls = message
    return role == "assistant" and bool(content or calls)
