"""Whole runs that see: sampled, recorded and trained with the same pictures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import Interrupting, check_finished, recorded, resume, start
from tests.seeing import FAMILIES, write
from treadle.core.images import read_image
from treadle.record.record import Record

Model = Callable[[str], str]
LONG = ("rollout.max_input_tokens=300", "model.build=null", "model.tokenizer=null", "environment=tests.seeing:Looks")
"""Of a model in a directory; with rows of pictures, prompts are longer than the tiny recipe's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")

    def of(family: str) -> str:
        if not (folder / family).is_dir():
            write(folder / family, family)
        return f"model.path={folder / family}"

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_see_the_same(model: Model, family: str, tmp_path: Path) -> None:
    start(tmp_path / "run", model(family), *LONG)
    check_finished(tmp_path / "run")  # the learner's log-probabilities are the engine's
    steps = [step for _, played in recorded(tmp_path / "run") for step in played]
    assert {len(step.images) for step in steps} == {1, 2}
    for image in {image.sha256: image for step in steps for image in step.images}.values():
        assert read_image(image.url).sha256 == image.sha256
    files = {file.name[:64] for file in (tmp_path / "run" / "images").iterdir()}
    assert {image.sha256 for step in steps for image in step.images} <= files
    assert len(list(Record.open(tmp_path / "run").trajectories())) == 4 * 2 * 3 + 2 * 3  # and two evaluations


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_an_interrupted_run_ends_with_the_same_bits(model: Model, vision: str, tmp_path: Path) -> None:
    settings = (model("qwen3_vl"), *LONG, f"training.vision={vision}")
    whole = start(tmp_path / "whole", *settings)
    start(tmp_path / "parts", *settings, progress=Interrupting(which=3))
    parts = resume(tmp_path / "parts")
    check_finished(tmp_path / "parts")
    assert parts["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("training.packing=step",),
        ("training.packing=chain",),
        ("training.max_tokens_per_microbatch=40",),
        ("orchestration.max_staleness=2", "algorithm.correction.token_tis=2.0"),
        ("training.lora.rank=2",),
        ("placement.learner.ranks=2",),
        ("placement.learner.ranks=2", "training.vision=train"),
        ("engine.own_process=true",),
        ("rollout.compaction={at: 60, keep_last: 0, prompt: Sum up, max_tokens: 4}",),
    ],
    ids=" ".join,
)
def test_every_way_to_train_sees(model: Model, more: tuple[str, ...], tmp_path: Path) -> None:
    start(tmp_path / "run", model("qwen3_vl"), *LONG, *more)
    check_finished(tmp_path / "run")
