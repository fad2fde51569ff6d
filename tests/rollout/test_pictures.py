"""Images in rendered conversations: the processor's own ids, once, in the place of each picture."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from tests.seeing import FAMILIES, picture, write
from tests.worlds import user
from treadle.core.errors import DataError
from treadle.core.images import PLACE, read_image
from treadle.core.types import BreakCause, Message, as_messages, in_parts
from treadle.envs.base import EnvStep
from treadle.models.vision import ImageProcessor
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rollout.drivers.history import History

Open = Callable[[str], ChatRenderer]
SIZES = ((32, 32), (64, 32), (16, 48), (100, 70))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Open:
    made: dict[str, ChatRenderer] = {}

    def of(family: str) -> ChatRenderer:
        if family not in made:
            directory = write(tmp_path_factory.mktemp(family), family)
            made[family] = ChatRenderer(
                AutoTokenizer.from_pretrained(directory), [2], images=ImageProcessor.find(directory)
            )
        return made[family]

    return of


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def processor_of(renderer: ChatRenderer) -> ImageProcessor:
    assert isinstance(renderer.images.processor, ImageProcessor)
    return renderer.images.processor


def seen(*parts: str | int, role: str = "user", size: tuple[int, int] = (32, 32)) -> Message:
    """A message of texts, and of pictures by their seeds."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": picture(part, size).data}
        for part in parts
    ]
    return as_messages([{"role": role, "content": content}], "test")[0]


@pytest.mark.parametrize("family", FAMILIES)
@given(
    parts=st.lists(
        st.sampled_from(["Look: ", "and", "\n\n", "<image>", "<|image_pad|>"]) | st.integers(0, 3), min_size=1
    ),
    size=st.sampled_from(SIZES),
)
@settings(deadline=None, max_examples=25)
def test_ids_are_the_processors_own(renderer: Open, family: str, parts: list[str | int], size: tuple[int, int]) -> None:
    parts = [
        part for at, part in enumerate(parts) if isinstance(part, int) or at == 0 or isinstance(parts[at - 1], int)
    ]
    made = renderer(family)
    prompt = Conversation(made).render([seen(*parts, size=size)])
    own = processor_of(made)._own
    pictures = [picture(part, size) for part in parts if isinstance(part, int)]
    # The family's processor reads names of tokens in texts as tokens: they are left out for it.
    texts = [part for part in parts if isinstance(part, str)]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    text = own.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if not {"<image>", "<|image_pad|>"} & set(texts):
        expected = own(text=[text], images=[Image.fromarray(p.pixels) for p in pictures] or None)["input_ids"][0]
        assert prompt.ids.tolist() == expected
    assert [image.sha256 for image in prompt.images] == [p.sha256 for p in pictures]
    places = [place for image in prompt.images for place in image.places(prompt.ids).tolist()]
    assert places == np.flatnonzero(prompt.ids == processor_of(made).placeholder).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_extend_each_other_id_by_id(renderer: Open, family: str) -> None:
    made = renderer(family)
    talk, messages, before = Conversation(made), [seen("See ", 1)], np.empty(0, np.int32)
    for turn in range(4):
        prompt = talk.render(messages)
        assert prompt.break_cause is None
        assert prompt.ids[: len(before)].tolist() == before.tolist()
        assert len(prompt.images) == turn + 1
        reply = said(f" it is {turn}")
        before = talk.record(prompt, made.reply(reply), reply).ids
        messages += [reply, seen(turn + 2, role="tool" if turn % 2 else "user", size=SIZES[turn % 3])]


def test_other_pixels_are_another_history(renderer: Open) -> None:
    made = renderer("qwen3_vl")
    talk = Conversation(made)
    prompt = talk.render([seen("See ", 1)])
    reply = said(" it")
    talk.record(prompt, made.reply(reply), reply)
    same, other = talk.render([seen("See ", 1), reply, user("?")]), talk.render([seen("See ", 2), reply, user("?")])
    assert same.break_cause is None
    assert other.break_cause is BreakCause.HISTORY_EDITED
    assert (same.ids == other.ids).all()


