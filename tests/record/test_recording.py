"""What `treadle serve --record` writes as clients call, and how it is read."""

import asyncio
import json
import re
import shutil
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
from treadle.core.config import build
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError, DamageError, RunError
from treadle.core.types import SamplingParams
from treadle.plan.config import RunConfig
from treadle.plan.inputs import IN_MEMORY
from treadle.record.image_files import name_of
from treadle.record.ledger_reader import OPEN_SHARD
from treadle.record.record import Record
from treadle.record.recorded import RecordedTrajectory
from treadle.record.recording import Recorder, Recording
from treadle.record.rollout_store import step_row
from treadle.record.run_directory import RunDirectory
from treadle.record.trajectory_files import read_files
from treadle.rendering.replies import hermes
from treadle.rollout.gateway.gateway import Access, Gateway
from treadle.rollout.gateway.serving import serving
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.view.app import make_app

TOKENIZER = ROOT / "src" / "treadle" / "recipes" / "tokenizer" / "tokenizer.json"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def recording(path: Path, tokenizer: Tokenizer | None = None) -> Recording:
    data = {"recipe": "serve", "data": {"train": {"source": IN_MEMORY}}, "model": {"path": str(TOKENIZER.parent)}}
    return Recording(path, build(RunConfig, data), tokenizer or Tokenizer.from_file(str(TOKENIZER)), "m")


def shards(path: Path) -> set[str]:
    """Names of the shards with the tokens of the trajectories."""
    rows = RunDirectory(path).ledger().query("SELECT DISTINCT shard FROM trajectories")
    return {row["shard"] for row in rows}


def messages(path: Path) -> list[list[str]]:
    """Contents of the messages of each call that has some, in order of trajectories."""
    chats = [step.chat for t in Record.open(path).trajectories() for step in t.trajectory.steps if step.chat]
    return [[message["content"] for message in (*chat.messages, chat.reply)] for chat in chats]


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
        return list(Record.open(self.path).trajectories())


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
            gateway.attach(opened("shared"), Access(opens=opens, recorder=Recorder(file)), "key")
            async with httpx.AsyncClient(timeout=CEILING, headers={"Authorization": "Bearer key"}) as http:
                yield Clients(http, path, engine, gateway)


def ids(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def test_sessions_and_their_rewards(tmp_path: Path) -> None:
    """Two sessions, interleaved, and a third that nobody rewards; what only the server's key may do."""
    async with clients(tmp_path / "a") as c:
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
    assert messages(c.path) == [["hi", "a0"], ["hi", "a0", "and?", "a2"], ["hi", "a1"], ["alone", "goa3"]]
    assert [list(step.chat.tools) for t in c.trajectories() for step in t.trajectory.steps if step.chat] == [
        *([], []),
        [TOOL],
        [],
    ]


async def test_conversations_of_one_key_are_told_apart(tmp_path: Path) -> None:
    """By the answers that prompts repeat; a reward names one of them."""
    async with clients(tmp_path / "a") as c:
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
    async with clients(tmp_path / "a") as c:
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


@pytest.mark.parametrize("per_shard", [1, 3, 256])
async def test_a_server_goes_on_with_a_run_and_shards_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_shard: int
) -> None:
    """Conversations that go on after a shard has them; a killed server; a clean end; a second server."""
    monkeypatch.setattr("treadle.record.recording._SHARD", per_shard)
    path = tmp_path / "a"
    async with clients(path) as c:
        base = (await c.post("sessions", task_id="t"))["base_url"]
        await c.say("hi", base=base, tools=[TOOL])
        await c.say("hi")
        await c.post("reward", base=base, reward=2)
        await c.say("hi", "a0", "and?", base=base)
        await c.say("hi", "a1", "more")
        before = described(path)
        assert [len(steps) for *_, steps in before] == [2, 2]
        assert OPEN_SHARD in shards(path)
        shutil.copytree(path, tmp_path / "killed")
        with pytest.raises(RunError, match="another process is recording in"):
            recording(path)
    assert described(path) == before and OPEN_SHARD not in shards(path)
    assert not RunDirectory(path).ledger().open_steps()
    assert described(tmp_path / "killed") == before
    async with clients(tmp_path / "killed") as c:
        assert described(c.path) == before and OPEN_SHARD not in shards(c.path)
        await c.say("hi", base=(await c.post("sessions", task_id="t"))["base_url"])
        after = c.trajectories()
    assert [(t.task_id == "t", t.attempt, t.reward) for t in after] == [
        (True, 0, 2.0),
        (True, 1, None),
        (False, 0, None),
    ]


def described(path: Path) -> list[Any]:
    """Everything of all trajectories of a run, bits included."""
    return [
        (
            t.trajectory.trajectory_id,
            t.task_id,
            t.attempt,
            t.reward,
            [str(step_row(s, name_of)) for s in t.trajectory.steps],
        )
        for t in Record.open(path).trajectories()
    ]


