"""Runs whose rewards come from a judge over real HTTP that fails in every way."""

import json
import random
import threading
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from tests.judge.servers import TOKENS, judging
from tests.orchestration.runs import check_finished, query, start, updates
from tests.worlds import Vowels
from treadle.core.metrics import Metric
from treadle.envs.base import EnvStep, Finish
from treadle.judge import Criterion, Judge


class Judged(Vowels):
    """Its reward is the share of vowels, as a judge finds it."""

    metrics = (Metric("vowels", "trajectory", "mean"),)
    text = ""

    async def step(self, text: str) -> EnvStep:
        self.text = text if not self.replies else f"{self.text}\n{text}"
        return (await super().step(text))._replace(reward=0.0)

    async def finish(self, ended: str) -> Finish:
        return Finish(await JUDGES[0].grade(self.text), {"vowels": share(self.text)})


JUDGES: list[Judge] = []


def share(text: str) -> float:
    letters = [c for c in text.lower() if c.isalpha()]
    return round(10 * sum(c in "aeiou" for c in letters) / max(len(letters), 1), 2) / 10


@pytest.mark.slow
def test_nothing_is_trained_with_an_invented_reward(tmp_path: Path) -> None:
    """A judge that fails, hangs, refuses and answers nonsense, and is killed and restarted."""
    draws = random.Random(1)

    def script(request: list[dict[str, str]]) -> str | int | None:
        if len(server.requests) == 40:
            threading.Thread(target=server.restart).start()
        quoted = [line[2:] for line in request[1]["content"].splitlines() if line.startswith("| ")]
        right = f"ANSWER: {10 * share(chr(10).join(quoted)):.2f}"
        ends: list[str | int | None] = [500, None, "ANSWER: fine", 400, right]
        return draws.choices(ends, [0.2, 0.03, 0.05, 0.1, 0.62])[0]

    with judging(script) as server:
        rubric = [Criterion("vowels", "What is the share of vowels?", "number")]
        JUDGES[:] = [Judge(server.url, "m", rubric, timeout=10.0, patience=250.0)]
        start(
            tmp_path / "run",
            *(
                "environment=tests.orchestration.test_judged_runs:Judged",
                "training.min_group_size=1",
                "data.held_out=null",
            ),
            *("orchestration.updates=8", "failures.max_failed_fraction=1", "training.group_size=6"),
            "rollout.environment_timeout=300",
        )
    check_finished(tmp_path / "run")
    rows = query(tmp_path / "run", "SELECT * FROM trajectories")
    failed = [row for row in rows if row["reward"] is None]
    assert failed and {row["failure_cause"] for row in failed} == {"verifier"}
    for row in rows:
        if row["reward"] is not None:
            measured = json.loads(row["metrics"])["vowels"]["value"]
            assert row["reward"] == pytest.approx(measured, abs=1e-9)

    def on_record(name: str) -> float:
        return sum(float(json.loads(row["metrics"]).get(name, {"total": 0})["total"]) for row in rows)

    assert on_record("judge_calls") == server.answered
    assert on_record("judge_tokens") == TOKENS * server.answered
    assert on_record("judge_errors") >= server.errors  # those that found no server are none of its
    assert on_record("judge_verdicts") == len(rows) - len(failed)
    assert sum(row["env/judge_calls"] for row in updates(tmp_path / "run")) == server.answered
