"""Every registered advantage with every policy loss, under every packing, through the command line."""

import pytest

from tests.cli.conftest import Place
from tests.orchestration.runs import updates
from treadle.core.registry import names
from treadle.packing.layout import Packing


@pytest.mark.quick(2)
@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("loss", names("policy_losses"))
@pytest.mark.parametrize("advantage", names("advantages"))
def test_it_trains_two_updates(advantage: str, loss: str, packing: Packing, place: Place) -> None:
    """None of these is refused; options that are have tests of their own."""
    done = place.train(
        *(f"algorithm.advantage={advantage}", f"algorithm.policy_loss={loss}", f"training.packing={packing}"),
        *("training.updates_per_batch=2", "orchestration.updates=2", "data.held_out=null", "data.table_by=null"),
    )
    assert done.status == 0, done.err
    rows = updates(place.runs / "new")
    assert [row["update"] for row in rows] == [1, 2]
    assert all(row["trainable_tokens"] > 0 and row["loss"] is not None for row in rows)
    assert any(row["gradient_norm"] > 0 for row in rows)
