"""The check at the start of a run with images: engine and learner agree after one, whichever it is."""

from pathlib import Path

import pytest

from tests.seeing import FAMILIES, write
from tests.worlds import tiny
from treadle.core.errors import EngineError
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
from treadle.engines.weight_sync import EmbeddedSync
from treadle.loop.engines import EngineSpec, check_engine, embedded_engine
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.models.towers import tower_of
from treadle.models.vision import Features, Tower
from treadle.training.learner import Learner
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedTrainer


class Other(Tower):
    """Shows other features."""

    def features(self, image: object) -> Features:
        own = super().features(image)  # type: ignore[arg-type]
        return Features(-own.rows, own.deep)


async def check(directory: Path, engines: Tower | None, learners: Tower | None) -> None:
    config = ModelConfig(path=str(directory))
    renderer, model, run = load_chat(config, None)[1], load_model(config, 0), tiny()
    learner = Learner(model, run.training, run.algorithm, 4, vision=learners)
    trainer = EmbeddedTrainer(learner, directory, Compute(None))
    spec = EngineSpec(EngineConfig(batch=4), renderer, trainer, lambda: model, vision=lambda _: engines)
    engine = embedded_engine(spec, model)
    try:
        await check_engine(engine, EmbeddedSync(trainer, engine), trainer, renderer, 1e-2, sees=True)
    finally:
        await engine.close()


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_that_sees_something_else_than_the_learner_is_refused(tmp_path: Path, family: str) -> None:
    directory = write(tmp_path / "model", family)
    tower = tower_of(ModelConfig(path=str(directory)), "cpu")
    assert tower is not None
    await check(directory, tower, tower)
    other = Other(tower._load, tower.processor)
    with pytest.raises(EngineError, match="log-probabilities after an image that differ from those of the learner"):
        await check(directory, other, tower)
    with pytest.raises(EngineError, match="was loaded without a part that sees images"):
        await check(directory, None, tower)
