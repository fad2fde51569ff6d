"""Worlds of two and three turns in which everything that can happen is listed, with its probability.

At each turn the policy says one of three replies. Some end the attempt, with others it goes on; the last turn ends it
anyway. Replies have rewards and differ in length. A state is what was said so far, and the policy is a softmax of its
own in each state: one parameter for each state and reply, D in all.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.models import make_group, make_step
from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.core.types import BreakCause, DropReason, Group, Start, Step, Trajectory
from treadle.packing.flat import FlatBatch

Vector = NDArray[np.float64]
Said = tuple[int, ...]
"""Replies from the first one on: a state, or an attempt."""
REPLIES = range(3)
LENGTHS = (1, 3, 2)  # tokens of each reply; all is decided by the first


Chances = Callable[[Sequence[Step]], Vector]


class Tree(NamedTuple):
    """An attempt, and others that go on from its step `fork`, which was drawn with `chance`; None: set beforehand."""

    first: Said
    fork: int
    chance: float | None
    branches: tuple[Said, ...]


@dataclass(frozen=True, eq=False)
class World:
    """goes_on: replies after which there is another turn. policy, rewards: by state, of each reply."""

    turns: int
    goes_on: tuple[int, ...]
    policy: dict[Said, tuple[float, float, float]]
    rewards: dict[Said, tuple[float, float, float]]

    @cached_property
    def states(self) -> list[Said]:
        return [state for turn in range(self.turns) for state in itertools.product(self.goes_on, repeat=turn)]

    @cached_property
    def attempts(self) -> list[Said]:
        return self.after(())

    def after(self, state: Said) -> list[Said]:
        """All attempts that reach a state."""
        return [
            (*end, reply)
            for end in self.states
            if end[: len(state)] == state
            for reply in REPLIES
            if self._ends(end, reply)
        ]

    def _ends(self, state: Said, reply: int) -> bool:
        return reply not in self.goes_on or len(state) + 1 == self.turns

    def probability(self, attempt: Said, given: int = 0) -> float:
        """The probability of the replies after the `given` first ones."""
        return math.prod(self.policy[attempt[:turn]][attempt[turn]] for turn in range(given, len(attempt)))

    def score(self, state: Said, reply: int) -> Vector:
        """The gradient [D] of a reply's log-probability by the logits."""
        score = np.zeros((len(self.states), len(REPLIES)))
        row = score[self.states.index(state)]
        row -= self.policy[state]
        row[reply] += 1
        return score.ravel()

    def reward(self, attempt: Said) -> float:
        return sum(self.rewards[attempt[:turn]][reply] for turn, reply in enumerate(attempt))

    def gradient(self, start: Said = ()) -> Vector:
        """The gradient [turns, D] of the expected reward of attempts that begin in a state, by the turn whose replies
        it goes through."""
        parts = np.zeros((self.turns, len(self.states) * len(REPLIES)))
        for attempt in self.after(start):
            for turn in range(len(start), len(attempt)):
                weight = self.probability(attempt, len(start)) * self.reward(attempt)
                parts[turn] += weight * self.score(attempt[:turn], attempt[turn])
        return parts

    @cached_property
    def _steps(self) -> dict[Said, Step]:
        """The last step of each beginning of an attempt."""
        made = {}
        for state in self.states:
            prompt = [1]
            for reply in state:
                prompt = [*prompt, *_tokens(reply), 7]
            for reply, reward in enumerate(self.rewards[state]):
                cause = BreakCause.SUMMARY if state else None  # each turn is a segment
                logprobs = [math.log(self.policy[state][reply])] + [0.0] * (LENGTHS[reply] - 1)
                step = make_step(prompt, _tokens(reply), logprobs=logprobs)
                made[(*state, reply)] = replace(step, reward=reward, break_cause=cause)
        return made

    def steps(self, attempt: Said) -> list[Step]:
        return [self._steps[attempt[: turn + 1]] for turn in range(len(attempt))]

    def group(self, attempts: Sequence[Said], index: int = 0) -> Group:
        return make_group([(self.steps(attempt), self.reward(attempt)) for attempt in attempts], index)

    def tree_group(self, trees: Sequence[Tree], index: int = 0) -> Group:
        """A group of trees: each first attempt, then its branches."""
        group = self.group([attempt for tree in trees for attempt in (tree.first, *tree.branches)], index)
        made, attempts = list[Trajectory](), iter(group.trajectories)
        for tree in trees:
            made.append(first := next(attempts))
            for _ in tree.branches:
                branch, fork = next(attempts), tree.fork
                own = enumerate(branch.steps)
                steps = (replace(s, dropped=DropReason.REPLAYED) if n < fork else s for n, s in own)
                start = Start(first.trajectory_id, fork, tree.chance)
                made.append(replace(branch, steps=tuple(steps), start=start))
        return replace(group, trajectories=tuple(made))

    def trees(self, width: int, chances: Chances) -> list[tuple[float, Tree]]:
        """All trees, each with its probability. chances: of a fork at each step of an attempt."""
        found = []
        for first in self.attempts:
            forks = [(n, chance) for n, chance in enumerate(chances(self.steps(first))) if chance > 0]
            for fork, chance in forks or [(0, 1.0)]:
                for branches in itertools.product(self.after(first[:fork]), repeat=width - 1):
                    drawn = math.prod(self.probability(branch, fork) for branch in branches)
                    whole = self.probability(first) * chance * drawn
                    found.append((whole, Tree(first, fork, chance if forks else None, branches)))
        return found

    def state(self, step: Step) -> Said:
        """The state in which a step was sampled, from its prompt."""
        said = [int(one) - 3 for before, one in itertools.pairwise(step.prompt_ids) if before in (1, 7)]
        return tuple(said)

    def scores(self, batch: FlatBatch) -> Vector:
        """The score [S, D] of each trained step's first token."""
        table = {key: self.score(key[:-1], key[-1]) for key in self._steps}
        keys = [(*self.state(step), int(step.completion_ids[0]) - 3) for step in batch.steps]
        return np.array([table[key] for key in keys]).reshape(len(keys), len(self.states) * len(REPLIES))

    def groups(self, size: int, start: Said = ()) -> list[tuple[float, tuple[Said, ...]]]:
        """All groups of independent attempts from a state on, each with its probability."""
        chosen = itertools.product(self.after(start), repeat=size)
        return [(math.prod(self.probability(attempt, len(start)) for attempt in each), each) for each in chosen]

    def sample(self, place: int, attempt: int, given: Said = ()) -> Said:
        """Sample an attempt after these replies, with the draws of its address."""
        said, over = given, False
        while not over:
            seed = call_seed(0, Stream.TRAIN, 0, place, attempt, len(said))
            draw = float(token_uniforms(np.array([seed], np.uint64), 0)[0])
            reply = int(np.searchsorted(np.cumsum(self.policy[said])[:2], draw, side="right"))
            said, over = (*said, reply), self._ends(said, reply)
        return said