def test_a_prompt_names_each_image(renderer: Open) -> None:
    made = renderer("qwen3_vl")
    [image] = Conversation(made).render([seen("See ", 1, " now", size=(64, 32))]).images
    prepared = processor_of(made).prepared(picture(1, (64, 32)).url)
    assert (image.tokens, image.grid, image.length) == (8, (1, 2, 4), 8)
    assert (image.processed, image.settings) == (prepared.processed, processor_of(made).settings)
    assert read_image(image.url).sha256 == image.sha256


def test_a_renderer_is_sent_to_workers_with_its_processor(renderer: Open) -> None:
    made = renderer("idefics3")
    copy = pickle.loads(pickle.dumps(made))
    messages = [seen("See ", 1)]
    assert Conversation(copy).render(messages).images == Conversation(made).render(messages).images


def test_images_without_a_processor_are_refused(renderer: Open, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write(tmp_path, "qwen3_vl"))
    with pytest.raises(DataError, match="the model takes none: use a model with a vision tower"):
        Conversation(ChatRenderer(tokenizer, [2])).render([seen(1)])


def test_a_template_that_leaves_out_images_is_refused(renderer: Open, tmp_path: Path) -> None:
    directory = write(tmp_path, "qwen3_vl")
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "part.type == 'image'", "part.type == 'image' and message.role == 'user'"
    )
    made = ChatRenderer(tokenizer, [2], images=ImageProcessor.find(directory))
    Conversation(made).render([seen(1)])
    with pytest.raises(DataError, match=r"0 placeholders <\|image_pad\|> for 1 images.*model\.roles"):
        Conversation(made).render([user("?"), seen(1, role="tool")])


def test_a_sampled_placeholder_is_no_image(renderer: Open) -> None:
    made = renderer("qwen3_vl")
    talk, first = Conversation(made), seen("See ", 1)
    prompt = talk.render([first])
    sampled = np.array([processor_of(made).placeholder, 2], np.int32)
    reply = said(made.text(sampled))
    talk.record(prompt, sampled, reply)
    with pytest.raises(DataError, match="a reply contains some, which no image stands for"):
        talk.render([first, reply, user("?")])


WRONG: Mapping[str, tuple[Message | Mapping[str, Any], str]] = {
    "of an assistant": (
        {"role": "assistant", "content": PLACE, "images": [picture(1).url]},
        "cannot be in an assistant",
    ),
    "without a place": ({"role": "user", "content": "?", "images": [picture(1).url]}, "1 images and 0 places"),
    "beside a place": (
        {"role": "user", "content": [{"type": "text", "text": PLACE}, {"type": "image", "image": picture(1).url}]},
        "1 images and 2 places",
    ),
    "of a file": (
        {"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]},
        "image 0: '/etc/passwd' is",
    ),
    "unread": ({"role": "user", "content": [{"type": "image", "image": b"GIF89a"}]}, r"image 0 \(6 bytes\) is damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_images_are_refused(name: str) -> None:
    message, why = WRONG[name]
    with pytest.raises(DataError, match=f"test: message 0.*{why}"):
        as_messages([message], "test")


def test_errors_do_not_repeat_images() -> None:
    url = picture(1).url
    with pytest.raises(DataError) as caught:
        as_messages([{"role": "user", "content": 7, "images": [url * 10]}], "test")
    assert len(str(caught.value)) < 700


@given(st.lists(st.sampled_from(["Look: ", "\n"]) | st.integers(0, 3), max_size=5))
@settings(deadline=None, max_examples=20)
def test_messages_survive_openais_form(parts: list[str | int]) -> None:
    parts = [
        part for at, part in enumerate(parts) if isinstance(part, int) or at == 0 or isinstance(parts[at - 1], int)
    ]
    message = seen(*parts)
    assert as_messages([in_parts(message)], "test") == (message,)


def test_one_message_of_everything_holds_no_images() -> None:
    history = History([said("Begin.")], single_message=True)
    with pytest.raises(DataError, match=r"set rollout\.conversation to turns"):
        history.add(said("look"), EnvStep([seen(1)]))
