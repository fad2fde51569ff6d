"""Whole runs of Harbor's trials from the command line: trained, evaluated, reported; every sampled token once."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.harbor.trials import (
    GREETING,
    SHIPPED,
    Sampled,
    answer,
    playing,
    python_with_harbor,
    sandboxes,
    write_task,
)
from tests.runs import check_finished, query
from tests.worlds import Quiet
from treadle.api.train import train_run
from treadle.cli.main import main
from treadle.core.engine import Completion, Engine, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSync
from treadle.core.types import Ids, SamplingParams, StopReason
from treadle.loop.engines import EngineSpec, open_torch
from treadle.models.chat import load_tokenizer
from treadle.models.config import ModelConfig
from treadle.models.model_files import tokenizer_directory
from treadle.plan.config import load_recipe
from treadle.plan.inputs import load_inputs

HERE = "tests.integrations.harbor.test_runs"
SIZE = 16  # as in broken.py
SOLUTIONS = {
    "hello.txt": GREETING,
    "largest regular file": "find /usr/bin -maxdepth 1 -type f -printf '%s %f\\n' | sort -n | tail -1 | "
    "cut -d' ' -f2- > /app/answer.txt\n",
    "squares.sh that": "echo 'for i in $(seq $1); do echo $((i * i)); done' > /app/squares.sh\n",
}
TOKENIZER = load_tokenizer(tokenizer_directory(ModelConfig(tokenizer="demo", build={"model_type": "qwen3"})))
MODEL = (
    "model={tokenizer: demo, build: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 32768, "
    "tie_word_embeddings: true}}"
)
ON_THIS_MACHINE = (
    f"data.train={{source: harbor_tasks, options: {{path: {SHIPPED}}}}}",
    "driver_options.agent=terminus-2",
    "driver_options.environment=local",
    "driver_options.trials_per_second=50.0",
    MODEL,
    f"engine={{kind: '{HERE}:open_scripted'}}",
    "training.precision=float32",
    "training.tasks_per_update=3",
    "training.group_size=4",
    "orchestration.updates=1",
)


def in_pairs(text: str, attempt: int) -> str | None:
    """What a model says of which even attempts solve their task, and odd ones say that they have; None: its own."""
    command = next((command for words, command in SOLUTIONS.items() if words in text), "")
    if not command:
        return None
    first = answer(command) if attempt % 2 == 0 else answer("true\n")
    return playing(first, answer(done=True), answer(done=True))(text)


def verdict(words: str) -> tuple[str, ...]:
    """What a model says that has the verifier say these words."""
    return answer(f"echo {words} > /app/verdict\n"), answer(done=True), answer(done=True)


SLEEPS = '{"analysis": "", "plan": "", "commands": [{"keystrokes": "sleep 60\\n", "duration": 50}]}'
BY_PLACE: dict[int, tuple[tuple[str | Exception, ...], str]] = {
    # what it says turn by turn, and how the attempt ends
    0: (verdict("1"), "done 1"),
    1: (verdict("0"), "done 0"),
    2: ((answer("true\n"), EngineError("out of order")), "engine"),
    3: ((answer("printf 'x%.0s' {1..9000}\n"), answer("true\n")), "context 0"),
    4: ((answer("echo 1 > /app/verdict\n"),), "max_steps 1"),
    5: ((answer("echo 1 > /app/verdict\n"), SLEEPS), "done 1"),
    6: ((answer(done=True),), "verifier"),  # no reward
    7: (verdict(""), "verifier"),
    8: (verdict("NaN"), "verifier"),
    9: (verdict("well done"), "verifier"),
    10: (verdict("1"), "environment"),  # the others: see broken.py
    11: (verdict("1"), "infrastructure"),
    12: (verdict("1"), "infrastructure"),
    13: (verdict("1"), "agent"),
    14: (verdict("1"), "done 1"),
    15: (verdict("slow"), "verifier"),
}


def by_place(text: str, attempt: int) -> str | None:
    said = playing(*BY_PLACE[attempt % SIZE][0])(text) if "Do it." in text else None
    if isinstance(said, Exception):
        raise said
    return said


class Scripted:
    """Treadle's own engine, into whose mouth words are put. Log-probabilities are the model's own of them."""

    def __init__(self, engine: Engine, spec: EngineSpec, says: Callable[[str, int], str | None]) -> None:
        self._engine, self._renderer, self._says = engine, spec.renderer, says

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        sampled = await self._engine.generate(prompt_ids, sampling, session=session, **more)
        if sampling.max_tokens <= 16 or "." not in session:  # a check of engine or driver
            return sampled
        said = self._says(self._renderer.decode(prompt_ids.tolist()), int(session.rpartition(".")[2]))
        if said is None:
            return sampled
        ids = np.array([*TOKENIZER.encode(said, add_special_tokens=False), *self._renderer.stop_ids], np.int32)
        logprobs = (await self._engine.score(np.concatenate([prompt_ids, ids])))[len(prompt_ids) - 1 :]
        versions = (VersionSpan(sampled.policy_versions[0].version, 0, len(ids)),)
        return Completion(ids, logprobs, StopReason.STOP, versions)


OPENED: list[Sampled] = []


async def open_scripted(
    spec: EngineSpec, says: Callable[[str, int], str | None] = in_pairs
) -> tuple[Engine, WeightSync]:
    engine, weight_sync = await open_torch(spec)
    OPENED.append(Sampled(Scripted(engine, spec, says)))
    return OPENED[-1], weight_sync


open_by_place = partial(open_scripted, says=by_place)


def command(*words: str) -> int:
    return main([*words, f"driver_options.python={python_with_harbor()}"])


@pytest.mark.slow
def test_the_shipped_tasks_train_with_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    OPENED.clear()
    assert command("train", "harbor", *ON_THIS_MACHINE, "--runs", str(tmp_path), "--name", "run") == 0
    run = tmp_path / "run"
    check_finished(run)
    rows = query(run, "SELECT trajectory_id, reward, status, advantage FROM trajectories")
    assert len(rows) == 12 and {row["status"] for row in rows} == {"done"}
    for row in rows:
        well = int(row["trajectory_id"].rpartition(".")[2]) % 2 == 0
        assert (row["reward"], row["advantage"]) == ((1.0, 0.5) if well else (0.0, -0.5))
    [engine] = OPENED
    sampled = sum(len(engine.calls[row["trajectory_id"]]) for row in rows)
    assert query(run, "SELECT count(*) AS count FROM steps WHERE state = 'trained'") == [{"count": sampled}]
    assert not any((run / "trials").iterdir())
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "env/agent_seconds" in out and "env/calls_misreported" in out


@pytest.mark.slow
def test_an_asynchronous_run_is_trained_from_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with_harbor()
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    few = ["warm_start.steps=20", "orchestration.updates=2", "training.tasks_per_update=4", "training.group_size=4"]
    config = load_recipe("harbor-small", [*few, "orchestration.max_staleness=2", f"driver_options.python={python}"])
    summary = train_run(config, load_inputs(config), tmp_path / "run", Quiet())
    assert summary["updates"] == 2
    assert not any((tmp_path / "run" / "trials").iterdir())


TEST = '[ "$(cat /app/verdict)" = slow ] && sleep 60\ncp /app/verdict /logs/verifier/reward.txt'
LIMITS = "[verifier]\ntimeout_sec = 10.0\n[agent]\ntimeout_sec = 150.0\n[environment]\nbuild_timeout_sec = 60.0\n"


@pytest.mark.slow
def test_each_attempt_of_a_group_fails_in_its_own_way_and_its_siblings_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of the outcome table, in one group of one update."""
    shutil.copy(Path(__file__).with_name("broken.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks" / "task", "Do it.", TEST, LIMITS)
    OPENED.clear()
    how = [
        *ON_THIS_MACHINE,
        f"data.train={{source: harbor_tasks, options: {{path: {tmp_path / 'tasks'}}}}}",
        "driver_options.agent=broken:TerminusByPlace",
        "driver_options.environment=broken:ByPlace",
        f"engine={{kind: '{HERE}:open_by_place'}}",
        "training.tasks_per_update=1",
        f"training.group_size={SIZE}",
        "rollout.max_steps=6",
        "rollout.max_input_tokens=12000",
        "rewards.overlong=keep",
        "failures={causes: {environment: {retries: 1, backoff: 0}, engine: {retries: 1, backoff: 0}, "
        "infrastructure: {retries: 1, backoff: 0}}, max_failed_fraction: 1}",
    ]
    assert command("train", "harbor", *how, "--runs", str(tmp_path), "--name", "run") == 0
    check_finished(tmp_path / "run")
    rows = query(tmp_path / "run", "SELECT * FROM trajectories ORDER BY attempt")
    played: dict[int, list[dict[str, Any]]] = {number: [] for number in BY_PLACE}
    for row in rows:
        played[row["attempt"] % SIZE].append(row)
    found = {number: [ending(row) for row in own] for number, own in played.items()}
    again = {"engine", "environment", "infrastructure"}
    assert found == {n: [end] * (1 + (end in again)) for n, (_, end) in BY_PLACE.items()}
    trained = [row for own in played.values() for row in own if row["failure_cause"] is None]
    mean = sum(row["reward"] for row in trained) / len(trained)
    assert all(row["advantage"] == pytest.approx(row["reward"] - mean) for row in trained)
    sampled = sum(len(OPENED[0].calls[row["trajectory_id"]]) for row in trained)
    assert query(tmp_path / "run", "SELECT count(*) AS n FROM steps WHERE state = 'trained'") == [{"n": sampled}]
    assert not sandboxes()


def ending(row: dict[str, Any]) -> str:
    return str(row["failure_cause"] or f"{row['status']} {row['reward']:g}")
