"""Environments and tools that show images: what the model is sent, in the main process or not, and what is refused."""

import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.hostile_images import LIMITS, PNG, REFUSED, WEBP, color, encoded, translucent, url
from tests.seeing import picture, write
from tests.worlds import addresses, user
from treadle.core.config import build
from treadle.core.errors import Cause
from treadle.core.images import PLACE, picture_of, read_image
from treadle.core.types import Message, Status, StopReason, Task, ToolCall, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tools import ToolEnvironment
from treadle.models.vision import ImageProcessor
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.attempt import Players, Rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentDriver
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import OtherReply
from treadle.rollout.text_session import open_text_rollouts
from treadle.testing import FakeEngine

IMAGES = {"images": {"max_bytes": LIMITS.bytes, "max_pixels": LIMITS.pixels}}
TASK = Task("t", [user("Look.")], environment="p")


def seen(source: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "Here:"}, {"type": "image", "image": source}]}


class Shows(Environment):
    """Opens with one image and answers with others. Its methods run on the attempt's thread."""

    images: tuple[Any, ...] = ()

    def reset(self, task: Task) -> Any:
        return [*task.prompt, seen(self.images[0])]

    def step(self, text: str) -> EnvStep:
        self.images = self.images[1:]
        return EnvStep([seen(self.images[0])]) if self.images else EnvStep(reward=1.0, done=True)


class ShowsLater(Shows):
    """The same, on the event loop."""

    async def reset(self, task: Task) -> Any:
        return Shows.reset(self, task)

    async def step(self, text: str) -> EnvStep:  # type: ignore[override]
        return Shows.step(self, text)


def showing(kind: type[Shows], *images: Any) -> Any:
    return type("World", (kind,), {"images": images})


async def played(world: Any, task: Task = TASK, *, calls: tuple[str, ...] = (), **rollout: Any) -> Trajectory:
    """An attempt with a model that calls these tools, one after the other, and says `ok`."""
    names = iter(calls)

    async def answer(*_: Any) -> OtherReply:
        message = Message(role="assistant", content="ok")
        if name := next(names, None):
            called = ToolCall(id="c", type="function", function={"name": name, "arguments": "{}"})
            message = Message(role="assistant", content="", tool_calls=[called])
        return OtherReply(message, 1, 1, StopReason.STOP)

    config = build(RolloutConfig, {"environment_timeout": 300.0, **IMAGES, **rollout})
    players = Players(environments={"p": world})
    async with open_text_rollouts(answer, "m", players, config, RewardsConfig(), lambda line: None) as rollouts:
        return await rollouts.start("g", task, addresses())[0]


def sent(trajectory: Trajectory) -> list[Message]:
    """The last prompt, without the model's own messages."""
    call = trajectory.steps[-1].chat
    assert call is not None
    return [message for message in call.messages if message["role"] != "assistant"]


@pytest.mark.parametrize("kind", [Shows, ShowsLater])
async def test_an_environment_shows_images_of_any_kind(kind: type[Shows], tmp_path: Path) -> None:
    (tmp_path / "cat.webp").write_bytes(WEBP)
    sources = [color(), PNG, tmp_path / "cat.webp", url(PNG), translucent(), {"url": url(PNG)}]
    trajectory = await played(showing(kind, *sources))
    assert (trajectory.status, trajectory.reward) == (Status.DONE, 1.0), trajectory.failure
    first, *shown = sent(trajectory)
    assert first == user("Look.")
    assert [message["content"] for message in shown] == [f"Here:{PLACE}"] * len(sources)
    for message, source in zip(shown, [*sources[:-1], PNG], strict=True):
        [image] = message["images"]
        assert np.array_equal(picture_of(image).pixels, read_image(source).pixels)
    json.dumps(shown)  # plain data


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", [Shows, ShowsLater])
async def test_a_hostile_image_fails_its_attempt_alone(kind: type[Shows]) -> None:
    for name, (source, _) in REFUSED.items():
        trajectory = await played(showing(kind, PNG, source))
        failure = trajectory.failure
        assert failure is not None and failure.cause is Cause.ENVIRONMENT, name
        assert failure.message.startswith("step must give messages: step: message 0: image 0"), failure.message
        assert len(failure.message) < 500, name


class Watched(Image.Image):
    """Notes which threads read its pixels."""

    readers: ClassVar[set[int]] = set()

    def load(self) -> Any:
        self.readers.add(threading.get_ident())
        return super().load()


