"""The retrieval client: it outlasts what passes, and an outage is a failure of the attempt."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.retrieval.servers import Answer, found, scripted_server
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.retrieval import client as module
from treadle.retrieval.client import RetrievalClient

BUSY: Answer = (503, {"Retry-After": "1"}, {"detail": "busy"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)


async def ask(answers: list[Answer], user: str = "", **options: Any) -> tuple[list[str], list[Any]]:
    async with scripted_server(answers) as server:
        client = RetrievalClient(server.url.replace("//", f"//{user}@") if user else server.url, **options)
        try:
            return await client.search("who?", 2), server.requests
        finally:
            await client.close()


async def test_it_asks_as_servers_of_both_kinds_want_it() -> None:
    contents, [request] = await ask([found("a", "b")])
    assert contents == ["a", "b"]
    assert request == {"query": "who?", "queries": ["who?"], "topk": 2, "return_scores": True}


async def test_documents_may_come_without_scores() -> None:
    assert (await ask([(200, {}, {"result": [[{"contents": "a"}]]})]))[0] == ["a"]


@pytest.mark.parametrize("passing", [None, BUSY, *((status, {}, {}) for status in (429, 500, 502, 504))])
async def test_what_passes_is_outlasted(passing: Answer) -> None:
    contents, requests = await ask([passing, found("a")])
    assert contents == ["a"] and len(requests) == 2


async def test_it_comes_back_when_the_server_says() -> None:
    begin = asyncio.get_running_loop().time()
    await ask([BUSY, found("a")])
    assert asyncio.get_running_loop().time() - begin >= 1


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([None], "no answer for 0.3 s, at last: "),
        ([BUSY], "no answer for 0.3 s, at last: status 503"),
        ([(404, {}, {"detail": "Not Found"})], "status 404: .*Not Found"),
        ([(422, {}, {})], "status 422"),
        ([(200, {}, b"<html>")], "<html>"),
        ([(200, {}, {"result": []})], "not the result of one query"),
        ([(200, {}, {"result": [[{"text": "a"}]]})], "not the result of one query"),
        ([(200, {}, {"result": [["a"]]})], "not the result of one query"),
        ([(200, {}, {"result": [[{"contents": 7}]]})], "not the result of one query"),
        ([(200, {}, ["a"])], "not the result of one query"),
    ],
)
async def test_an_outage_fails_the_attempt_and_is_no_text(answers: list[Answer], said: str) -> None:
    with pytest.raises(TrajectoryFailure, match=said) as failed:
        await ask(answers, patience=0.3)
    assert failed.value.cause is (Cause.INFRASTRUCTURE if "no answer" in said else Cause.ENVIRONMENT)
    assert "the retrieval server at http://127.0.0.1:" in str(failed.value)


@pytest.mark.parametrize("status", [200, 401])
async def test_a_password_that_the_server_repeats_is_in_no_error(status: int) -> None:
    with pytest.raises(TrajectoryFailure, match=r"at http://\[hidden\]@127") as failed:
        await ask([(status, {}, {"detail": "hunter22 of me:hunter22"})], user="me:hunter22")
    error: BaseException | None = failed.value
    while error is not None:
        assert "hunter22" not in str(error)
        error = error.__cause__ or error.__context__


async def test_a_server_that_says_nothing_is_asked_again() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other end gives up
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        client = RetrievalClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=1.0, patience=0.3)
        with pytest.raises(TrajectoryFailure, match=r"no answer for 0.3 s, at last: (Read|Connect)Timeout"):
            await client.search("who?", 1)
        await client.close()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000/retrieve", "ftp://x/retrieve", "http://", "http://x:port/"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write http"):
        RetrievalClient(url)
