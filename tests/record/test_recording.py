"""What `treadle serve --record` writes as clients call, and how it is read."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from tests.cli.worlds import ROOT, treadle
from tests.rollout.gateway.servers import Slow, scripted
from tests.until import CEILING, until
from tests.worlds import plain_renderer
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError
from treadle.core.types import SamplingParams
from treadle.plan.file_as_run import file_as_run
from treadle.record.recorded import RecordedTrajectory
from treadle.record.recording import Recorder, Recording
from treadle.record.trajectory_files import read_files, read_records, write_records
from treadle.rendering.replies import hermes
from treadle.rollout.gateway.gateway import Gateway
from treadle.rollout.gateway.serving import serving
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.view.app import make_app

TOKENIZER = ROOT / "src" / "treadle" / "recipes" / "tokenizer" / "tokenizer.json"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def recording(path: Path) -> Recording:
    return Recording(path, Tokenizer.from_file(str(TOKENIZER)), str(TOKENIZER.parent))


def read(path: Path) -> list[RecordedTrajectory]:
    recorded = list(read_files(path))
    assert all(isinstance(t, RecordedTrajectory) for t in recorded)
    return recorded  # type: ignore[return-value]


class Clients:
    """Talk to a gateway with a key that opens recorded sessions."""

    def __init__(self, http: httpx.AsyncClient, path: Path, engine: Slow, gateway: Gateway) -> None:
        self.http, self.path, self.engine, self.gateway = http, path, engine, gateway

    async def post(self, where: str, status: int = 200, /, base: str = "", **body: Any) -> Any:
        headers = body.pop("headers", {})
        got = await self.http.post(f"{base or self.gateway.url + '/v1'}/{where}", json=body, headers=headers)
        assert got.status_code == status, got.text
        return got.json()

    async def say(self, *texts: str, base: str = "", **more: Any) -> Any:
        """Ask with user and assistant in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        return await self.post("chat/completions", base=base, messages=messages, return_token_ids=True, **more)

    def trajectories(self) -> list[RecordedTrajectory]:
        return read(self.path)


@asynccontextmanager
async def clients(path: Path, file: Recording | None = None) -> AsyncIterator[Clients]:
    """The engine answers `a0`, `a1`, ..., by the number of the call."""
    engine, file, gateway = Slow(scripted(lambda prompt, number: f"a{number}")), file or recording(path), Gateway()

    def opened(name: str) -> Session:
        address = Address(0, Stream.SERVE, 0, 0, 0)
        spec = SessionSpec(name, engine, plain_renderer(), SamplingParams(max_tokens=50), 5_000, address)
        return Session(spec, hermes, callers_sampling=True)

    numbers = iter(range(99))

    def opens(task_id: str) -> tuple[Session, Recorder]:
        return opened(f"s{next(numbers)}"), Recorder(file, task_id)

    with closing(file):
        async with serving(gateway):
            gateway.attach(opened("shared"), "key", Recorder(file), opens)
            async with httpx.AsyncClient(timeout=CEILING, headers={"Authorization": "Bearer key"}) as http:
                yield Clients(http, path, engine, gateway)


