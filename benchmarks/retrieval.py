"""What `treadle-retrieve` costs with BM25: CPU and latency of a query with 64 clients, and whether its results hold.

The server is a process of its own; its CPU seconds are those that /proc has of it. Passages are random words, rare and
common as in language (Zipf). Answers to a sample are compared with every passage scored by BM25's definition. Run:

    python -m benchmarks.retrieval [--passages 100000] [--queries 6400] [--clients 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
VOCABULARY, WORDS, QUERY_WORDS, TOPK = 50_000, 80, 8, 3
K1, B = 1.5, 0.75


def draw_words(rows: int, columns: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return numbers of words, `[rows, columns]`."""
    shares = 1 / np.arange(1, VOCABULARY + 1)
    return np.random.default_rng(seed).choice(VOCABULARY, (rows, columns), p=shares / shares.sum())


def as_text(row: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    return " ".join(f"w{number}" for number in row)


@contextmanager
def serving(corpus: Path, cache: Path) -> Iterator[tuple[int, str]]:
    """Yield a server's process id and URL."""
    command = [sys.executable, "-m", "treadle.cli.retrieve", str(corpus), "--port", "0"]
    variables = {**os.environ, "TREADLE_CACHE": str(cache)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.pid, next(line.split()[1] for line in server.stdout if line.startswith("url "))
        finally:
            server.kill()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    [peak] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) / 1024


async def ask(url: str, queries: Sequence[str], clients: int) -> tuple[list[Any], list[float]]:
    """Return the answers to all queries, in order, and the seconds that each took, asked by clients side by side."""
    answers: list[Any] = [None] * len(queries)
    seconds = [0.0] * len(queries)

    async def client(numbers: range) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for number in numbers:
                began = time.perf_counter()
                body = {"queries": [queries[number]], "topk": TOPK, "return_scores": True}
                response = await http.post(url, json=body)
                seconds[number] = time.perf_counter() - began
                [answers[number]] = response.raise_for_status().json()["result"]

    await asyncio.gather(*(client(range(first, len(queries), clients)) for first in range(clients)))
    return answers, seconds


def largest_error(
    passages: np.ndarray[Any, np.dtype[np.int64]], queries: np.ndarray[Any, np.dtype[np.int64]], answers: Sequence[Any]
) -> float:
    """Return by how much, relatively, a score differs from that of BM25's definition at its place or of its passage."""
    worst = 0.0
    for query, answer in zip(queries, answers, strict=True):
        scores = np.zeros(len(passages))
        for word in query:
            count = (passages == word).sum(axis=1)  # all passages have the same length
            holding = (count > 0).sum()
            scores += np.log(1 + (len(passages) - holding + 0.5) / (holding + 0.5)) * count / (count + K1)
        best = np.sort(scores)[::-1][:TOPK]
        best = best[best > 0]
        assert len(answer) == len(best), "not as many passages as match"
        for passage, right in zip(answer, best, strict=True):
            score = scores[int(passage["document"]["id"])]
            worst = max(worst, abs(passage["score"] / right - 1), abs(passage["score"] / score - 1))
    return worst


def measure(options: argparse.Namespace) -> dict[str, Any]:
    passages = draw_words(options.passages, WORDS, seed=0)
    queries = draw_words(options.queries, QUERY_WORDS, seed=1)
    texts = [as_text(query) for query in queries]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w") as file:
            for number, row in enumerate(passages):
                file.write(json.dumps({"id": str(number), "contents": as_text(row)}) + "\n")
        began = time.perf_counter()
        with serving(corpus, Path(folder)) as (pid, url):
            built = time.perf_counter() - began
            building = peak_megabytes(pid)
            asyncio.run(ask(url, texts[: options.clients], options.clients))  # warm
            cpu, began = cpu_seconds(pid), time.perf_counter()
            answers, seconds = asyncio.run(ask(url, texts, options.clients))
            cpu, wall = cpu_seconds(pid) - cpu, time.perf_counter() - began
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    sample = min(options.sample, len(queries))
    return {
        "passages": options.passages,
        "queries": options.queries,
        "clients": options.clients,
        "start_seconds": built,
        "peak_megabytes_building": building,
        "server_cpu_ms_a_query": cpu / len(queries) * 1e3,
        "queries_a_second": len(queries) / wall,
        "p50_ms": p50,
        "p99_ms": p99,
        "passages_at_score_0": sum(passage["score"] <= 0 for answer in answers for passage in answer),
        "sample": sample,
        "largest_relative_error": largest_error(passages, queries[:sample], answers[:sample]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=6400)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--sample", type=int, default=50, help="queries compared with the definition")
    parser.add_argument("--out", type=Path, help=f"write the results there, for example {RESULTS}")
    options = parser.parse_args()
    result = json.dumps(measure(options), indent=2)
    print(result)
    if options.out:
        options.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
