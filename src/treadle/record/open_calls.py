"""Calls of attempts in progress: made durable once answered, so that a killed run can continue with them.

    Session -> Replay -> OpenCalls.add -> the ledger's `open_calls` -(--resume)-> OpenCalls.recorded -> Replay

A row is deleted when its attempt is recorded, or cannot be continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from treadle.core.types import Group
from treadle.record.ledger import AttemptKey, Ledger
from treadle.record.rollout_store import completion_of, packed_completion
from treadle.rollout.replay import AnsweredCall
from treadle.rollout.session import Address


class OpenCalls:
    """Records calls of training attempts (a `rollout.attempt.CallLog`). Simultaneous calls share a transaction.

    restored: calls left by a killed run (`restorable_calls`). log: receives a line for each player that did not repeat
    its requests.
    """

    def __init__(
        self,
        ledger: Ledger,
        restored: Mapping[AttemptKey, Sequence[AnsweredCall]] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._ledger, self._restored, self._log = ledger, dict(restored or {}), log
        self._pending: list[tuple[AttemptKey, AnsweredCall]] = []
        self._forgotten: list[AttemptKey] = []
        self._turn = asyncio.Lock()
        self._named: set[str] = set()

    def oldest_version(self, group: Group) -> int | None:
        """Return the oldest policy version among the restored tokens of a group's attempts; None without any."""
        own = (calls for key, calls in self._restored.items() if key[:2] == (group.epoch, group.position))
        return min(map(_oldest, own), default=None)

    def recorded(self, address: Address) -> Sequence[AnsweredCall]:
        return self._restored.pop(_key(address), ())

    def add(self, address: Address, call: AnsweredCall) -> asyncio.Future[None]:
        self._pending.append((_key(address), call))
        writing = asyncio.ensure_future(self.settled())
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # its awaiters see the error
        return writing

    def forget(self, address: Address) -> None:
        self._pending = [(key, call) for key, call in self._pending if key != _key(address)]
        self._forgotten.append(_key(address))

    def restarted(self, address: Address, player: str, what: str) -> None:
        self.forget(address)
        if player not in self._named:
            self._named.add(player)
            self._log(
                f"{player} did not repeat its requests when replayed with the recorded answers ({what}): it "
                "is not deterministic, or was changed; such attempts start over. Set replayable = False on it to "
                "skip replays"
            )

    async def settled(self) -> None:
        """Wait until everything so far is durable. Raises RunError."""
        async with self._turn:
            calls, self._pending = self._pending, []
            forgotten, self._forgotten = self._forgotten, []
            if calls or forgotten:
                await asyncio.to_thread(self._write, calls, forgotten)

    def _write(self, calls: Iterable[tuple[AttemptKey, AnsweredCall]], forgotten: Iterable[AttemptKey]) -> None:
        rows = [
            {
                **dict(zip(("epoch", "position", "attempt"), key, strict=True)),
                "call": call.number,
                "request": call.request,
                "tokens": packed_completion(call.completion),
            }
            for key, call in calls
        ]
        self._ledger.record_calls(rows, forgotten)


def restorable_calls(ledger: Ledger, oldest: int, newest: int, repeats: bool) -> dict[AttemptKey, list[AnsweredCall]]:
    """Return the calls that a run resumed at version `newest` continues with, by attempt; the others are forgotten.

    These are an attempt's first calls after its prefix, up to one that is missing or newer, because those weights were
    lost; none of an attempt with tokens older than `oldest`. repeats: whether the run samples everything again instead.
    """
    restored: dict[AttemptKey, list[AnsweredCall]] = {}
    for row in [] if repeats else ledger.open_calls():
        key = (row["epoch"], row["position"], row["attempt"])
        call = AnsweredCall(row["call"], row["request"], completion_of(row["tokens"]))
        calls = restored.setdefault(key, [])
        versions = [span.version for span in call.completion.policy_versions]
        if (not calls or call.number == calls[-1].number + 1) and max(versions) <= newest:
            calls.append(call)
    for key in [key for key, calls in restored.items() if not calls or _oldest(calls) < oldest]:
        del restored[key]
    ledger.keep_calls({key: calls[-1].number + 1 for key, calls in restored.items()})
    return restored


def _oldest(calls: Iterable[AnsweredCall]) -> int:
    return min(span.version for call in calls for span in call.completion.policy_versions)


def _key(address: Address) -> AttemptKey:
    return address.epoch, address.position, address.attempt
