"""Ranks that share a model that sees, whichever of them have images: the gradient is that of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import distance, in_float64, norm
from tests.seeing import write
from tests.training.reference import accumulated
from tests.training.test_images import Family, conversations
from treadle.algorithms.config import AlgorithmConfig
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.towers import tower_of, trained_tower
from treadle.models.vision import ImageProcessor
from treadle.models.weights import published, weights_digest
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner
from treadle.training.rank_processes import RankProcesses
from treadle.training.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


class Seeing:
    """Answers the tests on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def gradient(self, directory: Path, vision: str, budget: int) -> tuple[float, int, str]:
        """Relative distance from one process, number of gradients, and the digest after an update."""
        of = Family(directory.name, directory, ImageProcessor(directory))
        alone, shared = (self._learner(of, vision, budget, ranks) for ranks in (None, self.ranks))
        groups = conversations(of)
        wanted, found = (accumulated(each, groups)[0] for each in (alone, shared))
        shared.train_batch(groups)
        used = {name: gradient for name, gradient in found.items() if name in wanted}
        assert all(not gradient.any() for name, gradient in found.items() if name not in wanted)
        return distance(used, wanted) / norm(wanted), len(found), weights_digest(published(shared.model))

    def _learner(self, of: Family, vision: str, budget: int, ranks: Ranks | None) -> Learner:
        config, whole = ModelConfig(path=str(of.directory)), vision == "train"
        model = in_float64(make_model(config, 726, 0, weights=ranks is None or ranks.rank == 0, whole=whole))
        tower = trained_tower(config, model) if whole else tower_of(config, "cpu")
        training = TrainingConfig.model_validate(
            {"vision": vision, "max_tokens_per_microbatch": budget, "optimizer": OptimizerConfig(learning_rate=1e-2)}
        )
        return Learner(model, training, AlgorithmConfig(), 4, ranks=ranks, vision=tower)


@pytest.fixture(scope="module")
def seeing() -> Iterator[RankProcesses]:
    made = RankProcesses(Seeing, 2, limit=120)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["idefics3", "qwen3_vl"])
@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_the_gradient_with_images_is_that_of_one_process(
    seeing: RankProcesses, tmp_path: Path, name: str, vision: str
) -> None:
    write(tmp_path / name, name)
    for budget in (60, 9):
        answers = seeing.call("gradient", tmp_path / name, vision, budget)
        assert all(gap <= 1e-12 for gap, _, _ in answers)
        assert len({digest for _, _, digest in answers}) == 1
