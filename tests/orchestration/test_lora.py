"""Whole runs with adapters: in one process and several, resumed, exported and evaluated."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.orchestration.runs import check_finished, recorded, resume, start
from tests.worlds import Quiet, tiny
from treadle.core.errors import ConfigError, TreadleError
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.evaluation import evaluate_model, find_subject, held_out_inputs
from treadle.orchestration.export import export_checkpoint
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
        (
            ["model.build={model_type: qwen3}", "model.path=null", "model.tokenizer=demo"],
            "needs a model that has learned something",
        ),
        (["training.lora.targets=[gate]"], "no linear layers named"),
        (["placement.learner={ranks: 2, loading: sharded}"], "loading 'sharded' do not go together"),
        (
            ["training.lora=null", "model.adapter=adapter", "placement.learner={ranks: 2, loading: sharded}"],
            "model.adapter and .*loading 'sharded' do not go together",
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


def test_a_warm_start_of_adapters_is_read_from_the_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    warm = ("warm_start.demonstrations=tests.worlds:vowel_demonstration", "warm_start.steps=3", "data.held_out=null")
    settings = adapted(base, *warm, "warm_start.batch_size=4", "evaluation={}", "orchestration.updates=1")
    first, second = (start(tmp_path / name, *settings) for name in ("first", "second"))
    assert [summary["warm_start"]["cached"] for summary in (first, second)] == [False, True]
    assert first["weights_sha256"] == second["weights_sha256"]
