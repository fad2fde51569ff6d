"""`treadle-retrieve`, as a program of its own."""

import asyncio
import signal
from pathlib import Path

import pytest

pytest.importorskip("bm25s")

from tests.retrieval.servers import port_of, serving, write_corpus
from treadle.cli.retrieve import main
from treadle.retrieval.client import RetrievalClient


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "corpus.jsonl", ["Anna likes chess", "Bob likes golf", "Carl likes tennis"])


@pytest.mark.slow
async def test_attempts_outlast_a_server_that_is_killed_and_started_again(corpus: Path) -> None:
    with serving(corpus) as (server, url):
        clients = [RetrievalClient(url, patience=300) for _ in range(8)]
        before = await asyncio.gather(*(client.search("who likes golf?", 1) for client in clients))
        server.kill()
        server.wait()
        waiting = [asyncio.create_task(client.search("who likes chess?", 1)) for client in clients]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        with serving(corpus, port_of(url)) as (_, again):
            assert again == url
            after = await asyncio.gather(*waiting)
        assert (before, after) == ([["Bob likes golf"]] * 8, [["Anna likes chess"]] * 8)
        for client in clients:
            await client.close()


def test_it_ends_by_itself_when_interrupted(corpus: Path) -> None:
    with serving(corpus) as (server, _):
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_building_only(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(corpus), "--build-only"]) == 0
    assert capsys.readouterr().out.splitlines() == ["passages read: 3 of 3", "3 passages, indexed"]
    assert main([str(corpus), "--build-only"]) == 0
    assert capsys.readouterr().out.splitlines() == ["3 passages, indexed"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.jsonl"], "no corpus 'nowhere.jsonl'"),
        (["{corpus}", "--port", "70000"], "--port 70000"),
        (["{corpus}", "--topk", "0"], "--topk 0: must be above 0"),
        (["{corpus}", "--timeout", "nan"], "--timeout nan"),
        (["{corpus}", "--index", "e5_Flat.index"], "no model makes those of queries"),
        (["{corpus}", "--host", "203.0.113.1", "--port", "0"], "--host 203.0.113.1"),
    ],
)
def test_wrong_input_is_one_line(corpus: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main([word.format(corpus=corpus) for word in words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
