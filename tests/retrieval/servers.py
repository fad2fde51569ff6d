"""`treadle-retrieve` as a program of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-m", "treadle.cli.retrieve"]


@contextmanager
def serving(corpus: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its URL; killed at the end."""
    command = [*COMMAND, str(corpus), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, next(line.split()[1] for line in server.stdout if line.startswith("url "))
        finally:
            server.kill()


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])
