"""Rooms that must be looked at: an agent that sees (docs/images.md).

Each room has a color's name, and a picture of 16x16 pixels in it: a shape, in the color of the room to go to next. One
episode (a picture is in brackets):

    system     Look, then answer.
    user       Start red. See 3 rooms.
    assistant  <look> red</look>
    tool       [a blue ring]
    assistant  <look> blue</look>
    tool       [a pink cross]
    assistant  <look> pink</look>
    tool       [a red square]
    assistant  <answer> ring cross square</answer>

Colors say where to look next, so that the way is only known to an agent that sees; shapes must be remembered until the
end. The reward is 1 for all shapes in the order of the way, once all its rooms were looked at, and 0 otherwise. Without
pixels, the best policy guesses each shape, 1 in 16 for two rooms, and looks at as many rooms as it may.

Every picture is drawn anew, at a drawn place, with drawn brightness and noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import PLACE, read_image
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import INTRODUCTION, Environment, EnvStep
from treadle.envs.tasks import check_positive, check_share, contents, exchange, is_drill, opening, split_key

SYSTEM = "Look, then answer."
EXPLAINED = (
    "There are six rooms: red, green, blue, yellow, pink and cyan. Each has a picture of one shape: a square, a ring, "
    "a plus or a cross. The color of the shape is the name of the room to go to next. To see the picture of a room, "
    "reply <look> red</look> and nothing else. When you have seen as many rooms as asked for, reply with their shapes "
    "in the order seen, as in <answer> ring cross</answer>."
)
"""System prompt for models that know language."""
ROOMS = (2, 3)
SIDE = 16
PROMPT = "What is seen?"
"""Request for a summary in demonstrations: `rollout.compaction.prompt` must be the same."""
SUMMARIZED = 2
"""Looks before the first summary in demonstrations; later ones come after each look (`rollout.compaction.at`)."""
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "pink": (255, 0, 255),
    "cyan": (0, 255, 255),
}
"""Names of rooms, and of what their pictures show; RGB."""
SHAPES: Mapping[str, tuple[str, ...]] = {
    "square": ("########",) * 8,
    "ring": ("########", "########", *("##....##",) * 4, "########", "########"),
    "plus": (*("...##...",) * 3, "########", "########", *("...##...",) * 3),
    "cross": ("##....##", "###..###", ".######.", "..####..", "..####..", ".######.", "###..###", "##....##"),
}
NEAREST, FARTHEST = 3, 5
"""Pixels above a shape, and left of it, at least and at most."""
_LOOK = re.compile(r"\s*<look>\s*(\w+)\s*</look>\s*")
_ANSWER = re.compile(r"\s*<answer>([^<]*)</answer>\s*")
_FOLLOWS = 0.1  # share of looks in demonstrations that go where the last picture points

Shown = tuple[str, str]
"""Color and shape in a picture."""
Pixels = NDArray[np.uint8]


def pictures_of(seed: str) -> dict[str, Shown]:
    """Return what each room's picture shows, by the room's name: never the room's own color."""
    draws = random.Random(f"look/rooms/{seed}")
    return {room: (draws.choice([c for c in COLORS if c != room]), draws.choice(list(SHAPES))) for room in COLORS}


