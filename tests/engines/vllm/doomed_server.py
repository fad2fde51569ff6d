"""Answers like a vLLM server until it gets weights for the second time: `python doomed_server.py END`.

END: `killed` (kill -9) or `silent` (for ever, connections open) when half of them are broadcast; `refused`: it takes
all of them, refuses them, and goes on. Prints its port.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from treadle.engines.vllm.worker.treadle_group import Group, join, packed_bytes

CERTAIN = {"choices": [{"logprobs": {"content": [{"logprob": 0.0}]}}]}
ANSWERS: dict[str, Any] = {
    "/weight_info": {"weight_version": "first"},
    "/get_world_size": {"world_size": 1},
    "/v1/models": {"data": [{"max_model_len": 1024}]},
    "/inference/v1/generate": CERTAIN,
}


class Doomed(BaseHTTPRequestHandler):
    group: Group
    updates = 0

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
        if "group" in body.get("init_info", {}):
            group = dict(body["init_info"]["group"])
            Doomed.group = join(rank=group.pop("first"), device=torch.device("cpu"), **group)
        if "update_info" in body:
            Doomed.updates += 1
            self.receive(body["update_info"].get("buckets", []))  # none come with a file
            if Doomed.updates == 2:
                self.answer(400)
                return
        self.answer()

    def receive(self, buckets: list[dict[str, Any]]) -> None:
        for number, bucket in enumerate(buckets):
            if Doomed.updates == 2 and sys.argv[1] != "refused" and number == len(buckets) // 2:
                if sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()
            size = packed_bytes(getattr(torch, bucket["dtype"]), list(bucket["shapes"].values()))
            Doomed.group.broadcast(torch.empty(size, dtype=torch.uint8))

    def answer(self, status: int = 200) -> None:
        content = json.dumps(ANSWERS.get(self.path.partition("?")[0], {})).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Doomed)
    print(server.server_port, flush=True)
    server.serve_forever()