async def test_exports_have_what_clients_sent_and_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "a"
    async with clients(path) as c:
        base = (await c.post("sessions"))["base_url"]
        await c.say("hi", base=base, tools=[TOOL])
        await c.post("reward", base=base, reward=2)
        await c.say("hi")
    [t, _] = Record.open(path).trajectories()
    for name in ("b.jsonl", "b.parquet"):
        done = treadle("export-traces", path, tmp_path / name, "--format", name[2:], "--select", "reward >= 2")
        assert done.out == f"1 trajectories: {tmp_path / name}\n", done.err
        [exported] = read_files(tmp_path / name)
        assert isinstance(exported, RecordedTrajectory) and exported.reward == 2.0
        assert exported.trajectory.trajectory_id == t.trajectory.trajectory_id
        assert exported.trajectory.steps[0].completion_ids.tolist() == t.trajectory.steps[0].completion_ids.tolist()
    [line] = (tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(line)["tools"] == [TOOL]
    assert pq.read_table(tmp_path / "b.parquet")["messages"].to_pylist()[0][-1]["content"] == "a0"
    done = treadle("export-traces", path, tmp_path / "atif", "--format", "atif")
    assert done.status == 0 and len(list((tmp_path / "atif").glob("*.json"))) == 2
    done = treadle("export-traces", path, tmp_path / "all.jsonl", "--select", "status == unrated")
    assert done.out.startswith("1 trajectories")


async def test_an_answer_that_cannot_be_recorded_is_not_given(tmp_path: Path) -> None:
    file = recording(tmp_path / "a")
    async with clients(tmp_path / "a", file) as c:
        [pages] = file._ledger.query("PRAGMA page_count")
        with file._ledger.transaction() as db:
            db.execute(f"PRAGMA max_page_count = {pages['page_count']}")
        messages = [{"role": "user", "content": "hi"}]
        got = await c.post("chat/completions", 503, messages=messages)
        assert "could not record in" in got["error"]["message"] and "disk is full" in got["error"]["message"]
        assert c.trajectories() == []
        with file._ledger.transaction() as db:
            db.execute("PRAGMA max_page_count = 1000000")
        await c.say("hi")
        assert [len(t.trajectory.steps) for t in c.trajectories()] == [1]


def test_only_a_recorded_run_with_the_same_vocabulary_is_recorded_into(tmp_path: Path) -> None:
    recording(tmp_path / "a").close()
    other = Tokenizer.from_str(TOKENIZER.read_text())
    other.add_tokens(["<|other|>"])
    with pytest.raises(ConfigError, match="was recorded with another vocabulary; name another directory"):
        recording(tmp_path / "a", other)
    recording(tmp_path / "a").close()  # it is not locked
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is already in use"):
        recording(tmp_path / "b")
    tokenizer = tmp_path / "a" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|im_END|>"))
    with pytest.raises(DamageError, match=r"tokenizer\.json"):
        list(Record.open(tmp_path / "a").trajectories())


async def test_what_was_recorded_is_shown_as_a_run_is(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    async with clients(path) as c:
        session = await c.post("sessions", task_id="sum")
        await c.say("say 1", base=session["base_url"])
        await c.say("say 1", "1", "again", base=session["base_url"])
        await c.post("reward", base=session["base_url"], reward=0.5)
        await c.say("another")
    unrated = c.trajectories()[1].trajectory.trajectory_id
    listed = treadle("show", path)
    assert (listed.status, listed.err) == (0, "")
    assert [line.split()[:3] for line in listed.out.splitlines()[-2:]] == [
        [unrated, c.trajectories()[1].task_id, "unrated"],
        [session["id"], "sum", "done"],
    ]
    shown = treadle("show", path, session["id"], "--json")
    steps = json.loads(shown.out)["steps"]
    assert [[token["id"] for token in step["tokens"]] for step in steps] == [
        step.completion_ids.tolist() for step in c.trajectories()[0].trajectory.steps
    ]
    report = json.loads(treadle("report", path, "--json").out)
    assert [row["trajectories"] for row in report["splits"]] == [2]
    assert f"{unrated}   train, no reward, unrated\n" in treadle("show", path, unrated).out
    lines = treadle("report", path).out.splitlines()
    assert lines[0] == f"{path}: recorded trajectories"
    assert [line.split()[-4:] for line in lines if "statuses" in line] == [["unrated", "1,", "done", "1"]]
    assert not [line for line in lines if re.search("update|checkpoint|resume|failed|stopped", line)]
    with TestClient(make_app([path])) as view:
        page = view.get("/api/runs/calls").json()
        assert (page["state"], page["problems"]) == ("recorded", [])
        assert page["no_update"] == "Recorded trajectories, which are not trained."
        assert view.get("/api/runs/calls/counts").json()["failures"] == []
        attempt = view.get(f"/api/runs/calls/trajectories/{unrated}").json()["attempt"]
        assert (attempt["status"], attempt["failure_message"]) == ("unrated", None)
        groups = view.get("/api/runs/calls/groups").json()["rows"]
        assert {group["when"] for group in groups} == {"no update: recorded, not trained"}
    done = treadle("sft", "--from", path, "--out", tmp_path / "model")
    assert done.status == 1 and "has recorded trajectories, but no checkpoint; name another run, a recipe" in done.err
    (tmp_path / "x.jsonl").write_text("{}\n")
    done = treadle("show", tmp_path / "x.jsonl")
    assert done.status == 1 and "is a file, not a run directory; treadle sft --from" in done.err
