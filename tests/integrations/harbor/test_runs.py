"""Whole runs of Harbor's trials from the command line: trained, evaluated, reported; every sampled token once."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.harbor.trials import GREETING, SHIPPED, Sampled, answer, playing, python_with_harbor
from tests.orchestration.runs import check_finished, query
from tests.worlds import Quiet
from treadle.cli.main import main
from treadle.core.engine import Completion, Engine, VersionSpan
from treadle.core.trainer import WeightSync
from treadle.core.types import Ids, SamplingParams, StopReason
from treadle.models.config import ModelConfig
from treadle.models.loading import load_tokenizer
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.config import load_recipe
from treadle.orchestration.setup.engines import EngineSpec, open_torch
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.train import start_run

HERE = "tests.integrations.harbor.test_runs"
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
    f"harbor.tasks={SHIPPED}",
    "harbor.agent=terminus-2",
    "harbor.environment=local",
    "harbor.trials_per_second=50.0",
    MODEL,
    f"engine={{kind: '{HERE}:open_scripted'}}",
    "training.precision=float32",
    "training.tasks_per_update=3",
    "training.group_size=4",
    "orchestration.updates=1",
)


class Scripted:
    """Treadle's own engine, whose even attempts solve their task and whose odd ones say that they have.

    Log-probabilities are the model's own of the words that are put into its mouth.
    """

    def __init__(self, engine: Engine, spec: EngineSpec) -> None:
        self._engine, self._chat = engine, spec.chat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        text = self._chat.decode(prompt_ids.tolist())
        command = next((command for words, command in SOLUTIONS.items() if words in text), "")
        sampled = await self._engine.generate(prompt_ids, sampling, session=session, **more)
        if not command or sampling.max_tokens <= 16:  # a check of engine or driver
            return sampled
        first = answer(command) if int(session.rpartition(".")[2]) % 2 == 0 else answer("true\n")
        said = playing(first, answer(done=True), answer(done=True))(text)
        ids = np.array([*TOKENIZER.encode(said, add_special_tokens=False), *self._chat.stop_token_ids], np.int32)
        logprobs = (await self._engine.score(np.concatenate([prompt_ids, ids])))[len(prompt_ids) - 1 :]
        versions = (VersionSpan(sampled.policy_versions[0].version, 0, len(ids)),)
        return Completion(ids, logprobs, StopReason.STOP, versions)


OPENED: list[Sampled] = []


async def open_scripted(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    engine, weight_sync = await open_torch(spec)
    OPENED.append(Sampled(Scripted(engine, spec)))
    return OPENED[-1], weight_sync


def command(*words: str) -> int:
    return main([*words, f"harbor.python={python_with_harbor()}"])


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
@pytest.mark.parametrize("how", [[], ["orchestration.max_staleness=2"]], ids=["synchronous", "asynchronous"])
def test_updates_are_trained_from_trials(how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with_harbor()
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    few = ["warm_start.steps=20", "orchestration.updates=2", "training.tasks_per_update=4", "training.group_size=4"]
    config = load_recipe("harbor-small", [*few, *how, f"harbor.python={python}"])
    summary = start_run(config, load_inputs(config), tmp_path / "run", Quiet())
    assert summary["updates"] == 2
    assert not any((tmp_path / "run" / "trials").iterdir())