def _tokens(reply: int) -> list[int]:
    return [3 + reply] + [6] * (LENGTHS[reply] - 1)


@cache
def worlds() -> dict[int, World]:
    """By their number of turns."""
    two = World(
        2,
        (1, 2),
        {(): (0.4, 0.25, 0.35), (1,): (0.6, 0.3, 0.1), (2,): (0.3, 0.25, 0.45)},
        {(): (0.25, 0.0, 0.25), (1,): (2.0, 0.5, 1.5), (2,): (0.0, 1.0, 0.25)},
    )
    three = World(
        3,
        (2,),
        {(): (0.15, 0.25, 0.6), (2,): (0.3, 0.2, 0.5), (2, 2): (0.5, 0.4, 0.1)},
        {(): (0.5, 0.0, 0.0), (2,): (1.0, 0.25, 0.5), (2, 2): (2.0, 0.0, 0.5)},
    )
    return {2: two, 3: three}


def by_group(world: World, batch: FlatBatch, advantage: Vector, size: int) -> Vector:
    """The gradient [G, D] of each group's loss, its tokens summed and divided by its `size` attempts.

    advantage [N].
    """
    first = batch.step_start[:-1]
    gradient = np.zeros((len(batch.groups), len(world.states) * len(REPLIES)))
    np.add.at(gradient, batch.group_id[first], (advantage[first] / size)[:, None] * world.scores(batch))
    return gradient


def angle(one: Vector, other: Vector) -> float:
    """The angle between two gradients, in degrees."""
    cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    return math.degrees(math.acos(min(cosine, 1.0)))
