"""Pictures of a run in their places: in the viewer, and as text in `treadle show`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.runs import recorded_run
from tests.seeing import picture, write
from tests.view.browser import WIDE, Viewer, serving
from tests.view.conftest import asking
from tests.worlds import make_step, tiny
from treadle.cli.main import main
from treadle.core.types import Message, Status, Task, Trajectory, as_messages
from treadle.models.vision import ImageProcessor
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation


def seen(role: str, text: str, seed: int) -> Message:
    parts = [{"type": "text", "text": text}, {"type": "image", "image": picture(seed).data}]
    return as_messages([{"role": role, "content": parts}], "test")[0]


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts that see picture 1, and then picture 2 or 3."""
    folder = tmp_path_factory.mktemp("looks")
    model = write(folder / "model", "qwen3_vl")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model), [2], images=ImageProcessor.find(model))
    task, attempts = Task("t0", (seen("user", "What is it? ", 1),)), []
    for number in range(2):
        talk, messages, steps = Conversation(renderer), [*task.prompt], []
        for reply in (Message(role="assistant", content=" look"), Message(role="assistant", content=" red")):
            prompt, ids = talk.render(messages), renderer.reply(reply)
            step = make_step(prompt.ids.tolist(), ids.tolist())
            steps.append(replace(step, images=prompt.images, break_cause=prompt.break_cause))
            talk.record(prompt, ids, reply)
            messages += [reply, seen("tool", "There: ", 2 + number)]
        attempts.append(Trajectory(f"g000000.{number}", "t0", number, tuple(steps), 1.0 - number, Status.DONE))
    config = tiny(f"model.path={model}", "model.build=null", "model.tokenizer=null")
    recorded_run(folder / "run", config, *attempts, task=task)
    return folder / "run"


def pictures_of(view: Any) -> list[str]:
    """Data URLs of a page's pictures, in order of their places."""
    ids = [str(ident) for segment in view["segments"] for ident in segment["ids"]]
    return [view["pictures"][ident] for ident in ids if ident in view["pictures"]]


def test_a_page_has_the_pictures_in_their_places(looks: Path) -> None:
    view = asking(looks)("runs/run/trajectories/g000000.1")
    assert view["problem"] is None
    assert pictures_of(view) == [picture(1).url, picture(3).url]
    assert view["cost"] is None or view["cost"]["tree"] < view["cost"]["step"]


def test_attempts_part_where_their_pixels_do(looks: Path) -> None:
    view = asking(looks)("runs/run/groups/g000000")
    assert pictures_of(view) == [picture(1).url, picture(2).url, picture(3).url]
    steps = [step["prompt_tokens"] for step in view["steps"] if step["trajectory_id"] == "g000000.1"]
    [part] = {at for at in view["apart"].values() if at < steps[1]}
    assert steps[0] < part < steps[1]


def test_show_names_each_picture(looks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(looks), "g000000.0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"What is it? <|vision_start|>[image {picture(1).sha256[:12]}, 32x32 pixels, 4 tokens]<|vision_end|>" in text
    assert text.count("[image ") == 2


def test_a_browser_draws_them(looks: Path, browser: Any) -> None:
    with serving([looks]) as url:
        viewer = Viewer(browser, url, WIDE)
        for page in ("trajectory/g000000.0", "group/g000000"):
            viewer.open(f"#/run/run/{page}")
            viewer.until("document.querySelectorAll('img.picture').length >= 2")
            viewer.until("[...document.querySelectorAll('img.picture')].every((image) => image.naturalWidth === 32)")
        assert not viewer.complaints
        viewer.close()
