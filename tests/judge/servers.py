"""A judge's server, over real HTTP, that answers as a script says, and counts."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[list[dict[str, str]]], "str | int | bytes | None"]
"""From messages to a reply, a status, a body, or None: the call hangs."""

TOKENS = 7  # that each answer is said to have cost


class JudgeServer:
    """answered: replies that were sent. errors: calls that were not, or with another status. requests: bodies."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script, self.requests = script, list[dict[str, Any]]()
        self.headers: list[dict[str, str]] = []
        self.answered = self.errors = self.most = self._now = 0
        self._lock, self._released, self._dead = threading.Lock(), threading.Event(), False
        self._start(port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def restart(self) -> None:
        """Die with all calls, and come back."""
        self._dead, port = True, self._server.server_address[1]
        self.stop()
        self._start(int(port))
        self._dead = False

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        self._released.set()
        self.stop()

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
        with self._lock:
            self.requests.append(body)
            self.headers.append(dict(call.headers))
            self._now += 1
            self.most = max(self.most, self._now)
            answer = None if self._dead else self.script(body["messages"])
        if answer is None and not self._dead:
            self._released.wait()
        status, content = answer if isinstance(answer, int) else 200, answer
        if isinstance(answer, str):
            message = {"message": {"role": "assistant", "content": answer}}
            content = json.dumps({"choices": [message], "usage": {"total_tokens": TOKENS}}).encode()
        with self._lock:
            self._now -= 1
            lost = answer is None or self._dead
            self.answered += not lost and isinstance(answer, str)
            self.errors += lost or not isinstance(answer, str)
        if not lost:
            call.send_response(status)
            call.end_headers()
            call.wfile.write(content if isinstance(content, bytes) else b"{}")


@contextmanager
def judging(script: Script) -> Iterator[JudgeServer]:
    server = JudgeServer(script)
    try:
        yield server
    finally:
        server.close()
