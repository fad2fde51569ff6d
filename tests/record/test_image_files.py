"""Images on disk: once by content, proven by their names, back in memory as they were."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seeing import picture
from tests.worlds import make_group, make_step, user
from treadle.core.errors import DamageError, DataError
from treadle.core.images import PLACE, PromptImage
from treadle.core.types import Group, Message, ModelCall, Status, Step, Task, Trajectory
from treadle.record.image_files import name_of, referred, resolved
from treadle.record.ledger import Ledger
from treadle.record.recorded import RecordedTrajectory
from treadle.record.rollout_store import read_calls, read_shard, read_steps, task_of, write_shard
from treadle.record.trajectory_files import read_files, write_trajectories
from treadle.rendering.texts import TokenTexts

PLACEHOLDER = 9


def shown(*seeds: int) -> Step:
    """A step whose prompt shows pictures of three placeholders each, by their seeds."""
    images = []
    for number, seed in enumerate(seeds):
        url = picture(seed, (4, 4)).url
        made = PromptImage(name_of(url)[:64], f"p{seed}", "s", PLACEHOLDER, 3, 1 + 4 * number, 3, (1, 1, 3), url)
        images.append(made)
    return replace(
        make_step(prompt=[1, *[PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 2] * len(seeds)]), images=tuple(images)
    )


def attempt(number: int, steps: Sequence[Step]) -> Trajectory:
    return Trajectory(f"g000000.{number}", "t0", number, tuple(steps), 1.0, Status.DONE)


def group_of(*attempts: Sequence[Step]) -> Group:
    message = Message(role="user", content=f"See {PLACE}", images=[picture(9, (4, 4)).url])
    made = make_group(0, *(attempt(number, steps) for number, steps in enumerate(attempts)))
    return replace(made, task=Task("t0", (message,)))


def folders(path: Path) -> Path:
    (path / "rollouts").mkdir()
    return path / "rollouts"


def facts(step: Step) -> tuple[object, ...]:
    return step.prompt_ids.tolist(), step.images, step.calls, step.chat


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=20)
def test_shards_give_back_the_images(tmp_path_factory: pytest.TempPathFactory, seeds: list[list[int]]) -> None:
    rollouts = folders(tmp_path_factory.mktemp("run"))
    steps = [shown(*each) for each in seeds]
    shard = write_shard(rollouts, "train", [group_of(steps)])
    assert list(map(facts, read_steps(rollouts, shard, "g000000.0"))) == list(map(facts, steps))
    assert list(map(facts, read_shard(rollouts, shard)["g000000.0"])) == list(map(facts, steps))
    different = {seed for each in seeds for seed in each} | {9}
    assert len(list((rollouts.parent / "images").iterdir())) == len(different)
    assert b"base64" not in (rollouts / shard.name).read_bytes()


def test_calls_of_other_pictures_share_nothing_from_these_on(tmp_path: Path) -> None:
    rollouts = folders(tmp_path)
    shard = write_shard(rollouts, "train", [group_of([shown(1), shown(1, 2), shown(3)])])
    first, second, third = (call.call.token_ids for call in read_calls(rollouts, shard)["g000000.0"])
    assert first[:5].tolist() == second[:5].tolist()
    assert third[0] == first[0]
    assert not np.isin(third[1:4], second).any()


def test_the_ledger_names_files(tmp_path: Path) -> None:
    rollouts, group = folders(tmp_path), group_of([shown(1)])
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.record([group], "train", 0, write_shard(rollouts, "train", [group]))
        [row] = ledger.query("SELECT task FROM groups")
    assert "base64" not in row["task"]
    assert task_of(row["task"], rollouts) == group.task


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    rollouts = folders(tmp_path)
    shard = write_shard(rollouts, "train", [group_of([shown(17)])])
    file = tmp_path / "images" / name_of(picture(17, (4, 4)).url)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamageError, match=f"{file.name}.*restore it from a copy"):
        read_steps(rollouts, shard, "g000000.0")


def test_texts_of_other_models_keep_their_images(tmp_path: Path) -> None:
    message = Message(role="user", content=PLACE, images=[picture(5, (4, 4)).url])
    call = ModelCall("judge", (message,), Message(role="assistant", content="a"), 3, 1, 0.0, 0.0)
    step = replace(make_step(), calls=(call,), chat=call)
    rollouts = folders(tmp_path)
    shard = write_shard(rollouts, "train", [group_of([step])])
    assert facts(read_steps(rollouts, shard, "g000000.0")[0]) == facts(step)
    assert b"base64" not in (rollouts / shard.name).read_bytes()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_exports_have_the_images(tmp_path: Path, form: str) -> None:
    group = group_of([shown(1), shown(1, 2)])
    recorded = RecordedTrajectory("run", "train", "g000000", group.task, group.trajectories[0], "v")
    path = tmp_path / f"traces.{form}"
    write_trajectories(path, form, [recorded], TokenTexts(None))
    [back] = read_files(path)
    assert isinstance(back, RecordedTrajectory)
    assert back.task == group.task
    assert list(map(facts, back.trajectory.steps)) == list(map(facts, group.trajectories[0].steps))
    names = {name_of(picture(seed, (4, 4)).url) for seed in (1, 2, 9)}
    if form == "jsonl":
        assert {file.name for file in (tmp_path / "traces-images").iterdir()} == names
        [message] = [m for m in json.loads(path.read_text())["messages"] if m.get("images")]
        assert (message["content"].count(PLACE), message["images"]) == (
            2,
            [name_of(picture(1, (4, 4)).url), *message["images"][1:]],
        )
    else:
        assert not (tmp_path / "traces-images").exists()
        files = dict(pq.read_table(path)["image_files"].to_pylist()[0])
        assert files[name_of(picture(2, (4, 4)).url)] == picture(2, (4, 4)).data


def test_an_export_without_its_files_says_so(tmp_path: Path) -> None:
    group = group_of([shown(31)])
    recorded = RecordedTrajectory("run", "train", "g000000", group.task, group.trajectories[0], "v")
    write_trajectories(tmp_path / "traces.jsonl", "jsonl", [recorded], TokenTexts(None))
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "traces.jsonl").read_bytes())
    with pytest.raises((DamageError, DataError), match="moved-images"):
        list(read_files(tmp_path / "moved.jsonl"))


def test_only_images_of_messages_become_names() -> None:
    url = picture(1, (4, 4)).url
    data = {"content": url, "images": [url, "x"], "extras": {"images": "plain", "more": [{"images": [url]}]}}
    name = name_of(url)
    changed = {"content": url, "images": [name, "x"], "extras": {"images": "plain", "more": [{"images": [name]}]}}
    assert referred(data, name_of) == changed
    assert resolved(changed, {name: url}.__getitem__) == data
    assert referred([user("?")], name_of) == [user("?")]
