"""`python -m tests.judge.failing PORT LOG`: a judge in a process of its own that fails in every way.

It finds the share of vowels of what is quoted, whose last line is a name. Of the calls 18% fail, 2% are refused, 5%
hang and 5% get nonsense; the process kills itself with SIGKILL at its 250th. LOG gets a line for each call: the key,
what became of it, the name.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.judge.servers import JudgeServer

ROOT = Path(__file__).parents[2]
ANSWERS: dict[str, tuple[float, tuple[str | int | None, ...]]] = {
    "failed": (0.18, (500, 503, 429)),
    "refused": (0.02, (400, 401)),
    "hung": (0.05, (None,)),
    "nonsense": (0.05, ("", "ANSWER: fine", "ANSWER: 11", "The share is 5.")),
    "answered": (0.7, ("",)),
}


def share(text: str) -> float:
    letters = [c for c in text.lower() if c.isalpha()]
    return round(10 * sum(c in "aeiou" for c in letters) / max(len(letters), 1), 2) / 10


def main(port: int, log: Path) -> None:
    file, draws = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), random.Random(os.getpid())

    def script(request: list[dict[str, str]]) -> str | int | None:
        if len(server.requests) == 250:
            os.kill(os.getpid(), signal.SIGKILL)
        *quoted, name = [line[2:] for line in request[1]["content"].splitlines() if line.startswith("| ")]
        [what] = draws.choices([*ANSWERS], [weight for weight, _ in ANSWERS.values()])
        key = server.headers[-1]["Authorization"].split()[-1]
        os.write(file, f"{key} {what} {name}\n".encode())
        return f"ANSWER: {10 * share(' '.join(quoted)):.2f}" if what == "answered" else draws.choice(ANSWERS[what][1])

    server = JudgeServer(script, port)
    threading.Event().wait()


@contextmanager
def failing_judge(log: Path) -> Iterator[str]:
    """Run it, again whenever it has died; yields its URL."""
    over, processes = threading.Event(), list[subprocess.Popen[bytes]]()

    def keep_up() -> None:
        while not over.is_set():
            command = [sys.executable, "-m", "tests.judge.failing", str(port), str(log)]
            processes.append(subprocess.Popen(command, cwd=ROOT))
            processes[-1].wait()

    with socket.socket() as reserved:  # bound, so that nobody else gets the port meanwhile
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        thread = threading.Thread(target=keep_up)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            over.set()
            while thread.is_alive():
                processes[-1].kill()
                thread.join(0.1)
            assert len(processes) > 1  # it has died


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