def ids(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def test_sessions_and_their_rewards(tmp_path: Path) -> None:
    """Two sessions, interleaved, and a third that nobody rewards; what only the server's key may do."""
    async with clients(tmp_path / "a.jsonl") as c:
        one, two, three = [await c.post("sessions", task_id=name) for name in ("t", "t", "")]
        first = await c.say("hi", base=one["base_url"])
        other = await c.say("hi", base=two["base_url"], tools=[TOOL])
        second = await c.say("hi", "a0", "and?", base=one["base_url"])
        await c.say("alone", "go", base=three["base_url"], continue_final_message=True)
        await c.post("reward", base=one["base_url"], reward=0.5)
        await c.post("reward", base=one["base_url"], reward=1)
        a, b, unrewarded = c.trajectories()
        assert [t.trajectory.trajectory_id for t in (a, b, unrewarded)] == [one["id"], two["id"], three["id"]]
        assert [(t.task_id, t.attempt, t.reward) for t in (a, b)] == [("t", 0, 1.0), ("t", 1, None)]
        assert unrewarded.task_id == three["id"]
        assert [step.completion_ids.tolist() for step in a.trajectory.steps] == [ids(first), ids(second)]
        assert [step.prompt_ids.tolist() for step in a.trajectory.steps] == [
            answer["prompt_token_ids"] for answer in (first, second)
        ]
        assert all((step.logprobs <= 0).all() and step.mask.all() for step in a.trajectory.steps)
        assert [step.completion_ids.tolist() for step in b.trajectory.steps] == [ids(other)]
        await c.post("close", base=one["base_url"])
        await c.post("reward", 404, base=one["base_url"], reward=1)
        await c.post("sessions", 404, base=two["base_url"])
        await c.post("close", 404)
        for wrong in ({}, {"reward": "1"}, {"reward": 1e13}):
            assert "reward" in (await c.post("reward", 400, base=two["base_url"], **wrong))["error"]["message"]
    rows = [json.loads(line) for line in c.path.read_text().splitlines()]
    said = [[message["content"] for message in row.get("messages", ())] for row in rows]
    assert said == [["hi", "a0"], ["hi", "a1"], ["hi", "a0", "and?", "a2"], ["alone", "goa3"], [], []]
    assert [row.get("tools") for row in rows] == [[], [TOOL], [], [], None, None]


async def test_conversations_of_one_key_are_told_apart(tmp_path: Path) -> None:
    """By the answers that prompts repeat; a reward names one of them."""
    async with clients(tmp_path / "a.jsonl") as c:
        one, two = await c.say("hi"), await c.say("hi")
        await c.say("hi", "a1", "more")  # of the second
        last = await c.say("hi", "a0", "more")
        await c.say("hello", "a0", "more")  # the same answer to another question
        await c.post("completions", prompt="raw")
        await c.say("both", n=2)
        assert "id: this key" in (await c.post("reward", 400, reward=1))["error"]["message"]
        assert "'no'" in (await c.post("reward", 400, reward=1, id="no"))["error"]["message"]
        await c.post("reward", reward=1, id=last["id"])
        await c.say("hi", "a0", "more", "a3", "again")  # later calls keep it
        found = c.trajectories()
    lengths = {len(t.trajectory.steps): t for t in found}
    assert sorted(len(t.trajectory.steps) for t in found) == [1, 1, 1, 1, 2, 3]
    assert lengths[3].trajectory.steps[0].completion_ids.tolist() == ids(one)
    assert lengths[2].trajectory.steps[0].completion_ids.tolist() == ids(two)
    assert [t.reward for t in found if t.reward is not None] == [lengths[3].reward] == [1.0]


async def test_what_became_of_calls(tmp_path: Path) -> None:
    """Nobody got the answer; it was thrown away, and then it was not."""
    async with clients(tmp_path / "a.jsonl") as c:
        session = await c.post("sessions")
        base, attached = session["base_url"], c.gateway.find(session["api_key"])
        assert attached is not None
        exchanges = attached.exchanges
        thrown = await c.say("hi", base=base)
        verdict = {"x-treadle-rejects": thrown["id"]}
        await c.say("hi", base=base, headers=verdict)
        [t] = c.trajectories()
        assert [step.dropped for step in t.trajectory.steps] == ["rejected", None]
        await c.say("hi", "a1", "so", base=base, headers={"x-treadle-accepts": thrown["id"]})
        [t] = c.trajectories()
        assert [step.dropped for step in t.trajectory.steps] == [None, None, None]
        c.engine.gate.clear()
        hangs_up = asyncio.ensure_future(c.say("late", base=base))
        await until(lambda: exchanges._running)
        hangs_up.cancel()
        await until(lambda: not sum(exchange.waiting for exchange in exchanges._running))
        c.engine.gate.set()
        await until(lambda: [s.dropped for s in c.trajectories()[0].trajectory.steps][3:] == ["cancelled"])
    rows = [json.loads(line) for line in c.path.read_text().splitlines()]
    changes = ["call", "rejected", "call", None, "call", "call", "cancelled"]
    assert [row.get("dropped", "call") for row in rows] == changes


async def test_files_are_put_together_and_exported(tmp_path: Path) -> None:
    """By another server, after a kill within a line; exports have a line a trajectory, and are read alike."""
    path = tmp_path / "a.jsonl"
    async with clients(path) as c:
        base = (await c.post("sessions"))["base_url"]
        await c.say("hi", base=base, tools=[TOOL])
        await c.post("reward", base=base, reward=2)
        await c.say("hi")
    whole = path.read_bytes()
    for cut in (1, 5, 40, 2000):
        path.write_bytes(whole + whole[:cut])
        assert [t.reward for t in read(path)] == [2.0, None]
    async with clients(path) as c:
        assert path.read_bytes() == whole
        await c.say("hi", base=(await c.post("sessions"))["base_url"])
        with pytest.raises(ConfigError, match="another server records into this file"):
            recording(path)
    assert [t.reward for t in read(path)] == [2.0, None, None]
    for name in ("b.jsonl", "b.parquet"):
        done = treadle("export-traces", path, tmp_path / name, "--format", name[2:], "--select", "reward >= 2")
        assert done.out == f"1 trajectories: {tmp_path / name}\n", done.err
        [exported], [t, *_] = read(tmp_path / name), read(path)
        assert exported.reward == 2.0 and exported.trajectory.trajectory_id == t.trajectory.trajectory_id
        assert exported.trajectory.steps[0].completion_ids.tolist() == t.trajectory.steps[0].completion_ids.tolist()
    [line] = (tmp_path / "b.jsonl").read_text().splitlines()
    assert "part" not in json.loads(line) and json.loads(line)["tools"] == [TOOL]
    assert pq.read_table(tmp_path / "b.parquet")["messages"].to_pylist()[0][-1]["content"] == "a0"
    done = treadle("export-traces", path, tmp_path / "atif", "--format", "atif")
    assert done.status == 2 and "ATIF can only be written for runs" in done.error


async def test_an_answer_that_cannot_be_recorded_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = recording(tmp_path / "a.jsonl")

    class Full:
        def __init__(self, inner: Any) -> None:
            self.inner, self.room = inner, 50

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(28, "No space left on device")
            data, self.room = data[: self.room], self.room - len(data[: self.room])
            return int(self.inner.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    async with clients(tmp_path / "a.jsonl", file) as c:
        with monkeypatch.context() as patch:
            patch.setattr(file, "_file", Full(file._file))
            messages = [{"role": "user", "content": "hi"}]
            got = await c.post("chat/completions", 503, messages=messages)
            assert "could not record in" in got["error"]["message"] and "No space left" in got["error"]["message"]
        assert c.path.read_bytes() == b""
        await c.say("hi")
        assert [len(t.trajectory.steps) for t in c.trajectories()] == [1]


async def test_a_recorded_file_is_shown_as_a_run_is(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with clients(path) as c:
        session = await c.post("sessions", task_id="sum")
        await c.say("say 1", base=session["base_url"])
        await c.say("say 1", "1", "again", base=session["base_url"])
        await c.post("reward", base=session["base_url"], reward=0.5)
        await c.say("another")
    unrated = read(path)[1].trajectory.trajectory_id
    listed = treadle("show", path)
    assert (listed.status, listed.err) == (0, "")
    assert [line.split()[:3] for line in listed.out.splitlines()[-2:]] == [
        [unrated, read(path)[1].task_id, "unrated"],
        [session["id"], "sum", "done"],
    ]
    shown = treadle("show", path, session["id"], "--json")
    steps = json.loads(shown.out)["steps"]
    assert [[token["id"] for token in step["tokens"]] for step in steps] == [
        step.completion_ids.tolist() for step in read(path)[0].trajectory.steps
    ]
    report = json.loads(treadle("report", path, "--json").out)
    assert [row["trajectories"] for row in report["splits"]] == [2]
    assert f"{unrated}   train, no reward, unrated\n" in treadle("show", path, unrated).out
    lines = treadle("report", path).out.splitlines()
    assert lines[0] == f"{path}: recorded trajectories"
    assert [line.split()[-4:] for line in lines if "statuses" in line] == [["unrated", "1,", "done", "1"]]
    assert not [line for line in lines if re.search("update|checkpoint|resume|failed|stopped", line)]
    with TestClient(make_app([file_as_run(path)])) as view:
        page = view.get("/api/runs/calls.jsonl").json()
        assert (page["state"], page["problems"]) == ("recorded", [])
        assert page["no_update"] == "Trajectories of a file, which has no updates."
        assert view.get("/api/runs/calls.jsonl/counts").json()["failures"] == []
        attempt = view.get(f"/api/runs/calls.jsonl/trajectories/{unrated}").json()["attempt"]
        assert (attempt["status"], attempt["failure_message"]) == ("unrated", None)
        groups = view.get("/api/runs/calls.jsonl/groups").json()["rows"]
        assert {group["when"] for group in groups} == {"no update: trajectories of a file"}
    write_records(path, "jsonl", [record for _, record in read_records(path)] * 2)
    assert_refused(path, f"{path}:3: trajectory {session['id']} is at {path}:1, too")
    path.write_text("")
    assert_refused(path, "has no trajectories yet")


def assert_refused(path: Path, why: str) -> None:
    done = treadle("show", path)
    assert done.status == 2 and why in done.err, done.err
