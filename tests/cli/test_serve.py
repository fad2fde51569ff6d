"""`treadle serve`: a process that clients talk to, until Ctrl-C; unmodified ones: tests/rollout/gateway."""

import asyncio
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Trained
from tests.cli.worlds import start_treadle
from tests.retrieval.servers import port_of, serving, write_corpus
from treadle.cli.retrieve import main
from treadle.core.files import WrittenFile
from treadle.models.loading import file_sha256
from treadle.orchestration.store.rollout_store import read_shard
from treadle.retrieval.client import RetrievalClient


def test_it_serves_records_and_ends_cleanly(finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    model = f"{finished.path}@latest"
    with start_treadle("serve", model, "--port", "0", "--api-key-env=JUDGE_KEY", "--record", tmp_path) as server:
        try:
            assert server.stdout is not None
            told = "".join(server.stdout.readline() for _ in range(4))
            [url], key = re.findall(r"base URL +(\S+)", told), "secret"
            assert "API key   $JUDGE_KEY\n" in told
            assert url.startswith("http://127.0.0.1:")
            assert "replies   read by auto\n" in told
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300) as client:
                assert [m["id"] for m in client.get("models").json()["data"]] == ["run@latest"]
                message = {"role": "user", "content": "say 1"}
                asked = {"model": "any", "messages": [message], "max_tokens": 3, "temperature": 0.5}
                answer = client.post("chat/completions", json={**asked, "return_token_ids": True}).json()
                for wrong, said in (
                    ({"prompt": "say", "frequency_penalty": 1}, "frequency_penalty"),
                    ({"prompt": "say " * 128}, "tokens, the model's context is 128; shorten the prompt"),
                ):
                    refused = client.post("completions", json={"model": "any", **wrong})
                    assert (refused.status_code, said in refused.text) == (400, True)
        except BaseException:
            server.kill()  # or leaving the context would wait for it
            raise
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate()
    assert (server.returncode, errors) == (0, "")
    assert re.search(r"^steps: 1, in .*serve-000000.parquet$", rest.strip())
    name = "serve-000000.parquet"
    [steps] = read_shard(tmp_path, WrittenFile(name, file_sha256(tmp_path / name))).values()
    assert [step.completion_ids.tolist() for step in steps] == [answer["choices"][0]["token_ids"]]
    assert (steps[0].sampling.temperature, steps[0].sampling.max_tokens) == (0.5, 3)


pytest.importorskip("bm25s")


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
