"""Whole runs with adapters: in one process and several, resumed, exported and evaluated."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engines.test_engine_restart import children
from tests.forks import run
from tests.models import same_bits
from tests.runs import check_finished, query, recorded, resume, start
from tests.worlds import END, ROOT, Quiet, Vowels, tiny, tool
from treadle.api.evaluate import evaluate_model, find_subject, held_out_inputs
from treadle.api.export import export_checkpoint
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import ConfigError, TreadleError
from treadle.core.types import Ids, SamplingParams
from treadle.envs.base import EnvStep
from treadle.loop.runtime import Runtime
from treadle.models.model_files import tokenizer_directory
from treadle.testing import FakeEngine
from treadle.training.checkpoint import export_model
from treadle.training.make import load_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's model, as a directory."""
    config = tiny()
    directory = tmp_path_factory.mktemp("models") / "base"
    export_model(directory, load_model(config.model, 0), tokenizer_directory(config.model))
    return directory


def adapted(base: Path, *more: str) -> tuple[str, ...]:
    return (
        "model.build=null",
        "model.tokenizer=null",
        f"model.path={base}",
        "training.lora={rank: 2}",
        "algorithm={kl: {coef: 0.01}, entropy_coef: 0}",
        "evaluation.every=2",
        "training.optimizer={learning_rate: 3e-3}",  # nothing depends on how many updates there are
        *more,
    )


def test_a_run_with_adapters_stops_goes_on_and_is_a_model(base: Path, tmp_path: Path) -> None:
    straight = start(tmp_path / "straight", *adapted(base))
    start(tmp_path / "run", *adapted(base, "orchestration.updates=2"))
    config = tiny(*adapted(base))
    finished = resume(tmp_path / "run", config=config)
    assert finished["weights_sha256"] == straight["weights_sha256"]
    assert finished["evaluations"] == straight["evaluations"]
    check_finished(tmp_path / "run")

    export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    export_checkpoint(tmp_path / "run", tmp_path / "whole", merge=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "same", merge=True)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "same")]
    assert same_bits(*weights)
    with pytest.raises(ConfigError, match="is an adapter in peft's format already; copy it, or add --merge"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "no")
    with pytest.raises(ConfigError, match=r"--merge: .* is a whole model already"):
        plain = start(tmp_path / "plain", *adapted(base, "training.lora=null"))
        assert plain["weights_sha256"] != straight["weights_sha256"]
        export_checkpoint(tmp_path / "plain", tmp_path / "no", merge=True)
    assert {f.name for f in (tmp_path / "adapter").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    scores = [
        evaluate_model(subject, held_out_inputs(subject), Quiet()).result
        for subject in (
            find_subject(str(tmp_path / "run")),
            find_subject(str(tmp_path / "run"), model=tmp_path / "adapter"),
            find_subject(str(tmp_path / "run"), model=tmp_path / "whole"),
        )
    ]
    assert len(scores) == 3
    sizes = [sum(f.stat().st_size for f in (tmp_path / name).glob("*.safetensors")) for name in ("adapter", "whole")]
    assert sizes[0] < sizes[1] / 2
    more = start(tmp_path / "more", *adapted(base, f"model.adapter={tmp_path / 'adapter'}", "model.path=null"))
    assert more["weights_sha256"] != straight["weights_sha256"]
    with pytest.raises(TreadleError, match="rank is 4, and the adapter in"):
        start(tmp_path / "no", *adapted(base, f"model.adapter={tmp_path / 'adapter'}", "training.lora={rank: 4}"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["engine.own_process=true"], ["orchestration.max_staleness=2"]])
def test_other_places_to_sample(base: Path, tmp_path: Path, settings: list[str]) -> None:
    there = start(tmp_path / "there", *adapted(base, *settings))
    check_finished(tmp_path / "there")
    if "engine.own_process=true" in settings:
        assert there["weights_sha256"] == start(tmp_path / "here", *adapted(base))["weights_sha256"]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks(base: Path, tmp_path: Path) -> None:
    """A run on two ranks goes on in one process; each checkpoint is an adapter of one file."""
    settings = adapted(base, "orchestration.checkpoint_every=1", "orchestration.keep_last=9", "engine.own_process=true")
    start(tmp_path / "run", *settings, "placement.learner.ranks=2", "orchestration.updates=2")
    config = tiny(*settings)
    resume(tmp_path / "run", config=config)
    check_finished(tmp_path / "run")
    here = start(tmp_path / "here", *settings, "orchestration.updates=2")
    two = load_file(tmp_path / "run/checkpoints/step-000002/adapter_model.safetensors")
    one = load_file(tmp_path / "here/checkpoints/step-000002/adapter_model.safetensors")
    assert here and max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["model.build={model_type: qwen3}", "model.path=null", "model.tokenizer=demo"], "needs a trained model"),
        (["training.lora.targets=[gate]"], "no linear layers named"),
        (["placement.learner={ranks: 2, loading: sharded}"], "loading 'sharded' cannot be combined"),
        (
            ["training.lora=null", "model.adapter=adapter", "placement.learner={ranks: 2, loading: sharded}"],
            "model.adapter and .*loading 'sharded' cannot be combined",
        ),
        (["engine={kind: vllm, options: {transfer: collective}}"], "published by files in the run's directory"),
    ],
)
def test_what_cannot_work_is_refused(base: Path, settings: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config = tiny(*adapted(base, *settings))
        load_model(config.model, 0, config.training.lora)


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["engine.own_process=true"]])
def test_pinned_attempts_have_one_version(base: Path, tmp_path: Path, where: list[str]) -> None:
    """In a long asynchronous run whose attempts are slow; without pinning some have several."""
    settings = ["orchestration.max_staleness=2", "orchestration.updates=100", "evaluation.every=0"]
    settings += ["data.train.options.seconds=0.01", "orchestration.checkpoint_every=50"]
    for pin in (True, False):
        path = tmp_path / str(pin)
        start(path, *adapted(base, *settings, *where, f"training.lora.pin_attempts={str(pin).lower()}"))
        check_finished(path)
        versions = [{int(v) for step in steps for v in step.policy_versions} for _, steps in recorded(path)]
        assert (max(map(len, versions)) == 1) == pin
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert max(row.get("trained_staleness_max") or 0 for row in rows) in (1, 2)


