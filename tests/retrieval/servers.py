"""Corpora, BM25 by its definition, `treadle-retrieve` as a program, and a server that answers as a test says."""

import asyncio
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.retrieval.corpus import Hit
from treadle.retrieval.index import words

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


def texts(count: int, seed: int = 0, vocabulary: int = 200, length: int = 12) -> list[str]:
    """Texts of words that are the rarer the higher their number."""
    draws = random.Random(seed)
    weights = [1 / (n + 1) for n in range(vocabulary)]
    return [
        " ".join(f"w{n}" for n in draws.choices(range(vocabulary), weights, k=draws.randint(1, length)))
        for _ in range(count)
    ]


def write_corpus(path: Path, contents: Sequence[str]) -> Path:
    rows = [json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(contents)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def brute_force(contents: Sequence[str], query: str, topk: int, k1: float = 1.5, b: float = 0.75) -> list[Hit]:
    """BM25 as Lucene has it, of every passage."""
    rows = [Counter(words(text)) for text in contents]
    holding = Counter(word for row in rows for word in row)
    mean = sum(row.total() for row in rows) / len(rows)
    hits = []
    for number, row in enumerate(rows):
        score = 0.0
        for word in words(query):
            rarity = math.log(1 + (len(rows) - holding[word] + 0.5) / (holding[word] + 0.5))
            score += rarity * row[word] / (row[word] + k1 * (1 - b + b * row.total() / mean)) if row[word] else 0.0
        if score > 0:
            hits.append(Hit(number, score))
    return sorted(hits, key=lambda hit: (-hit.score, hit.passage))[:topk]


Answer = tuple[int, dict[str, str], Any] | None
"""Status, headers and JSON; None: the connection is closed without an answer."""


def found(*contents: str) -> Answer:
    return 200, {}, {"result": [[{"document": {"contents": text}, "score": 1.0} for text in contents]]}


@dataclass
class Scripted:
    url: str = ""
    requests: list[Any] = field(default_factory=list)


@asynccontextmanager
async def scripted_server(answers: Sequence[Answer]) -> AsyncIterator[Scripted]:
    """Yield a server that gives these answers, and then the last one for ever."""
    server = Scripted()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                server.requests.append(json.loads(await reader.readexactly(length)))
                answer = answers[min(len(server.requests), len(answers)) - 1]
                if answer is None:
                    break
                status, headers, content = answer
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *map(": ".join, headers.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/retrieve"
    async with listening:
        yield server
