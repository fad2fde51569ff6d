"""A Hugging Face hub of one model on this machine, for huggingface_hub to download and to upload."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_servers import serving

COMMIT = "a" * 40


@contextmanager
def serving_hub(repository: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder's files as `repository`; yields the endpoint and the list of the files that were asked for.

    What is uploaded goes into the folder.
    """
    asked: list[str] = []
    root = f"/{repository}"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.path.partition("?")[0]
            address = f"http://{self.headers['Host']}{root}"
            answer: dict[str, object] = {"errors": [], "warnings": []}  # of a model card's head
            if self.headers["Authorization"] != "Bearer key":
                self._send(401, b"{}", body=True)
                return
            if path == "/api/repos/create":
                wanted = json.loads(body)
                assert (f"{wanted['organization']}/{wanted['name']}", wanted["visibility"]) == (repository, "private")
                answer = {"url": address}
            elif path == f"/api/models{root}/preupload/main":
                names = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
            elif path == f"/api/models{root}/commit/main":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        (folder / line["value"]["path"]).write_bytes(base64.b64decode(line["value"]["content"]))
                answer = {"commitUrl": f"{address}/commit/{COMMIT}", "commitOid": COMMIT, "pullRequestUrl": None}
            self._send(200, json.dumps(answer).encode(), body=True)

        def log_message(self, *parts: object) -> None:
            pass

        def _answer(self, body: bool) -> None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = {path.relative_to(folder).as_posix(): path for path in files}
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models{root}/revision/"):
                content = json.dumps({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]})
                self._send(200, content.encode(), body)
            elif path.startswith(f"/api/models{root}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": name.encode().hex()}
                    for name, file in names.items()
                ]
                self._send(200, json.dumps(tree).encode(), body)
            elif (name := re.sub(f"^{root}/resolve/({COMMIT}|main)/", "", path)) in names:
                asked.append(name)
                self._send(200, names[name].read_bytes(), body)
            else:
                self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        def _send(self, status: int, content: bytes, body: bool, more: dict[str, str] | None = None) -> None:
            self.send_response(status)
            tag = hashlib.sha256(content).hexdigest()
            for key, value in {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, **(more or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    with serving(Handler) as url:
        yield url, asked
