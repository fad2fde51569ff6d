"""`python -m treadle.recipes.judged.rules`: rules behind an OpenAI-compatible URL, instead of a judging model.

They know only the rubric of `support`, and count words as tokens.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from treadle.recipes.judged.support import RUBRIC


def judge(messages: Sequence[Mapping[str, str]]) -> str:
    """Answer a question of the rubric about the quoted task and reply."""
    system, user = (message["content"] for message in messages)
    [boundary] = re.findall(r'"BEGIN (\w+)"', system)
    task, reply = re.findall(rf"^BEGIN {boundary}\n(.*?)^END {boundary}$", user, re.MULTILINE | re.DOTALL)
    words = re.findall(r"\w+", reply.lower())
    item = task.split()[2]  # | The kettle ...
    answers = {
        "sorry": "no" if {"sorry", "apologize", "apologies"}.isdisjoint(words) else "yes",
        "named": "yes" if item in words else "no",
        "brief": f"{min((45 - len(words)) / 3, 10.0):.2f}" if 0 < len(words) < 45 else "0",
    }
    [name] = [criterion.name for criterion in RUBRIC if criterion.prompt in system]
    return f"By a rule.\nANSWER: {answers[name]}"


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions on any path."""

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        reply = judge(messages)
        tokens = sum(len(text.split()) for text in (reply, *(message["content"] for message in messages)))
        message = {"role": "assistant", "content": reply}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": tokens}}).encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8010)
    with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler) as server:
        print(f"judging at http://127.0.0.1:{server.server_address[1]}/v1; press Ctrl-C to stop", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
