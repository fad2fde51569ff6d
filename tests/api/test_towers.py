"""Whole runs of checkpoints with towers: sampled here, resumed, on several ranks, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.models import same_bits
from tests.runs import check_finished, resume, start
from tests.towers import image_logits, original, tensors, write
from tests.worlds import tiny
from treadle.api.export import export_checkpoint
from treadle.api.train import dry_run
from treadle.models.unused import unused_parts


def of(base: Path, *more: str) -> tuple[str, ...]:
    model = ("model.build=null", "model.tokenizer=null", f"model.path={base}")
    # nothing depends on how many updates there are
    return *model, "training.optimizer={learning_rate: 3e-3}", "algorithm={entropy_coef: 0}", *more


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "base", "qwen3_vl")


def is_of_tower(name: str) -> bool:
    return "visual" in name


def test_a_run_stops_goes_on_and_is_a_model_that_sees(base: Path, tmp_path: Path) -> None:
    straight = start(tmp_path / "straight", *of(base))
    start(tmp_path / "run", *of(base, "orchestration.updates=2"))
    finished = resume(tmp_path / "run", config=tiny(*of(base)))
    assert finished["weights_sha256"] == straight["weights_sha256"]
    check_finished(tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "export")
    came, goes = tensors(base), tensors(tmp_path / "export")
    assert came.keys() == goes.keys()
    assert same_bits(*({n: t for n, t in each.items() if is_of_tower(n)} for each in (came, goes)))
    assert not torch.equal(
        image_logits(original(tmp_path / "export"), "qwen3_vl"), image_logits(original(base), "qwen3_vl")
    )
    more = start(tmp_path / "more", *of(tmp_path / "export", "orchestration.updates=1"))
    assert more["weights_sha256"] != straight["weights_sha256"]


def test_adapters_are_merged_into_a_model_that_sees(base: Path, tmp_path: Path) -> None:
    start(tmp_path / "run", *of(base, "training.lora={rank: 2}", "orchestration.updates=2"))
    for dtype in (None, "bfloat16"):
        out = tmp_path / f"merged {dtype}"
        export_checkpoint(tmp_path / "run", out, merge=True, dtype=dtype)
        goes = tensors(out)
        assert goes.keys() == tensors(base).keys()
        assert {t.dtype for n, t in goes.items() if is_of_tower(n)} == {torch.bfloat16}
        assert {t.dtype for n, t in goes.items() if not is_of_tower(n)} == {getattr(torch, dtype or "float32")}
        assert image_logits(original(out), "qwen3_vl").isfinite().all()


def test_a_dry_run_says_what_is_not_used(base: Path, tmp_path: Path) -> None:
    """Sound; images are, if there are any."""
    lines = list[str]()
    dry_run(tiny(*of(base)), tmp_path / "runs", lines.append)
    assert unused_parts(tiny(*of(base)).model, {}) == lines == []
    hearing = shutil.copytree(base, tmp_path / "hearing")
    config = json.loads((base / "config.json").read_text())
    (hearing / "config.json").write_text(json.dumps(config | {"audio_config": {"depth": 1}}))
    assert unused_parts(tiny(*of(hearing)).model, {}) == [
        "the model's parts for input other than text (audio_config); checkpoints and exports keep it unchanged"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("engine.own_process=true",),
        ("engine.own_process=true", "training.lora={rank: 2}"),
        ("orchestration.max_staleness=2",),
    ],
)
def test_other_places_to_sample(base: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    there = start(tmp_path / "there", *of(base, *more))
    check_finished(tmp_path / "there")
    if more[0] == "engine.own_process=true":
        assert there["weights_sha256"] == start(tmp_path / "here", *of(base, *more[1:]))["weights_sha256"]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("loading", ["broadcast", "sharded"])
def test_two_ranks(base: Path, tmp_path: Path, loading: str) -> None:
    """A run on two ranks goes on in one process; each checkpoint has all tensors under their names."""
    ranks = ("placement.learner.ranks=2", f"placement.learner.loading={loading}")
    settings = of(base, "orchestration.checkpoint_every=1", "orchestration.keep_last=9", "engine.own_process=true")
    start(tmp_path / "run", *settings, *ranks, "orchestration.updates=2")
    resume(tmp_path / "run", config=tiny(*settings, *ranks, "orchestration.updates=3"))
    resume(tmp_path / "run", config=tiny(*settings))
    check_finished(tmp_path / "run")
    start(tmp_path / "here", *settings, "orchestration.updates=2")
    two, one, came = (
        tensors(path) for path in (*(tmp_path / name / "checkpoints/step-000002" for name in ("run", "here")), base)
    )
    assert two.keys() == one.keys() == came.keys()
    assert all(same_bits({"": two[name]}, {"": came[name]}) for name in came if is_of_tower(name))
    assert max(float((two[name].float() - one[name].float()).abs().max()) for name in one) < 1e-4
