"""Every registered advantage with every policy loss, through the command line; each packing with a third of them."""

from itertools import product

import pytest

from tests.cli.conftest import Place
from tests.orchestration.runs import updates
from treadle.core.registry import names
from treadle.packing.layout import Packing

PAIRS = list(product(names("advantages"), names("policy_losses")))


@pytest.mark.quick(2)
@pytest.mark.parametrize(("number", "advantage", "loss"), [(n, *pair) for n, pair in enumerate(PAIRS)])
def test_it_trains_two_updates(number: int, advantage: str, loss: str, place: Place) -> None:
    """None of these is refused; options that are have tests of their own."""
    packing = list(Packing)[number % len(Packing)]
    done = place.train(
        *(f"algorithm.advantage={advantage}", f"algorithm.policy_loss={loss}", f"training.packing={packing}"),
        *("training.updates_per_batch=2", "orchestration.updates=2", "data.held_out=null", "data.table_by=null"),
    )
    assert done.status == 0, done.err
    rows = updates(place.runs / "new")
    assert [row["update"] for row in rows] == [1, 2]
    assert all(row["trainable_tokens"] > 0 and row["loss"] is not None for row in rows)
    assert any(row["gradient_norm"] > 0 for row in rows)
