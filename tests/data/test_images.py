"""Images in tasks: the same ones from every kind of storage, or a refusal that names the row; never all in memory."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.hostile_images import JPEG, LIMITS, PNG, REFUSED, color, encoded, turned, url
from treadle.core.config import build
from treadle.core.errors import DataError
from treadle.core.images import PLACE, ImageLimits, read_image
from treadle.core.types import Message, Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, load_tasks
from treadle.data.rows import Row
from treadle.data.tasks import LazyTasks, task_ids, tasks_sha256
from treadle.plan.config import RunConfig
from treadle.plan.inputs import load_split

OTHER = encoded(color().rotate(180), "PNG")


def load(source: Path, limits: ImageLimits | None = LIMITS) -> Any:
    section = SourceConfig(source=str(source))
    return load_tasks(section, "train", LoadContext(player=("agent", "a"), images=limits))


def row(*parts: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is "}, *parts]}]}


def jsonl(directory: Path, *rows: dict[str, Any]) -> Path:
    (directory / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return directory / "tasks.jsonl"


def parquet(directory: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), directory / "tasks.parquet")
    return directory / "tasks.parquet"


def saved(directory: Path, *rows: dict[str, Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(list(rows)).save_to_disk(directory / "saved")
    return directory / "saved"


def stored(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    """As the image feature of Hugging Face's data sets."""
    return {"type": "image", "image": {"bytes": data, "path": path}}


def by_path(directory: Path, data: bytes) -> dict[str, Any]:
    (directory / "pictures").mkdir(exist_ok=True)
    (directory / "pictures" / "1.png").write_bytes(data)
    return {"type": "image", "path": "pictures/1.png"}


