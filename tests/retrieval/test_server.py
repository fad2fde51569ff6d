"""The retrieval server: its protocol, and what it does when there is too much to do."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("bm25s")

from tests.until import CEILING, until
from treadle.retrieval.corpus import Hit, Retriever
from treadle.retrieval.index import Bm25
from treadle.retrieval.server import MOST_BYTES, Overloaded, RetrievalQueue, make_app

PASSAGES = [
    {"id": str(n), "contents": f'"{name}"\n{name} likes {what}'}
    for n, (name, what) in enumerate([("Anna Lopez", "chess"), ("Bob Rossi", "golf"), ("Carl Rossi", "chess")])
]


class Slow(Retriever):
    """Finds passage 0, as soon as the gate is open; says what it was asked for at once."""

    def __init__(self, batch: int = 1) -> None:
        self.batch, self.gate = batch, threading.Event()
        self.batches: list[list[str]] = []
        self.asked = False

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.asked = True
        assert self.gate.wait(CEILING)
        self.batches.append(list(queries))
        if "fail" in queries:
            raise RuntimeError("the index broke")
        return [[Hit(0, 1.0)][:topk] for _ in queries]


def ask(body: Any, retriever: Retriever | None = None) -> httpx.Response:
    async def request() -> httpx.Response:
        queue = RetrievalQueue(PASSAGES, retriever or Bm25.build([p["contents"] for p in PASSAGES], 3))
        transport = httpx.ASGITransport(make_app(queue, topk=2), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://retrieval") as client:
            content = body if isinstance(body, bytes) else json.dumps(body)
            response = await client.post("/retrieve", content=content, headers={"Content-Type": "application/json"})
        queue.close()
        return response

    return asyncio.run(request())


def test_a_list_of_queries_with_scores() -> None:
    response = ask({"queries": ["chess", "Rossi golf", "tennis"], "topk": 3, "return_scores": True})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    chess, golf, tennis = response.json()["result"]
    assert [found["document"] for found in chess] == [PASSAGES[0], PASSAGES[2]]
    assert [found["document"]["id"] for found in golf] == ["1", "2"]
    assert golf[0]["score"] > golf[1]["score"] > 0
    assert tennis == []


def test_one_query_and_bare_documents() -> None:
    assert ask({"query": "Anna"}).json() == {"result": [[PASSAGES[0]]]}
    assert len(ask({"query": "likes"}).json()["result"][0]) == 2  # the server's topk
    assert ask({"queries": []}).json() == {"result": []}


@pytest.mark.parametrize(
    "body", [{}, {"query": 7}, {"queries": "Anna"}, {"query": "x", "topk": 0}, {"query": "x", "topk": 101}, []]
)
def test_what_is_no_request_is_refused(body: Any) -> None:
    assert ask(body).status_code == 422


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"query": "x", "topk": NaN}', "'topk' is nan"),
        (b'{"query": "x", "topk": 1e400}', "'topk' is inf"),
        (b'{"query": NaN}', "'query' is nan"),
        (b'{"query": "x", "more": [1, -Infinity]}', "'more.1' is -inf"),
        (b"NaN", "the value is nan"),
        (b'{"query": "\\ud800"}', "half a character"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"query": "\xff"}', "utf-8"),
        (b"{", "not JSON"),
    ],
)
def test_what_is_no_json_is_refused_by_name(body: bytes, problem: str) -> None:
    response = ask(body)
    assert response.status_code == 400 and problem in response.json()["detail"]


def test_a_request_has_a_largest_size() -> None:
    body = json.dumps({"query": "Anna", "more": "x" * MOST_BYTES}).encode()
    response = ask(body)
    assert response.status_code == 413 and str(MOST_BYTES) in response.json()["detail"]
    fits = b'{"query": "Anna", "more": "' + b"x" * (MOST_BYTES - 30) + b'"}'
    assert ask(fits).json() == {"result": [[PASSAGES[0]]]}


def test_a_request_without_an_end_is_cut_off() -> None:
    """Nothing says beforehand how long it is."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 2**20

    async def request() -> int:
        queue = RetrievalQueue(PASSAGES, Slow())
        received: list[Any] = []
        chunks = endless()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(chunks), "more_body": True}

        async def send(message: Any) -> None:
            received.append(message)

        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}
        await make_app(queue)(scope, receive, send)
        queue.close()
        return int(received[0]["status"])

    assert asyncio.run(request()) == 413
    assert sent <= MOST_BYTES // 2**20 + 1


def test_a_retriever_that_fails_is_an_error_of_the_server() -> None:
    broken = Slow()
    broken.gate.set()
    assert ask({"query": "fail"}, broken).status_code == 500


async def started(
    retriever: Slow, *queries: str, timeout: float = CEILING, **limits: Any
) -> tuple[RetrievalQueue, list[asyncio.Task[Any]]]:
    """A queue with a task for each query; the first of them is at the retriever."""
    queue = RetrievalQueue(PASSAGES, retriever, timeout=timeout, **limits)
    tasks = []
    for query in queries:
        tasks.append(asyncio.create_task(queue.search([query], 1)))
        await asyncio.sleep(0)  # it waits in the queue
        await until(lambda: retriever.asked)
    return queue, tasks


async def test_too_many_waiting_queries_are_refused_with_a_time_to_come_back() -> None:
    slow = Slow()
    queue, tasks = await started(slow, "a", "b", "c", most_waiting=2)
    with pytest.raises(Overloaded, match="2 queries are waiting; try again"):
        await queue.search(["d"], 1)
    transport = httpx.ASGITransport(make_app(queue))
    async with httpx.AsyncClient(transport=transport, base_url="http://retrieval") as client:
        response = await client.post("/retrieve", json={"query": "d"})
        assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
        assert (await client.get("/health")).status_code == 200
    slow.gate.set()
    assert [len(await task) for task in tasks] == [1, 1, 1]  # those that were admitted are answered
    assert len(await queue.search(["d"] * 5, 1)) == 5  # an idle server takes a request of any length
    queue.close()


async def test_a_query_that_waited_too_long_is_given_up_and_never_computed() -> None:
    slow = Slow()
    queue, tasks = await started(slow, "a", "b", timeout=0.2)
    for task in tasks:
        with pytest.raises(Overloaded, match=r"no answer within 0.2 s"):
            await task
    slow.gate.set()
    assert queue._worker is not None
    await queue._worker
    assert slow.batches == [["a"]]
    queue._timeout = CEILING
    assert len(await queue.search(["c"], 1)) == 1
    queue.close()


@pytest.mark.parametrize(("batch", "batches"), [(1, [["a"], ["b"], ["c"]]), (8, [["a"], ["b", "c"]])])
async def test_a_retriever_gets_as_many_queries_at_once_as_it_wants(batch: int, batches: list[list[str]]) -> None:
    slow = Slow(batch)
    queue, tasks = await started(slow, "a", "b", "c")
    slow.gate.set()
    await asyncio.gather(*tasks)
    assert slow.batches == batches
    queue.close()


async def test_one_request_that_fails_fails_no_other() -> None:
    slow = Slow()
    queue, [first, second, third] = await started(slow, "a", "fail", "c")
    slow.gate.set()
    assert len(await first) == len(await third) == 1
    with pytest.raises(RuntimeError, match="the index broke"):
        await second
    queue.close()