@pytest.mark.parametrize("kind", [Shows, ShowsLater])
async def test_images_leave_the_event_loop_to_others(kind: type[Shows]) -> None:
    image = color()
    image.__class__ = Watched
    Watched.readers.clear()
    trajectory = await played(showing(kind, image, image))
    assert trajectory.status is Status.DONE
    assert Watched.readers and threading.get_ident() not in Watched.readers


class Camera(ToolEnvironment):
    """Each tool answers by an image in another form."""

    max_answer = 4

    def pillow(self) -> Image.Image:
        """Look."""
        return color()

    def parts(self) -> list[Any]:
        """Look."""
        return [{"type": "text", "text": "far too long"}, {"type": "image", "image": PNG}]

    def step_of_parts(self) -> EnvStep:
        """Look."""
        return EnvStep([seen(PNG, "tool"), user("and")])

    def step_of_messages(self) -> EnvStep:
        """Look."""
        return EnvStep([{"role": "user", "content": f"a{PLACE}", "images": [url(PNG)]}])

    def listed(self) -> list[Any]:
        """List."""
        return [{"type": "text"}]

    async def later(self) -> Image.Image:
        """Look."""
        return color()

    tools = (pillow, parts, step_of_parts, step_of_messages, listed)


LOOKS = ("pillow", "parts", "step_of_parts", "step_of_messages")


async def test_tools_answer_with_images() -> None:
    trajectory = await played(Camera, calls=(*LOOKS, "listed"))
    assert trajectory.status is Status.DONE, trajectory.failure
    _, *answers, listed = sent(trajectory)
    cut = "far ... (8 more characters are left out)"
    assert [(answer["role"], answer["name"], answer["tool_call_id"]) for answer in answers] == [
        ("tool", name, "c") for name in LOOKS
    ]
    here = "Here... (1 more characters are left out)"
    assert [answer["content"] for answer in answers] == [PLACE, f"{cut}{PLACE}", f"{here}{PLACE}and", f"a{PLACE}"]
    pixels = [picture_of(answer["images"][0]).pixels for answer in answers]
    assert all(np.array_equal(each, read_image(PNG).pixels) for each in pixels)
    assert listed["content"].startswith('[{"t') and "images" not in listed  # JSON, as ever


async def test_an_async_tool_answers_with_an_image() -> None:
    world = type("Later", (Camera,), {"tools": (Camera.later,)})
    trajectory = await played(world, calls=("later",))
    assert sent(trajectory)[1]["images"] == [read_image(color()).url]


async def _by_engine(world: Any, renderer: Any, settings: dict[str, Any]) -> list[Trajectory]:
    config = build(RolloutConfig, {"environment_timeout": 300.0, **IMAGES, **settings})
    drivers = {("environment", "p"): EnvironmentDriver({"p": world}, config)}
    engine = FakeEngine(lambda prompt, sampling: renderer.reply(Message(role="assistant", content="ok")).tolist())
    rollouts = Rollouts(engine, renderer, drivers, config)
    return [await rollouts.start("g", TASK, addresses())[0]]


async def test_an_engine_is_given_the_images(tmp_path: Path) -> None:
    """From the environment to the recorded steps: each prompt's images where its placeholders are."""
    directory = write(tmp_path, "qwen3_vl")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(directory), [2], images=ImageProcessor.find(directory))
    pictures = [picture(seed, size) for seed, size in enumerate(((32, 32), (64, 32), (16, 48)))]
    world = showing(ShowsLater, *(Image.fromarray(each.pixels) for each in pictures))
    [trajectory] = await _by_engine(world, renderer, {})
    assert trajectory.status is Status.DONE, trajectory.failure
    assert [len(step.images) for step in trajectory.steps] == [1, 2, 3]
    last = trajectory.steps[-1]
    assert [image.sha256 for image in last.images] == [read_image(Image.fromarray(p.pixels)).sha256 for p in pictures]
    places = [place for image in last.images for place in image.places(last.prompt_ids).tolist()]
    assert places == np.flatnonzero(last.prompt_ids == last.images[0].placeholder).tolist()


async def test_limits_are_the_recipes() -> None:
    large = Image.new("L", (6000, 6000))
    refused = await played(showing(Shows, large), images={})
    assert refused.failure is not None and "6000x6000 pixels, more than 33554432" in refused.failure.message
    allowed = await played(showing(Shows, encoded(large, "PNG")), images={"max_pixels": 6000 * 6000})
    assert allowed.status is Status.DONE, allowed.failure
