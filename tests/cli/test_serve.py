"""`treadle serve`: a process that clients talk to, until Ctrl-C; unmodified ones: tests/rollout/gateway."""

import asyncio
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.conftest import Trained
from tests.cli.worlds import ROOT, start_treadle, treadle
from tests.retrieval.servers import port_of, serving, write_corpus
from treadle.api.public import load_run
from treadle.cli.retrieve import main
from treadle.record.recorded import RecordedTrajectory
from treadle.retrieval.client import RetrievalClient


def test_it_serves_records_and_ends_cleanly(finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    model = f"{finished.path}@latest"
    file = tmp_path / "new" / "calls"
    with start_treadle("serve", model, "--port", "0", "--api-key-env=JUDGE_KEY", "--record", file) as server:
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
                refused = client.get("models", headers={"Authorization": "Bearer wrong"})
                assert refused.status_code == 401 and "use the key printed by treadle serve" in refused.text
                refused = client.post(f"{url.removesuffix('/v1')}/chat/completions", json=asked)
                assert refused.status_code == 404 and "the base URL ends in /v1" in refused.text
        except BaseException:
            server.kill()  # or leaving the context would wait for it
            raise
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate()
    assert (server.returncode, errors) == (0, "")
    assert rest == f"recorded: 1 calls of 1 trajectories, in {file}\n"
    [recorded] = load_run(file)
    assert isinstance(recorded, RecordedTrajectory) and recorded.reward is None
    [step] = recorded.trajectory.steps
    assert step.completion_ids.tolist() == answer["choices"][0]["token_ids"]
    assert (step.sampling.temperature, step.sampling.max_tokens) == (0.5, 3)


@pytest.mark.slow
def test_what_was_answered_survives_a_kill(finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's client; two sessions of OpenAI's, interleaved; killed while it samples; and learned."""
    monkeypatch.setenv("TREADLE_KEY", "secret")
    file, page = tmp_path / "sessions", (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    served: dict[str, list[tuple[list[int], list[int]]]] = {}
    with (
        start_treadle("serve", finished.path, "--port", "0", "--api-key-env=TREADLE_KEY", "--record", file) as process,
        ThreadPoolExecutor() as threads,
    ):
        try:
            assert process.stdout is not None
            [url] = re.findall(r"base URL +(\S+)", "".join(process.stdout.readline() for _ in range(4)))
            [program] = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "/sessions" in b)
            names: dict[str, Any] = {}
            exec(program.replace("http://127.0.0.1:8000/v1", url), names)
            server: httpx.Client = names["server"]
            sessions = [server.post("/sessions", json={"task_id": "sum"}).json() for _ in range(2)]
            with ExitStack() as stack:
                stack.callback(server.close)
                stack.callback(names["client"].close)
                clients = [
                    stack.enter_context(openai.OpenAI(base_url=s["base_url"], api_key="unused", max_retries=0))
                    for s in sessions
                ]
                talks: list[list[Any]] = [[{"role": "user", "content": f"say {n}"}] for n in range(2)]

                def ask(n: int, **more: Any) -> None:
                    extra = {"return_token_ids": True}
                    got: Any = clients[n].chat.completions.create(
                        model="any", messages=talks[n], extra_body=extra, **{"max_tokens": 4, **more}
                    )
                    ids = (got.prompt_token_ids, got.choices[0].token_ids)
                    served.setdefault(sessions[n]["id"], []).append(ids)
                    talks[n] += [got.choices[0].message, {"role": "user", "content": "again"}]

                for n in (0, 1, 1, 0, 1):
                    ask(n)
                for n, client in enumerate(clients):
                    assert client.post("/reward", body={"reward": n}, cast_to=object) == {}
                last = threads.submit(ask, 0, max_tokens=60)
                process.kill()
                with suppress(openai.APIConnectionError):
                    last.result()
        except BaseException:
            process.kill()
            raise
        process.communicate()
    recorded = load_run(file)
    assert all(isinstance(t, RecordedTrajectory) for t in recorded) and len(recorded) == 6
    found = {t.trajectory.trajectory_id: t for t in recorded if isinstance(t, RecordedTrajectory)}
    for n, session in enumerate(sessions):
        t = found[session["id"]]
        steps = [(step.prompt_ids.tolist(), step.completion_ids.tolist()) for step in t.trajectory.steps]
        assert steps[: len(served[session["id"]])] == served[session["id"]]
        assert (t.task_id, t.attempt, t.reward) == ("sum", n, n)
        assert all(len(step.logprobs) == len(step.completion_ids) for step in t.trajectory.steps)
    assert {t.task_id: t.attempt for t in recorded} == {"where-anna-lives": 3, "sum": 1}
    done = treadle(
        *("sft", finished.path, "--from", file, "--select", "reward >= 1", "--out", tmp_path / "better"),
        "warm_start.steps=1",
    )
    assert done.status == 0, done.err
    learned = json.loads((tmp_path / "better" / "sft.json").read_text())
    assert (learned["trajectories"], learned["inexact"]) == (1, 0)
    assert learned["tokens"] == sum(len(completion) for _, completion in served[sessions[1]["id"]])


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
        (["{corpus}", "--index", "e5_Flat.index"], "no model to embed queries"),
        (["{corpus}", "--host", "203.0.113.1", "--port", "0"], "--host 203.0.113.1"),
    ],
)
def test_wrong_input_is_one_line(corpus: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main([word.format(corpus=corpus) for word in words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
