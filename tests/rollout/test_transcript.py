"""Messages are read back from a prompt's ids, by whatever template wrote them."""

import numpy as np
import pytest

from tests.models import make_step
from tests.rollout.families import world
from treadle.core.types import Message
from treadle.rendering.conversation import Conversation
from treadle.rendering.transcript import Transcript

ROLES = ("system", "user", "assistant", "user")


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "deepseekv3", "phi3_5", "mistral_small_3_2", "gemma3"])
def test_messages_are_read_back_from_ids(family: str) -> None:
    renderer = world(family).renderer
    messages = [Message(role=role, content=f"Say {number}") for number, role in enumerate(ROLES)]
    step = make_step(Conversation(renderer).render(messages).ids, np.array(renderer.stop_ids[:1], np.int32))
    found = Transcript(renderer).messages(step, reply=True)
    if family == "gemma3":  # whose template writes a system message into the first question
        messages = [Message(role="user", content="Say 0\n\nSay 1"), *messages[2:]]
    assert found == [*messages, Message(role="assistant", content="")]
