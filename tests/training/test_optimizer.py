"""What the optimizer refuses."""

import pytest
import torch
from torch import nn

from treadle.core.errors import TrainingStopped
from treadle.training.config import OptimizerConfig
from treadle.training.optimizer import make_optimizer, step


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(value: float) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    config = OptimizerConfig(learning_rate=0.1)
    optimizer = make_optimizer(model, config)
    (model(torch.ones(1, 2)) * value).sum().backward()
    with pytest.raises(TrainingStopped, match=r"norm is (nan|inf) at learning rate 0.1; the weights were left"):
        step(optimizer, model, config, 0.1)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    (model(torch.ones(1, 2))).sum().backward()
    assert step(optimizer, model, config, 0.1) == pytest.approx(3**0.5)
    assert not torch.equal(model.weight, before)
