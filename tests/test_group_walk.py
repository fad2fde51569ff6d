"""The way of an attempt, from its end to the optimizer step, through the rooms of the code.

A room is a folder. An attempt comes into one when a method there is given it, alone, in its group or in a batch. Pure
functions, which look at it and answer, are no rooms.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import treadle
from tests.orchestration.runs import start
from treadle.core.types import Group, Trajectory
from treadle.orchestration.sampling.groups import Batch

ROOT = Path(treadle.__file__).parent
ATTEMPT = "g000000.1"
MOST_STAYS, MOST_RETURNS = 8, 3


def is_traced(value: object) -> bool:
    """Whether it is the attempt, or holds it."""
    match value:
        case Trajectory():
            return value.trajectory_id == ATTEMPT
        case Group():
            return any(map(is_traced, value.trajectories))
        case Batch():
            return is_traced(value.groups)
        case list() | tuple():
            return any(map(is_traced, value))
    return False


class Walk:
    """Notes the rooms, in order, until the optimizer steps."""

    def __init__(self) -> None:
        self.rooms: list[str] = []
        self.ended = False
        self._entered: list[FrameType] = []  # a coroutine is "called" whenever it goes on

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if (
            self.ended
            or event != "call"
            or "self" not in code.co_varnames[:1]
            or not code.co_filename.startswith(str(ROOT))
        ):
            return
        if not any(is_traced(frame.f_locals.get(name)) for name in code.co_varnames[1 : code.co_argcount]):
            return
        if frame in self._entered:
            return
        self._entered.append(frame)
        room = str(Path(code.co_filename).parent.relative_to(ROOT)).removeprefix("orchestration/")
        if room not in self.rooms[-1:]:
            self.rooms.append(room)

    def stop(self, *_: object) -> None:
        self.ended = True


def walked(path: Path) -> list[str]:
    walk = Walk()
    hook = register_optimizer_step_pre_hook(walk.stop)
    sys.setprofile(walk)
    try:
        start(path, "orchestration.updates=1", "evaluation.every=0")
    finally:
        sys.setprofile(None)
        hook.remove()
    assert walk.ended
    return walk.rooms


def returns(rooms: list[str]) -> Iterator[str]:
    """The rooms that it comes back to, once for each time."""
    for number, room in enumerate(rooms):
        if room in rooms[:number]:
            yield room


def test_an_attempt_walks_a_short_way_that_is_drawn_for_contributors(tmp_path: Path) -> None:
    rooms = walked(tmp_path / "run")
    print(" -> ".join(rooms))
    assert len(rooms) <= MOST_STAYS and len(list(returns(rooms))) <= MOST_RETURNS
    page = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    drawn = re.search(r"^    (rollout(?: -> \w+)+)$", page, re.MULTILINE)
    assert drawn and drawn[1].split(" -> ") == rooms
