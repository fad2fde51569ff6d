"""Worlds of two and three turns in which everything that can happen is listed, with its probability.

At each turn the policy guesses, one way or the other, which ends the attempt, or looks on, the last time too. Each
reply has a reward, and they differ in length. The policy is a softmax of its own for each turn: one parameter for each
turn and reply, D in all.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from tests.models import make_group, make_step
from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.core.types import BreakCause, Group, Step
from treadle.packing.flat import FlatBatch

Vector = NDArray[np.float64]
Attempt = tuple[int, ...]
LOOK = 2
LENGTHS = (1, 3, 2)  # tokens of each reply; all is decided by the first


@dataclass(frozen=True, eq=False)
class World:
    """policy [turns, 3]: probability of each reply. rewards [turns, 3]."""

    policy: Vector
    rewards: Vector

    @property
    def turns(self) -> int:
        return len(self.policy)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, from the shortest to the longest."""
        return [*((LOOK,) * t + (guess,) for t in range(self.turns) for guess in (0, 1)), (LOOK,) * self.turns]

    def after(self, turn: int) -> list[Attempt]:
        """All attempts that reach a turn, counted from 0."""
        return [attempt for attempt in self.attempts if len(attempt) > turn]

    def probability(self, attempt: Attempt, given: int = 0) -> float:
        """The probability of the replies after the `given` first ones."""
        return math.prod(float(self.policy[turn, attempt[turn]]) for turn in range(given, len(attempt)))

    def score(self, turn: int, reply: int) -> Vector:
        """The gradient [D] of a reply's log-probability by the logits."""
        score = np.zeros((self.turns, 3))
        score[turn] = -self.policy[turn]
        score[turn, reply] += 1
        return score.ravel()

    def reward(self, attempt: Attempt) -> float:
        return float(sum(self.rewards[turn, reply] for turn, reply in enumerate(attempt)))

    def gradient(self, start: int = 0) -> Vector:
        """The gradient [turns, D] of the expected reward of attempts that begin at turn `start`, by the turn whose
        replies it goes through."""
        parts = np.zeros((self.turns, self.turns * 3))
        for attempt in self.after(start):
            for turn in range(start, len(attempt)):
                weight = self.probability(attempt, start) * self.reward(attempt)
                parts[turn] += weight * self.score(turn, attempt[turn])
        return parts

    @cached_property
    def _steps(self) -> dict[Attempt, Step]:
        """The last step of each beginning of an attempt."""
        made, prompt = {}, [1]
        for turn in range(self.turns):
            for reply in range(3):
                step = make_step(prompt, [3 + reply] + [6] * (LENGTHS[reply] - 1))
                cause = BreakCause.SUMMARY if turn else None  # each turn is a segment
                reward = float(self.rewards[turn, reply])
                made[(LOOK,) * turn + (reply,)] = replace(step, reward=reward, state_key=str(turn), break_cause=cause)
            prompt = [*prompt, 3 + LOOK, *([6] * (LENGTHS[LOOK] - 1)), 7]
        return made

    def steps(self, attempt: Attempt) -> list[Step]:
        return [self._steps[attempt[: turn + 1]] for turn in range(len(attempt))]

    def group(self, attempts: Sequence[Attempt], index: int = 0) -> Group:
        return make_group([(self.steps(attempt), self.reward(attempt)) for attempt in attempts], index)

    def scores(self, batch: FlatBatch) -> Vector:
        """The score [S, D] of each trained step's first token, by its ids."""
        table = np.array([[self.score(turn, reply) for reply in range(3)] for turn in range(self.turns)])
        turns = [int(step.state_key) for step in batch.steps]
        return table[turns, [int(step.completion_ids[0]) - 3 for step in batch.steps]]

    def groups(self, size: int, start: int = 0) -> list[tuple[float, tuple[Attempt, ...]]]:
        """All groups of independent attempts from a turn on, each with its probability."""
        chosen = itertools.product(self.after(start), repeat=size)
        return [(math.prod(self.probability(attempt, start) for attempt in each), each) for each in chosen]

    def sample(self, place: int, attempt: int, given: Attempt = ()) -> Attempt:
        """Sample an attempt after these replies, with the draws of its address."""
        replies = list(given)
        while not replies or (replies[-1] == LOOK and len(replies) < self.turns):
            seed = call_seed(0, Stream.TRAIN, 0, place, attempt, len(replies))
            draw = float(token_uniforms(np.array([seed], np.uint64), 0)[0])
            replies.append(int(np.searchsorted(np.cumsum(self.policy[len(replies)])[:2], draw, side="right")))
        return tuple(replies)


@cache
def worlds() -> dict[int, World]:
    """By their number of turns."""
    return {
        2: World(np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]), np.array([[1.0, 0.0, 0.25], [2.0, 0.5, 1.5]])),
        3: World(
            np.array([[0.15, 0.25, 0.6], [0.3, 0.2, 0.5], [0.5, 0.4, 0.1]]),
            np.array([[0.5, 0.0, 0.0], [1.0, 0.25, 0.5], [2.0, 0.0, 0.5]]),
        ),
    }


def by_group(world: World, batch: FlatBatch, advantage: Vector, size: int) -> Vector:
    """The gradient [G, D] of each group's loss, its tokens summed and divided by its `size` attempts.

    advantage [N].
    """
    first = batch.step_start[:-1]
    group = batch.group_id[first]
    gradient = np.zeros((len(batch.groups), world.turns * 3))
    np.add.at(gradient, group, (advantage[first] / size)[:, None] * world.scores(batch))
    return gradient


def angle(one: Vector, other: Vector) -> float:
    """The angle between two gradients, in degrees."""
    cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    return math.degrees(math.acos(min(cosine, 1.0)))