class Unpinned(FakeEngine):
    """Samples the first attempt of each group by two versions, once there are two, and every other one by one."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, sampling: [*range(200, 203 + sampling.seed % 2), END], delay=lambda: 0.001)
        self._first: dict[str, int] = {}

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        completion = await super().generate(prompt_ids, sampling, session=session, **more)
        first, tokens = self._first.setdefault(session, self.version), len(completion.token_ids)
        another = max(first - 1, 0) if session.endswith(".0") else first
        return replace(completion, policy_versions=(VersionSpan(another, 0, 1), VersionSpan(first, 1, tokens)))


@pytest.mark.parametrize("policy", ["{backoff: 0}", "{retries: 0, grade: 0}"])
def test_an_attempt_of_two_versions_is_recorded_as_failed_and_never_trained(
    base: Path, tmp_path: Path, policy: str
) -> None:
    """Also if failures are graded. The run goes on."""

    async def open_engine(*_: Any) -> tuple[Unpinned, Unpinned]:
        engine = Unpinned()
        return engine, engine

    async def unchecked(*_: Any) -> None:
        """A fake engine has logprobs of its own."""

    settings = ["orchestration.max_staleness=2", "orchestration.updates=6", "evaluation.every=0"]
    settings += ["training.lora.pin_attempts=true", f"failures.causes={{engine: {policy}}}"]
    runtime = Runtime(open_engine=open_engine, check_engine=unchecked)
    start(tmp_path / "run", *adapted(base, *settings), runtime=runtime)
    check_finished(tmp_path / "run")
    mixed = query(
        tmp_path / "run",
        "SELECT status, t.reward, failure_message AS failure, warning, state, reason FROM trajectories t "
        "JOIN groups USING (group_id) JOIN steps USING (trajectory_id) "
        "WHERE split = 'train' AND oldest_version < newest_version",
    )
    assert {(row["state"], row["reason"]) for row in mixed} == {("dropped", "failed")}
    ended = ("graded", 0.0) if "grade" in policy else ("failed", None)
    assert {(row["status"], row["reward"]) for row in mixed} == {ended}
    for row in mixed:
        assert "sampled it, and training.lora.pin_attempts keeps" in (row["failure"] or row["warning"])


PINNED = (
    "training.lora.pin_attempts=true",
    "environment=tests.api.test_lora:Slow",
    "rollout.max_steps=6",
    "rollout.max_input_tokens=100",
    "data.train.options.seconds=0.01",
    "orchestration.max_staleness=2",
    "orchestration.updates=14",
    "orchestration.checkpoint_every=1",
    "evaluation.every=0",
)


class Slow(Vowels):
    """Six replies, some of which take longer."""

    async def step(self, text: str) -> EnvStep:
        await asyncio.sleep(0.02 * (len(text) % 4))
        step = await super().step(text)
        return step._replace(done=self.replies == 6, observations=[tool("a")])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["engine.own_process=false", "engine.own_process=true"])
def test_pinned_attempts_have_one_version_also_where_the_run_is_killed(base: Path, tmp_path: Path, where: str) -> None:
    """Between a publication and the next attempts are under way that began with an older version than is resumed."""
    kills = "record=2,record=9,write=11,record=5,publish=1,record=12"
    options = adapted(base, *PINNED, where)
    done = run([sys.executable, "-m", "tests.loop.killed_runs", str(tmp_path), kills, *options], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "recorded calls" in (tmp_path / "said").read_text()


class Killing(Quiet):
    """Kills the engine's process amid every third batch."""

    def began(self, name: str) -> None:
        if name == "rollout" and len(self.rows) % 3 == 2:
            for pid in children():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_pinned_attempts_have_one_version_also_where_the_engine_is_killed(base: Path, tmp_path: Path) -> None:
    """Those of a version that is lost with it fail of that, and are tried again."""
    settings = ("engine.own_process=true", "orchestration.updates=12", "orchestration.stale_policy=wait")
    progress = Killing()
    start(
        tmp_path / "run",
        *adapted(base, *PINNED, *settings, "failures.causes={engine: {backoff: 0}}"),
        progress=progress,
    )
    check_finished(tmp_path / "run")
    assert any(line.startswith("the engine ended") for line in progress.lines)


def test_a_warm_start_of_adapters_is_read_from_the_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    warm = ("warm_start.demonstrations=tests.worlds:vowel_demonstration", "warm_start.steps=3", "data.held_out=null")
    settings = adapted(base, *warm, "warm_start.batch_size=4", "evaluation={}", "orchestration.updates=1")
    first, second = (start(tmp_path / name, *settings) for name in ("first", "second"))
    assert [summary["warm_start"]["cached"] for summary in (first, second)] == [False, True]
    assert first["weights_sha256"] == second["weights_sha256"]
