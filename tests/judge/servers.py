"""A judge's server, over real HTTP, that answers as a script says, and counts."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from treadle.core.config import build
from treadle.judge import Criterion
from treadle.rollout import chat_endpoint
from treadle.rollout.other_models import OtherModelConfig, UrlModel

Script = Callable[[list[dict[str, str]]], "str | int | bytes | tuple[int, bytes] | None"]
"""From messages to a reply, a status, a body, both, or None: the call hangs."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 0.01)


TOKENS = 7  # that each answer is said to have cost


class JudgeServer:
    """answered: replies that were sent. errors: calls that were not, or with another status. requests: bodies."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script, self.requests = script, list[dict[str, Any]]()
        self.headers: list[dict[str, str]] = []
        self.answered = self.errors = self.most = self._now = 0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._start(port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _start(self, port: int) -> None:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                judge.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 128

            def handle_error(self, *_: object) -> None:
                """A client that is gone is none."""

        self._server = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        body = json.loads(call.rfile.read(int(call.headers["Content-Length"])))
        self._now += 1
        self.most = max(self.most, self._now)
        with self._lock:  # what the script says is sent before it is asked again
            self.requests.append(body)
            self.headers.append(dict(call.headers))
            answer = self.script(body["messages"])
            self.answered += isinstance(answer, str)
            self.errors += not isinstance(answer, str)
            self._now -= 1
            if answer is not None:
                self._send(call, answer)
        if answer is None:
            self._released.wait()

    def _send(self, call: BaseHTTPRequestHandler, answer: str | int | bytes | tuple[int, bytes]) -> None:
        answer, content = answer if isinstance(answer, tuple) else (answer, b"{}")
        content = answer if isinstance(answer, bytes) else content
        if isinstance(answer, str):
            message = {"message": {"role": "assistant", "content": answer}}
            content = json.dumps({"choices": [message], "usage": {"total_tokens": TOKENS}}).encode()
        call.send_response(answer if isinstance(answer, int) else 200)
        call.end_headers()
        call.wfile.write(content)


@contextmanager
def judging(script: Script) -> Iterator[JudgeServer]:
    server = JudgeServer(script)
    try:
        yield server
    finally:
        server.close()


def at(url: str, **settings: Any) -> UrlModel:
    """The model at a URL, as a recipe's `models` would name it."""
    return UrlModel(build(OtherModelConfig, {"url": url, "model": "m", **settings}))


def check_read(parser: Any, reply: str, value: float | None) -> None:
    """value: None if the reply is refused."""
    criterion = Criterion("c", "?", parser)
    if value is not None:
        assert criterion.read(reply) == value
    else:
        with pytest.raises(ValueError):
            criterion.read(reply)