WRITTEN: dict[str, tuple[Callable[..., Path], Callable[[Path, bytes], Any]]] = {
    "jsonl, data url": (jsonl, lambda _, data: {"type": "image", "image": url(data)}),
    "jsonl, openai's": (jsonl, lambda _, data: {"type": "image_url", "image_url": {"url": url(data)}}),
    "jsonl, path": (jsonl, by_path),
    "jsonl, whole path": (jsonl, lambda at, data: {**by_path(at, data), "path": str(at / "pictures" / "1.png")}),
    "parquet, bytes": (parquet, lambda _, data: stored(data)),
    "parquet, bytes and a name": (parquet, lambda _, data: stored(data, "elsewhere.png")),
    "parquet, path": (parquet, lambda at, data: stored(None, by_path(at, data)["path"])),
    "parquet, data url": (parquet, lambda _, data: {"type": "image", "image": url(data)}),
    "parquet, openai's": (parquet, lambda _, data: {"type": "image_url", "image_url": {"url": url(data)}}),
    "data set": (saved, lambda _, data: stored(data)),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("data", [PNG, JPEG, turned(6)], ids=["png", "jpeg", "turned"])
def test_a_prompt_has_the_image(name: str, data: bytes, tmp_path: Path) -> None:
    write, part = WRITTEN[name]
    [task] = load(write(tmp_path, row(part(tmp_path, data))))
    assert task.prompt == (Message(role="user", content=f"What is {PLACE}", images=[read_image(data).url]),)


def test_rows_of_python_have_images_of_python(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    context = LoadContext(player=("agent", "a"))
    for image in (PNG, url(PNG), tmp_path / "cat.png"):
        task = context.task(Row(row({"type": "image", "image": image}), "tasks[0]", "t"), SourceConfig(source="x"))
        assert task.prompt[0]["images"] == [url(PNG)]
    task = Task("t", row({"type": "image", "image": color()})["prompt"])
    assert (read_image(task.prompt[0]["images"][0]).pixels == read_image(color()).pixels).all()


def test_messages_as_treadle_writes_them_are_read() -> None:
    message = {"role": "user", "content": f"{PLACE} or {PLACE}", "images": [url(PNG), url(OTHER)]}
    task = LoadContext().task(Row(json.dumps({"prompt": [message]}).encode(), "line 1", "t"), SourceConfig(source="x"))
    assert task.prompt == (message,)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_image_is_refused_by_row(name: str, tmp_path: Path) -> None:
    source, reason = REFUSED[name]
    written = [LoadContext(images=LIMITS).task]
    rows = [row({"type": "image", "image": source})]
    for image in rows:
        with pytest.raises(DataError, match=rf"^here: prompt: message 0: image 0.*({reason})") as caught:
            written[0](Row(image, "here", "t"), SourceConfig(source="x"))
        assert len(str(caught.value)) < 400
    files = []
    if isinstance(source, str | int):
        files.append(jsonl(tmp_path, row(), row({"type": "image", "image": source})))
    if isinstance(source, bytes):
        files.append(parquet(tmp_path, row(stored(PNG)), row(stored(source))))
        (tmp_path / "cat.png").write_bytes(source)
        files.append(jsonl(tmp_path, row(), row({"type": "image", "path": "cat.png"})))
    for file in files:
        with pytest.raises(DataError, match=rf"(row 1|:2)\b.*image 0.*({reason})") as caught:
            load(file)
        assert len(str(caught.value)) < 400 + len(str(tmp_path)) * 2


@pytest.mark.parametrize("path", ["pictures/2.png", "../nothing.png", "/dev/zero", "pictures", ""])
def test_a_path_that_is_no_file_is_refused(path: str, tmp_path: Path) -> None:
    by_path(tmp_path, PNG)
    with pytest.raises(DataError, match=r"tasks.jsonl:1: prompt: message 0: image 0: '.*' is not a file"):
        load(jsonl(tmp_path, row({"type": "image", "path": path})))


def test_a_path_that_is_no_text_or_of_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the image's path 7 must be text"):
        load(jsonl(tmp_path, row({"type": "image", "path": 7})))
    with pytest.raises(DataError, match=r"'1.png' must be text, in a row of a file"):
        LoadContext().task(Row(row({"type": "image", "path": "1.png"}), "here", "t"), SourceConfig(source="x"))


def test_limits_are_the_recipes(tmp_path: Path) -> None:
    """Also above the usual ones."""
    file = jsonl(tmp_path, row({"type": "image", "image": url(PNG)}))
    with pytest.raises(DataError, match="9x6 pixels, more than 53; scale it down"):
        load(file, ImageLimits(pixels=53))
    large = encoded(Image.new("1", (6000, 6000)), "PNG")
    over = jsonl(tmp_path, row({"type": "image", "image": url(large)}))
    with pytest.raises(DataError, match="6000x6000 pixels, more than 33554432"):
        load(over, None)
    [task] = load(over, ImageLimits(pixels=6000 * 6000))
    assert task.prompt[0]["images"] == [url(large)]


def test_tasks_with_images_are_made_on_demand(tmp_path: Path) -> None:
    """Memory has their rows; what they are, their ids and their digest do not depend on that."""
    rows = [row(), row(by_path(tmp_path, PNG)), row({"type": "image", "image": url(JPEG)})]
    tasks = load(jsonl(tmp_path, *rows))
    assert isinstance(tasks, LazyTasks)
    assert [task.task_id for task in tasks] == list(task_ids(tasks)) == [f"tasks-{n:06d}" for n in (1, 2, 3)]
    assert tasks_sha256(tasks) == tasks_sha256(list(tasks))
    assert [len(task.prompt[0].get("images", ())) for task in tasks] == [0, 1, 1]
    before = tasks_sha256(tasks)
    by_path(tmp_path, OTHER)
    assert tasks_sha256(load(tmp_path / "tasks.jsonl")) != before
    assert not isinstance(load(jsonl(tmp_path, row())), LazyTasks)


def test_a_recipe_has_the_limits(tmp_path: Path) -> None:
    file = jsonl(tmp_path, row({"type": "image", "image": url(PNG)}))
    for pixels, refused in ((53, True), (54, False)):
        config = build(
            RunConfig,
            {
                "model": {"path": "m"},
                "data": {"train": {"source": str(file)}},
                "agent": "a",
                "rollout": {"images": {"max_pixels": pixels}},
            },
        )
        if refused:
            with pytest.raises(DataError, match="more than 53"):
                load_split(config, "train", {})
        else:
            assert len(load_split(config, "train", {})) == 1


def test_files_that_say_another_type_are_read_by_content(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(PNG)
    [task] = load(jsonl(tmp_path, row({"type": "image", "path": "cat.jpg"})))
    assert task.prompt[0]["images"] == [url(PNG)]
    assert Image.open(io.BytesIO(read_image(task.prompt[0]["images"][0]).data)).format == "PNG"
