"""When a lock-step wave starts: the one rule, for an engine in this process and for one in another."""

from __future__ import annotations

from collections.abc import Collection, KeysView


def everybody_waits(waiting: Collection[str], sessions: KeysView[str]) -> bool:
    """Return whether every open session, of at least one, waits for a completion.

    waiting: the session of each call that waits; a session may have several.
    """
    if not waiting or len(waiting) < len(sessions):  # counted first: sets cost as much as they are large
        return False
    return set(waiting) == sessions
