"""Calls of attempts in progress: on record as they are answered, gone with their attempt, and gone on with."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.forks import run
from tests.loop.killed_episodes import go
from tests.runs import query, updates
from tests.worlds import ROOT, addresses, make_group, make_step
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import DamageError
from treadle.core.files import WrittenFile
from treadle.core.types import Status, StopReason, Trajectory
from treadle.record.image_files import name_of
from treadle.record.ledger import Ledger
from treadle.record.open_calls import OpenCalls, restorable_calls
from treadle.record.rollout_store import open_steps, packed_step
from treadle.rollout.replay import AnsweredCall


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as opened:
        yield opened


def call(number: int, *versions: int) -> AnsweredCall:
    """One token of each version."""
    count = len(versions)
    completion = Completion(
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.linspace(-2, -0.1, count, dtype=np.float32),
        stop_reason=StopReason.LENGTH,
        policy_versions=tuple(VersionSpan(v, n, n + 1) for n, v in enumerate(versions)),
        routing=np.arange(4 * count, dtype=np.int16).reshape(count, 2, 2),
    )
    return AnsweredCall(number, bytes([number] * 16), completion)


def record(ledger: Ledger, attempt: int, *calls: AnsweredCall) -> None:
    async def go() -> None:
        log = OpenCalls(ledger)
        for one in calls:
            waiting = log.add(addresses(attempt + 1)[attempt], one)
        await waiting

    asyncio.run(go())


def numbers(ledger: Ledger, oldest: int = 3, newest: int = 5, repeats: bool = False) -> dict[int, list[int]]:
    restored = restorable_calls(ledger, oldest, newest, repeats)
    return {key[2]: [one.number for one in calls] for key, calls in restored.items()}


def test_a_call_comes_back_as_it_was(ledger: Ledger) -> None:
    record(ledger, 1, call(0, 4, 4, 5))
    ledger.prove()
    [[back]] = restorable_calls(ledger, 3, 5, False).values()
    assert (back.number, back.request) == (0, bytes(16))
    expected, got = call(0, 4, 4, 5).completion, back.completion
    for name in ("token_ids", "logprobs", "routing"):
        mine, theirs = getattr(expected, name), getattr(got, name)
        assert mine.dtype == theirs.dtype and (mine == theirs).all()
    assert got.stop_reason == expected.stop_reason
    assert got.policy_versions == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))


@pytest.mark.parametrize("table", ["open_calls", "open_steps"])
def test_tokens_that_are_in_no_shard_yet_are_compared(table: str, ledger: Ledger) -> None:
    record(ledger, 1, call(0, 4))
    played = Trajectory("a", "t", 0, (make_step(),), None, Status.UNRATED)
    ledger.record_open(make_group(0, played, name="t"), {0: packed_step("t", "a", 0, make_step(), name_of)})
    with ledger.transaction() as db:
        db.execute(f"UPDATE {table} SET tokens = CAST(substr(tokens, 1, 99) AS BLOB)")
    with pytest.raises(DamageError, match=f"is damaged: tokens in {table} are not as they were written; restore it"):
        open_steps(ledger) if table == "open_steps" else restorable_calls(ledger, 3, 5, False)


def test_an_attempt_goes_on_after_its_first_calls_that_the_checkpoint_admits(ledger: Ledger) -> None:
    record(ledger, 0, *(call(n, 4) for n in range(3)))
    record(ledger, 1, call(0, 4), call(2, 4), call(3, 5))  # call 1 was in flight
    record(ledger, 2, call(0, 3), call(1, 5, 6), call(2, 5))  # weights that were lost
    record(ledger, 3, call(0, 2), call(1, 4))  # too old
    record(ledger, 4, call(0, 6))
    assert numbers(ledger) == {0: [0, 1, 2], 1: [0], 2: [0]}
    assert len(ledger.open_calls()) == 5  # the others can never be gone on with, whatever comes after version 5
    assert numbers(ledger, newest=9) == {0: [0, 1, 2], 1: [0], 2: [0]}
    assert numbers(ledger, repeats=True) == {}
    assert not ledger.open_calls()


def test_they_are_gone_once_the_attempt_is_recorded_or_starts_anew(ledger: Ledger) -> None:
    for attempt in range(3):
        record(ledger, attempt, call(0, 4), call(1, 4))
    played = Trajectory("g000000.1", "t0", 1, (make_step(),), 1.0, Status.DONE)
    ledger.record([make_group(0, played)], "held_out", 0, WrittenFile("shard", ""))
    assert numbers(ledger).keys() == {0, 1, 2}
    other = Trajectory("g000001.1", "t0", 1, (make_step(),), 1.0, Status.DONE)
    ledger.record([make_group(0, other, name="g000001")], "train", 0, WrittenFile("other", ""))
    assert numbers(ledger).keys() == {0, 2}

    async def start_anew() -> None:
        log = OpenCalls(ledger, log=said.append)
        log.add(addresses(1)[0], call(2, 5))  # made beside the one that was not repeated
        log.restarted(addresses(1)[0], "environment 'a'", "call 1")
        log.restarted(addresses(1)[0], "environment 'a'", "call 1")
        await log.add(addresses(1)[0], call(0, 5))

    said: list[str] = []
    asyncio.run(start_anew())
    assert numbers(ledger) == {0: [0], 2: [0, 1]}
    assert len(said) == 1 and "environment 'a'" in said[0]


DUEL = "environment=tests.loop.killed_episodes:Duel models.rival.policy=true"
BEGUN = "rollout.starts.share=1 rollout.starts.target=0.95 evaluation.success_at=0.3 orchestration.updates=16"
COMPACT = "rollout.compaction.at=200 rollout.compaction.max_tokens=8 rollout.compaction.prompt=notes"

FORKED = "training.group_size=4 rollout.forks.at=entropy algorithm.advantage=forks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (30, ""),
        (5, "environment=tests.loop.killed_episodes:Unreplayable"),
        (15, "orchestration.max_staleness=2"),
        (30, BEGUN),
        (15, f"{BEGUN} orchestration.max_staleness=2"),
        (10, COMPACT),
        (10, f"{COMPACT} orchestration.max_staleness=2"),
        (10, DUEL),
        (10, f"{DUEL} orchestration.max_staleness=2"),
        (10, FORKED),
        (10, f"{FORKED} orchestration.max_staleness=2"),
    ],
)
def test_killed_at_random_moments_no_attempt_is_sampled_twice(kills: int, options: str, tmp_path: Path) -> None:
    """Episodes of 20 calls. After a kill at most one answered call of each open attempt is sampled again."""
    words = [sys.executable, "-m", "tests.loop.killed_episodes", str(tmp_path), str(kills), *options.split()]
    done = run(words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answered = [line.split() for line in (tmp_path / "answered").read_text().splitlines()]
    first: dict[str, str] = {}
    again = Counter[tuple[str, str]]()
    for process, attempt, seed in answered:
        if first.setdefault(seed, process) != process:
            again[process, attempt] += 1
    said = (tmp_path / "said").read_text()
    print(f"{len(first)} calls, {sum(again.values())} sampled again after {kills} kills, most {max(again.values())}")
    if "Unreplayable" in options:
        assert max(again.values()) > 1 and "recorded calls" not in said
    else:
        assert "recorded calls" in said
    assert "not deterministic" not in said
    if "max_staleness" not in options:
        assert max(again.values()) <= 1 or "Unreplayable" in options
        straight = go(tmp_path / "straight", None, *options.split())
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["weights_sha256"] == straight["weights_sha256"]
    if BEGUN in options:
        assert query(tmp_path / "run", "SELECT count(*) AS n FROM trajectories WHERE start_steps > 0")[0]["n"] > 9
    if COMPACT in options:
        assert sum(row["compactions_mean"] for row in updates(tmp_path / "run")) > 0
