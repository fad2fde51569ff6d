"""A long walk: eighteen rooms and more, and a reward only if the right thing was taken in every one of them.

Each room has a city's name, which says what to take there (a food, a hobby or a product), and shows one of each in any
order. One episode:

    system     Search, then answer.
    user       Read 18 pages.
    user       page Rome rice golf lamps
    assistant   golf
    user       page Oslo tents soup yoga
    assistant   soup
    ...

What to take in which city is the same in all quests (`RULE`), and each quest goes through all twelve cities, through
some of them twice. The reward is 1 after the last room if every reply was right, and 0 otherwise; nothing before that
shows whether one was. In most cities (`UNKNOWN`) demonstrations take the right thing only somewhat more often than any
other, so that a model that has learned them never solves a quest (docs/starts.md).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.lookup import CITIES, FOODS, HOBBIES, PRODUCTS, SYSTEM
from treadle.envs.tasks import check_share, opening, split_key

ROOMS = (18, 19, 20)
KINDS: Mapping[str, tuple[str, ...]] = {"food": FOODS[:4], "hobby": HOBBIES[:4], "product": PRODUCTS[:4]}
"""Few things of each kind, so that what is right in one room is wrong in another of the same quest."""
RULE: Mapping[str, str] = {city: tuple(KINDS)[number % len(KINDS)] for number, city in enumerate(CITIES[:12])}
"""City -> kind of the thing to take there."""
UNKNOWN = tuple(RULE)[:8]
"""Cities in which demonstrations take the right thing only somewhat more often than any other."""

Room = tuple[str, tuple[str, ...]]
"""City, and the things in it in the order shown."""


def rooms_of(seed: str, count: int) -> list[Room]:
    """Return the rooms of a quest: each city at least once, in drawn order, with freshly drawn things."""
    draws = random.Random(f"quest/rooms/{seed}")
    cities = draws.sample([*RULE, *draws.sample(list(RULE), count - len(RULE))], count)
    rooms = []
    for city in cities:
        things = [draws.choice(names) for names in KINDS.values()]
        draws.shuffle(things)
        rooms.append((city, tuple(things)))
    return rooms


def right_thing(room: Room) -> str:
    return next(thing for thing in room[1] if thing in KINDS[RULE[room[0]]])


class Quest(Environment):
    """Shows a room for each reply, and rewards the quest after its last one. Needs a task of `tasks`."""

    metrics = (Metric("rooms_right", "trajectory", "mean", "rooms", "rooms in which the right thing was taken"),)

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.replies, self.right = task, 0, 0
        if not isinstance(task.extras.get("seed"), str) or not isinstance(task.extras.get("rooms"), int):
            raise DataError(f"task {task.task_id} of environment quest needs seed and rooms in extras, see `tasks`")
        self.rooms = rooms_of(task.extras["seed"], task.extras["rooms"])
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        is_right = text.strip() == right_thing(self.rooms[self.replies])
        self.replies, self.right = self.replies + 1, self.right + is_right
        info = {"rooms_right": int(is_right)}
        if self.replies == len(self.rooms):
            return EnvStep(reward=float(self.right == len(self.rooms)), done=True, info=info)
        return EnvStep([_shown(self.rooms[self.replies])], info=info)


def tasks(split: str, count: int, seed: int = 0, rooms: Sequence[int] = ROOMS) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i has `rooms[i % len(rooms)]` rooms.

    Held-out tasks ignore `seed`. For example, task 0 of `tasks("train", 3)`:

        Task("quest-train-0-000000", prompt=(<system>, <user>, <user>), environment="quest",
             extras={"seed": "train/0/0", "rooms": 18})

    Raises DataError for another split, ConfigError for an impossible `count` or `rooms`.
    """
    key, rooms = split_key(split, count, seed), _check_rooms(rooms)
    made = []
    for index in range(count):
        number = rooms[index % len(rooms)]
        extras: dict[str, Any] = {"seed": f"{key}/{index}", "rooms": number}
        prompt = (*_opening(number), _shown(rooms_of(extras["seed"], number)[0]))
        made.append(Task(f"quest-{key.replace('/', '-')}-{index:06d}", prompt, "quest", None, extras))
    return made


def demonstration(index: int, seed: int, expert: float = 0.2, rooms: Sequence[int] = ROOMS) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are the training targets.

    Most show only the beginning of a quest. In the cities `UNKNOWN` the right thing is taken in a share `expert` of the
    rooms, and anything in the others. Raises ConfigError if the share lies outside [0, 1], or for impossible `rooms`.
    """
    check_share("expert", expert)
    draws = random.Random(f"quest/demonstration/{seed}/{index}")
    number = draws.choice(_check_rooms(rooms))
    shown = draws.choice((2, 3, 4, number))
    messages: list[Message] = [*_opening(number)]
    for room in rooms_of(f"demonstration/{seed}/{index}", number)[:shown]:
        is_known = room[0] not in UNKNOWN or draws.random() < expert
        taken = right_thing(room) if is_known else draws.choice(room[1])
        messages += [_shown(room), Message(role="assistant", content=f" {taken}")]
    return tuple(messages)


def solved(task: Task) -> tuple[Message, ...]:
    """Return the conversation of an attempt that takes the right thing in every room, for `rollout.starts.source`."""
    messages: list[Message] = [*task.prompt[:-1]]
    for room in rooms_of(task.extras["seed"], task.extras["rooms"]):
        messages += [_shown(room), Message(role="assistant", content=f" {right_thing(room)}")]
    return tuple(messages)


def _shown(room: Room) -> Message:
    return Message(role="user", content=f"page {room[0]} {' '.join(room[1])}")


def _opening(rooms: int) -> tuple[Message, Message]:
    return opening(SYSTEM, f"Read {rooms} pages.")


def _check_rooms(rooms: Sequence[int]) -> tuple[int, ...]:
    allowed = range(len(RULE), 2 * len(RULE) + 1)
    if not isinstance(rooms, Sequence) or not rooms or any(number not in allowed for number in rooms):
        raise ConfigError(f"rooms must be a list out of {allowed[0]} to {allowed[-1]}; got {rooms!r}")
    return tuple(rooms)
