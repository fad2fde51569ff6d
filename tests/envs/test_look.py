"""`look`: its tasks, its pictures, what solves it, what does not, and what its demonstrations show."""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL")

from tests.envs.kit import play
from treadle.core.errors import ConfigError, DataError
from treadle.core.images import PLACE, picture_of
from treadle.core.types import Message, Task, as_messages
from treadle.envs.base import INTRODUCTION
from treadle.envs.look import (
    COLORS,
    FARTHEST,
    NEAREST,
    PROMPT,
    SHAPES,
    Look,
    Pixels,
    demonstration,
    draw,
    pictures_of,
    tasks,
    way,
)
from treadle.models.chat import load_chat
from treadle.plan.config import load_recipe
from treadle.training.demonstrations import demonstrated_calls

RECIPE = load_recipe("look-small")


def solve(task: Task) -> list[str]:
    return [*(f"<look> {room}</look>" for room in way(task)), f"<answer> {task.ground_truth}</answer>"]


def answer(shapes: Sequence[str]) -> str:
    return f"<answer> {' '.join(shapes)}</answer>"


def test_only_all_shapes_in_the_order_of_the_way_are_rewarded() -> None:
    for task in tasks("train", 40):
        *looks, end = play(Look(), task, *solve(task))
        *seen, right = solve(task)
        assert not any(step.done or step.reward for step in looks) and (end.reward, end.done) == (1.0, True)
        assert end.info == {"ended": "right", "looks": 0, "invalid": False}
        shapes = str(task.ground_truth).split()
        assert len(shapes) == len(looks) == task.extras["rooms"]
        for other in itertools.product(SHAPES, repeat=len(shapes)):
            step = play(Look(), task, *seen, answer(other))[-1]
            assert step.reward == (list(other) == shapes) and step.done
        for short in (shapes[:-1], [*shapes, shapes[0]]):
            assert play(Look(), task, *seen, answer(short))[-1].reward == 0.0
        guessed = play(Look(), task, *seen[:-1], right)[-1]
        assert (guessed.reward, guessed.info["ended"]) == (0.0, "wrong") or len(set(seen)) < len(seen)
    for reply in ("ring", "<look> home</look>", "I <look> red</look>"):
        step = play(Look(), task, reply)[-1]
        assert (step.reward, step.done, step.info["ended"]) == (0.0, True, "format")
    with pytest.raises(DataError, match="needs seed, rooms in extras"):
        play(Look(), Task("t", environment="look", extras={"start": "red"}), "a")


def test_the_way_follows_the_colors() -> None:
    for task in tasks("held_out", 40):
        pictures = pictures_of(task.extras["seed"])
        rooms = [task.extras["start"]]
        for _ in range(task.extras["rooms"] - 1):
            rooms.append(pictures[rooms[-1]][0])
        assert way(task) == rooms
        assert all(color != room for room, (color, _) in pictures.items())
        assert task.ground_truth == " ".join(pictures[room][1] for room in rooms)


def test_a_look_shows_the_room_and_the_same_each_time() -> None:
    task = tasks("train", 1)[0]
    shown = [
        step.observations[0] for step in play(Look(), task, *[f"<look> {room}</look>" for room in (*COLORS, "red")])
    ]
    assert shown[0] == shown[-1] and len({message["images"][0] for message in shown}) == len(COLORS)
    pictures = pictures_of(task.extras["seed"])
    for room, message in zip(COLORS, shown, strict=False):
        assert (message["role"], message["content"]) == ("tool", PLACE)
        assert as_messages([message], "observation") == (message,)
        pixels = picture_of(message["images"][0]).pixels
        assert np.array_equal(pixels, draw(f"{task.extras['seed']}/{room}", pictures[room]))
        assert _seen(pixels) == pictures[room]


def _seen(pixels: Pixels) -> tuple[str, str]:
    """Read color and shape of a picture."""
    return _read(pixels)[:2]


def _read(pixels: Pixels) -> tuple[str, str, tuple[int, int]]:
    """Read color, shape and place of a picture, by comparing it with every shape at every place."""
    lit = pixels.max(2) > 120
    every, masks = _masks()
    shape, place = every[int((masks != lit).sum((1, 2)).argmin())]
    channels = pixels[lit].mean(0) > 100
    return next(name for name, rgb in COLORS.items() if list(channels) == [c > 0 for c in rgb]), shape, place


@functools.cache
def _masks() -> tuple[list[tuple[str, tuple[int, int]]], NDArray[np.bool_]]:
    """Return every shape at every place, and the pixels of each that are lit, [shapes x places, 16, 16]."""
    every = list(itertools.product(SHAPES, itertools.product(range(9), range(9))))
    masks = np.zeros((len(every), 16, 16), bool)
    for mask, (shape, (y, x)) in zip(masks, every, strict=True):
        mask[y : y + 8, x : x + 8] = [[cell == "#" for cell in line] for line in SHAPES[shape]]
    return every, masks


def test_shapes_are_at_every_place_and_no_two_pictures_are_alike() -> None:
    seeds = [f"{split}/{number}" for split in ("train", "held_out") for number in range(200)]
    drawn = {draw(seed, ("yellow", "ring")).tobytes() for seed in seeds}
    assert len(drawn) == len(seeds)
    every = set(itertools.product(range(NEAREST, FARTHEST + 1), repeat=2))
    for split in (seeds[:200], seeds[200:]):
        assert {_read(draw(seed, ("yellow", "ring")))[2] for seed in split} == every


