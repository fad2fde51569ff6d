"""Templates that write the date: whatever loads a run's chat later renders the day on which the run began."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs import recorded, resume, start
from tests.worlds import ROOT, Quiet, tiny
from treadle.api.evaluate import evaluate_model, find_subject, held_out_inputs
from treadle.api.export import export_checkpoint
from treadle.api.lesson import prepare
from treadle.api.warm_start import learn_recorded
from treadle.cli.serve import model_to_serve
from treadle.models.chat import load_chat
from treadle.plan.other_models import make_models
from treadle.record.record import Record
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.other_models import OtherModelConfig, open_models

THEN = datetime(1999, 3, 4)


class Before(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Before":
        return cls(1999, 3, 4)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "dated.jinja"
    own = (ROOT / "src/treadle/recipes/tokenizer/chat_template.jinja").read_text()
    file.write_text("{{ strftime_now('%Y') }}" + own)
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Iterator[Path]:
    """A run of 1999, gone on with since."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as then:
        then.setattr("treadle.api.run.datetime", Before)
        start(path, "orchestration.updates=1", f"model.chat_template={template}")
    resume(path, config=tiny("orchestration.updates=2", f"model.chat_template={template}"))
    yield path


def year(prompt: str) -> str:
    return prompt[:4]


def test_a_run_that_goes_on(run: Path) -> None:
    year = load_chat(tiny().model, None)[1].encode("1999").tolist()
    prompts = [step.prompt_ids[: len(year)].tolist() for _, steps in recorded(run) for step in steps]
    assert len(prompts) > 20 and prompts == [year] * len(prompts)


@pytest.mark.parametrize("way", ["the run", "its checkpoint", "its export", "a recipe with its model"])
def test_an_evaluation(run: Path, template: Path, tmp_path: Path, way: str) -> None:
    if way == "a recipe with its model":
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text((run / "config.yaml").read_text())
        subject = find_subject(str(recipe), [], f"{run}@1")
    elif way == "its export":
        export_checkpoint(run, tmp_path / "export")
        subject = find_subject(str(run), [], tmp_path / "export")
    else:
        subject = find_subject(f"{run}@1" if way == "the run" else str(run / "checkpoints/step-000001"))
    evaluate_model(subject, held_out_inputs(subject), Quiet(), tmp_path / "dump")
    decode = load_chat(subject.model_config, None)[1].decode
    prompts = [
        decode(step.prompt_ids)
        for played in Record.open(tmp_path / "dump").trajectories()
        for step in played.trajectory.steps
    ]
    assert prompts and {year(prompt) for prompt in prompts} == {"1999"}


def test_a_server(run: Path, tmp_path: Path) -> None:
    for name in (run, f"{run}@1", run / "checkpoints/step-000001"):
        _, began = model_to_serve(SimpleNamespace(model=str(name), chat_template=None))  # type: ignore[arg-type]
        assert began is not None and began.date() == THEN.date()
    export_checkpoint(run, tmp_path / "export")
    assert model_to_serve(SimpleNamespace(model=str(tmp_path / "export"), chat_template=None))[1] is None  # type: ignore[arg-type]


def test_learning_from_the_recorded(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[datetime | None] = []

    def loaded(config: Any, began: datetime | None) -> Any:
        seen.append(began)
        return load_chat(config, began)

    monkeypatch.setattr("treadle.api.warm_start.load_chat", loaded)
    for begin in (None, f"{run}@1"):
        lesson = prepare(begin, [str(run)], overrides=["warm_start.steps=1", "warm_start.batch_size=2"])
        learn_recorded(lesson, tmp_path / str(begin is None), Quiet())
    assert [began and began.date() for began in seen] == [THEN.date()] * 2


async def test_models_beside_the_policy(run: Path, template: Path) -> None:
    config = tiny().model
    directory = run / "checkpoints/step-000001"
    renderer = ChatRenderer(load_chat(config, None)[0], (0,), began=THEN)
    async with open_models(make_models({"user": OtherModelConfig(path=str(directory))}), renderer.began) as models:
        model: Any = models["user"]
        assert model.renderer.began == THEN