def draw(seed: str, shown: Shown) -> Pixels:
    """Draw a picture, uint8[16, 16, 3]: the shape on a dark ground, place, brightness and noise by `seed`."""
    draws = np.random.default_rng(list(f"look/{seed}".encode()))
    down, right = draws.integers(NEAREST, FARTHEST + 1, 2)
    mask = np.zeros((SIDE, SIDE, 1))
    mask[down : down + 8, right : right + 8, 0] = [[cell == "#" for cell in line] for line in SHAPES[shown[1]]]
    ground = np.full(3, draws.uniform(0, 64))
    pixels = mask * np.array(COLORS[shown[0]]) * draws.uniform(0.7, 1.0) + (1 - mask) * ground
    noisy: Pixels = np.clip(pixels + draws.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
    return noisy


@functools.lru_cache(maxsize=4096)
def picture(seed: str, shown: Shown, blind: bool = False, scale: int = 1) -> str:
    """Return a picture as a data URL. blind: all pixels 0. scale: width and height of a pixel in the image."""
    pixels = draw(seed, shown).repeat(scale, 0).repeat(scale, 1)
    return read_image(pixels * 0 if blind else pixels).url


def way(task: Task) -> list[str]:
    """Return the rooms to look at, in order."""
    pictures, rooms = pictures_of(task.extras["seed"]), [task.extras["start"]]
    while len(rooms) < task.extras["rooms"]:
        rooms.append(pictures[rooms[-1]][0])
    return rooms


class Look(Environment):
    """Shows the picture of a room for `<look> ROOM</look>`; `<answer> SHAPES</answer>` ends the episode.

    Needs a task of `tasks`. Any other reply ends the episode as well. The last step's `info["ended"]` is `right`,
    `wrong` or `format`. blind: all pixels are 0. scale: images are so many times as large; raises ConfigError below 1.
    """

    metrics = (
        Metric("looks", "trajectory", "mean", "looks", "pictures looked at"),
        Metric("invalid", "trajectory", "mean", "share", "ended by a reply that is neither look nor answer"),
    )

    def __init__(self, blind: bool = False, scale: int = 1) -> None:
        check_positive("scale", scale, whole=True)
        self.blind, self.scale = blind, scale

    async def reset(self, task: Task) -> Sequence[Message]:
        needs = {"seed": str, "start": str, "rooms": int}
        if wrong := [key for key, kind in needs.items() if not isinstance(task.extras.get(key), kind)]:
            raise DataError(f"task {task.task_id} of environment look needs {', '.join(wrong)} in extras, see `tasks`")
        self.task, self.pictures = task, pictures_of(task.extras["seed"])
        self.unseen = set(way(task))
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        if (look := _LOOK.fullmatch(text)) and look[1] in self.pictures:
            shown = _shown(f"{self.task.extras['seed']}/{look[1]}", self.pictures[look[1]], self.blind, self.scale)
            self.unseen.discard(look[1])
            return EnvStep([shown], info={"looks": 1, "invalid": False})
        answer, how = _ANSWER.fullmatch(text), "format"
        if answer is not None:
            how = "right" if answer[1].strip() == self.task.ground_truth and not self.unseen else "wrong"
        info = {"ended": how, "looks": 0, "invalid": how == "format"}
        return EnvStep(reward=float(how == "right"), done=True, info=info)


def tasks(split: str, count: int, seed: int = 0, rooms: Sequence[int] = ROOMS, explain: bool = False) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i has `rooms[i % len(rooms)]` rooms.

    Held-out tasks ignore `seed`. explain: describe the world in the system prompt. For example, task 0 of
    `tasks("train", 3)`:

        Task("look-train-0-000000", prompt=(<system>, <user>), environment="look", ground_truth="ring cross",
             extras={"seed": "train/0/0", "start": "red", "rooms": 2})

    Raises DataError for another split, ConfigError for an impossible `count` or `rooms`.
    """
    key, rooms = split_key(split, count, seed), _check_rooms(rooms)
    made = []
    for index in range(count):
        of_task, number = f"{key}/{index}", rooms[index % len(rooms)]
        start = random.Random(f"look/task/{of_task}").choice(list(COLORS))
        extras: dict[str, Any] = {"seed": of_task, "start": start, "rooms": number}
        task = Task(f"look-{key.replace('/', '-')}-{index:06d}", _opening(start, number, explain), "look", None, extras)
        shapes = " ".join(pictures_of(of_task)[room][1] for room in way(task))
        made.append(dataclasses.replace(task, ground_truth=shapes))
    return made


def demonstration(
    index: int,
    seed: int,
    expert: float = 0.0,
    drill: float = 0.5,
    rooms: Sequence[int] = ROOMS,
    summaries: bool = False,
    blind: bool = False,
) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are the training targets.

    A share `drill` are drills, a stand-in for pretraining: pictures, and questions for the color or the shape in them.
    The others are episodes of as many looks as asked for, a share `expert` of them right. Of the rest, 1 in 10 further
    looks go where the last picture points, the others anywhere; their answers name the shapes seen, in any order.

    summaries: show one segment of an episode with `rollout.compaction`; its summaries describe all pictures seen, in
    order. blind: all pixels are 0, in the environment as well.

    Raises ConfigError for a share outside [0, 1], or impossible `rooms`.
    """
    check_share("expert", expert)
    rooms = _check_rooms(rooms)
    key, draws = f"demonstration/{seed}/{index}", random.Random(f"look/demonstration/{seed}/{index}")
    if is_drill(index, drill):
        return _drill(key, draws, blind)
    pictures, start, number = pictures_of(key), draws.choice(list(COLORS)), draws.choice(rooms)
    is_expert = draws.random() < expert
    seen = [start]
    for _ in range(number - 1):
        follows = is_expert or draws.random() < _FOLLOWS
        seen.append(pictures[seen[-1]][0] if follows else draws.choice(list(COLORS)))
    shown = [pictures[room] for room in seen]
    named = shown if is_expert else draws.sample(shown, len(shown))
    answer = Message(role="assistant", content=f"<answer> {' '.join(shape for _, shape in named)}</answer>")
    first, last = 0, len(seen)  # looks of the segment
    messages = [*_opening(start, number)]
    if summaries:
        first = draws.choice((0, *range(SUMMARIZED, len(seen) + 1)))
        last = min(max(first + 1, SUMMARIZED), last)
        summary = INTRODUCTION + described(shown[:first]).strip()
        messages += [Message(role="user", content=summary)] if first else []
    for room in seen[first:last]:
        messages.append(Message(role="assistant", content=f"<look> {room}</look>"))
        messages.append(_shown(f"{key}/{room}", pictures[room], blind))
    if summaries and first < len(seen):
        return (*messages, *exchange(PROMPT, described(shown[:last])))
    return (*messages, answer)


def described(shown: Sequence[Shown]) -> str:
    """Return a summary of pictures: ` blue ring, pink cross`."""
    return ",".join(f" {color} {shape}" for color, shape in shown)


def _drill(key: str, draws: random.Random, blind: bool) -> tuple[Message, ...]:
    """Return three pictures, two questions about each: `[a blue ring]What color?` -> ` blue`, `What shape?` ..."""
    messages: list[Message] = []
    for room, (color, shape) in draws.sample(list(pictures_of(key).items()), 3):
        image = _shown(f"{key}/{room}", (color, shape), blind)
        asked = draws.sample([("color", color), ("shape", shape)], 2)
        first, *rest = (exchange(f"What {kind}?", f" {value}") for kind, value in asked)
        messages.append(Message(role="user", content=PLACE + first[0]["content"], images=image["images"]))
        messages += [first[1], *itertools.chain(*rest)]
    return tuple(messages)


def corpus(count: int) -> Iterator[str]:
    """Yield the contents of `count` demonstrations for training a tokenizer. Fixed: word ids depend on it."""
    made = (demonstration(index, 0, summaries=bool(index % 4 // 2)) for index in range(count))
    # Of a word there is one token, with a space before it, also where a summary begins with it.
    yield from (text.replace(PLACE, "").replace(INTRODUCTION, f"{INTRODUCTION} ") for text in contents(made))


def _shown(seed: str, shown: Shown, blind: bool, scale: int = 1) -> Message:
    return Message(role="tool", content=PLACE, images=[picture(seed, shown, blind, scale)])


def _opening(start: str, rooms: int, explain: bool = False) -> tuple[Message, Message]:
    return opening(EXPLAINED if explain else SYSTEM, f"Start {start}. See {rooms} rooms.")


def _check_rooms(rooms: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(rooms, Sequence) or not rooms or any(number not in (1, 2, 3) for number in rooms):
        raise ConfigError(f"rooms must be a list out of 1, 2, 3; got {rooms!r}")
    return tuple(rooms)
