"""`treadle play`: a person is the model."""

import os
import pty
import re
import signal
import sys
from contextlib import suppress

import pytest

from tests.cli.worlds import treadle
from treadle.cli.play import reply_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {"properties": {"item": {"type": "string"}, "count": {"type": "integer"}}},
        },
    }
]


def played(*lines: str, words: tuple[str, ...] = ()) -> tuple[str, int]:
    """What is shown on a terminal, and the exit status. Each line is typed when it is asked for."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "treadle.cli.main", "play", "tools-small", *words])
    shown, left = b"", list(lines)
    with suppress(OSError):  # the terminal is closed
        while part := os.read(terminal, 4096):
            shown += part
            if left and re.search(rb"(\n|\r|^)[>.] $", shown):
                os.write(terminal, left.pop(0).encode())
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n"), os.waitstatus_to_exitcode(status)


def test_a_person_calls_tools_and_is_paid() -> None:
    text, status = played("/price item=cheese\n", "/prize x\n", "11\\\n", "2\n", words=("--task", "held_out-1"))
    assert status == 0, text
    assert "/price item=string   Look up what an item costs." in text
    assert "user\n  What does cheese cost?" in text and re.search(r"tool\n  \d\d\n", text)
    assert "there is no tool 'prize', but bought, price" in text
    assert "reward 0, done after 2 replies" in text
    [answer] = re.findall(r"tool\n  (\d\d)\n", text)
    again, _ = played(f"{answer}\n", words=("--task", "1"))
    assert "reward 1, done after 1 reply" in again


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_leaving_is_clean(key: str) -> None:
    text, status = played(key)
    assert status == 128 + signal.SIGINT and text.endswith("left before the end; the environment is closed\n")
    assert "Traceback" not in text


def test_without_a_terminal_or_a_task_it_is_refused() -> None:
    done = treadle("play", "tools-small")
    assert done.status == 2 and "treadle play needs a terminal" in done.err


def test_what_a_person_writes() -> None:
    message = reply_of('/price item="green tea" count=2\n/price {"item": "1"}\n/price item=1', TOOLS)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        '{"item": "green tea", "count": 2}',
        '{"item": "1"}',
        '{"item": "1"}',
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 3
    for text in (" /price item=tea", "2 + 2\n/price", ""):
        assert reply_of(text, TOOLS) == {"role": "assistant", "content": text}
    assert reply_of("/price item=tea", ()) == {"role": "assistant", "content": "/price item=tea"}
    for text, error in (
        ("/cost", "no tool 'cost'"),
        ("/price tea", "'tea' is not an argument"),
        ("/price {", "not JSON"),
    ):
        with pytest.raises(ValueError, match=error):
            reply_of(text, TOOLS)
