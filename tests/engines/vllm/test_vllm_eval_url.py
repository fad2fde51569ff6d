"""A model behind a real vLLM server plays held-out tasks as it does in process: greedily, with the same replies."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.worlds import treadle
from tests.engines.vllm.conftest import Servers, started

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

TASKS = 24


def test_it_plays_as_in_process(servers: Servers, tmp_path: Path) -> None:
    server = servers["tied"]
    asyncio.run(started(server.process))
    settings = ("evaluation.temperature=0", "data.held_out.options.count=24", "evaluation.max_completion_tokens=40")
    subjects = {"own": ("--model", server.model), "url": ("--url", f"{server.url}/v1", "--model", "policy")}
    said: dict[str, list[list[str]]] = {}
    for name, subject in subjects.items():
        dump, file = tmp_path / name, tmp_path / f"{name}.jsonl"
        done = treadle("eval", "demo", *settings, *subject, "--dump", dump, "--json")
        assert done.status == 0, done.err
        assert json.loads(done.out)["result"]["failed"] == 0
        assert treadle("export-traces", dump, file).status == 0
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        said[name] = [
            [json.loads(s["chat"])["reply"]["content"] if s["chat"] else s["completion"] for s in row["steps"]]
            for row in rows
        ]
        assert all(step["stop_reason"] in ("stop", "length") for row in rows for step in row["steps"])
    assert len(said["own"]) == len(said["url"]) == TASKS
    for own, url in zip(said["own"], said["url"], strict=True):  # an end token is no text of a chat completion
        assert all(mine.startswith(theirs) for mine, theirs in zip(own, url, strict=True))
    assert any(texts != [""] for texts in said["url"])


def test_what_it_refuses_is_a_failure_by_name(servers: Servers) -> None:
    """This server reads no tool calls, and says so."""
    server = servers["tied"]
    asyncio.run(started(server.process))
    quick = ("data.held_out.options.count=2", "failures.causes={engine: {retries: 0}}")
    done = treadle("eval", "tools-small", *quick, "--url", f"{server.url}/v1", "--model", "policy", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert (found["result"]["failed"], found["result"]["reward_mean"]) == (2, None)
    [(message, count)] = found["failures"].items()
    assert count == 2 and message.startswith("engine: status 400") and "tool-call-parser" in message