def test_scaled_pictures_show_the_same_in_larger_pixels() -> None:
    task = tasks("train", 1, explain=True)[0]
    one, four = (
        play(Look(scale=scale), task, "<look>red</look>\n")[0].observations[0]["images"][0] for scale in (1, 4)
    )
    assert np.array_equal(picture_of(four).pixels[::4, ::4], picture_of(one).pixels)
    assert picture_of(four).pixels.shape == (64, 64, 3)
    assert all(name in task.prompt[0]["content"] for name in (*COLORS, *SHAPES))
    with pytest.raises(ConfigError, match="scale must be a whole number above 0"):
        Look(scale=0)


def test_blind_pictures_are_black_and_tell_nothing() -> None:
    task = tasks("train", 1)[0]
    shown = play(Look(blind=True), task, *(f"<look> {room}</look>" for room in COLORS))
    assert len({step.observations[0]["images"][0] for step in shown}) == 1
    assert not picture_of(shown[0].observations[0]["images"][0]).pixels.any()
    # what is best without pixels: the most frequent answers of as many shapes
    answers = [Counter(task.ground_truth for task in tasks("held_out", 512)[first::2]) for first in (0, 1)]
    assert sum(answer.most_common(1)[0][1] for answer in answers) / 512 < 0.08


def test_tasks_differ_and_held_out_ones_ignore_the_seed() -> None:
    assert tasks("held_out", 9, seed=3) == tasks("held_out", 9)
    assert tasks("train", 9, seed=3) != tasks("train", 9)
    assert tasks("train", 9)[:4] == tasks("train", 4)
    made = [pictures_of(task.extras["seed"]) for task in (*tasks("train", 90), *tasks("held_out", 90))]
    assert len({str(pictures) for pictures in made}) == 180
    assert Counter(task.extras["rooms"] for task in tasks("train", 90)) == {2: 45, 3: 45}
    for rooms in ((), (4,), (0,), 2):
        with pytest.raises(ConfigError, match="rooms must be a list out of 1, 2, 3"):
            tasks("train", 1, rooms=rooms)  # type: ignore[arg-type]


def _played(messages: Sequence[Message]) -> tuple[bool, bool]:
    """Whether a demonstrated episode looks at the rooms of its way, and answers with their shapes."""
    start, rooms = messages[1]["content"].split()[1].rstrip("."), int(messages[1]["content"].split()[3])
    looked = [m["content"][7:-7] for m in messages if m["content"].startswith("<look>")]
    seen = [_seen(picture_of(m["images"][0]).pixels) for m in messages if m.get("images")]
    follows = looked == [start, *(color for color, _ in seen)][: len(looked)] and len(looked) == rooms
    return follows, messages[-1]["content"] == answer([shape for _, shape in seen])


def test_demonstrations_do_not_show_how_to_solve_it() -> None:
    episodes = [_played(demonstration(index, 0, drill=0.0)) for index in range(400)]
    assert 0.1 < sum(follows for follows, _ in episodes) / 400 < 0.22  # .25 for 2 rooms, .06 for 3
    assert 0.05 < sum(all(played) for played in episodes) / 400 < 0.2
    assert all(all(_played(demonstration(index, 0, expert=1.0, drill=0.0))) for index in range(50))
    with pytest.raises(ConfigError, match="expert is a share"):
        demonstration(0, 0, 2.0)


def test_drills_ask_for_what_is_in_their_pictures() -> None:
    for index in range(30):
        messages = demonstration(index, 0, drill=1.0)
        for question, reply in zip(messages[::2], messages[1::2], strict=True):
            if question.get("images"):
                seen = _seen(picture_of(question["images"][0]).pixels)
            asked = question["content"].removeprefix(PLACE)
            assert reply["content"] == f" {seen[['What color?', 'What shape?'].index(asked)]}"


def test_summaries_describe_the_pictures_seen() -> None:
    kinds: Counter[str] = Counter()
    for index in range(300):
        messages = demonstration(index, 0, drill=0.0, summaries=True)
        seen = [" ".join(_seen(picture_of(m["images"][0]).pixels)) for m in messages if m.get("images")]
        noted = messages[2]["content"].removeprefix(INTRODUCTION).split(", ")  # which a driver strips
        before = noted if messages[2]["content"].startswith(INTRODUCTION) else []
        if messages[-2]["content"] == PROMPT:
            assert sorted(messages[-1]["content"].strip().split(", ")) == sorted(before + seen)
        else:
            assert not seen and sorted(answer([note.split()[1] for note in before])) == sorted(messages[-1]["content"])
        kinds[f"{bool(before)} {messages[-2]['content'] == PROMPT}"] += 1
    assert set(kinds) == {"False True", "True True", "True False"} and min(kinds.values()) > 30


def test_the_recipe_reads_each_word_as_one_token_and_each_picture_as_four() -> None:
    renderer = load_chat(RECIPE.model, None)[1]
    for task in tasks("train", 6):
        messages: list[Message] = [*task.prompt]
        for reply, step in zip(solve(task), play(Look(), task, *solve(task)), strict=True):
            messages += [Message(role="assistant", content=reply), *as_messages(step.observations, "observation")]
        calls = demonstrated_calls(messages, renderer)
        assert [len(completion) for _, completion, *_ in calls[:-1]] == [4] * task.extras["rooms"]
        assert len(calls[-1][1]) == task.extras["rooms"] + 3 <= RECIPE.rollout.max_completion_tokens
        placeholder = RECIPE.model.build["image_token_id"] if RECIPE.model.build else -1
        assert [int((prompt == placeholder).sum()) for prompt, *_ in calls] == [4 * n for n in range(len(calls))]
        assert len(calls[-1][0]) + 20 <= RECIPE.rollout.max_input_tokens  # one look more
    calls = demonstrated_calls(demonstration(1, 0, drill=1.0), renderer)
    assert {len(completion) for _, completion, *_ in calls} == {2}
