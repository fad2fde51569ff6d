"""`treadle eval --url`: held-out tasks with a model that others serve, without PyTorch, and what shows the result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from fastapi.testclient import TestClient

from tests.cli.worlds import treadle
from tests.judge.servers import JudgeServer, judging
from treadle.view.app import make_app

RECIPE = ("tools-small", "model.path=/nowhere", "model.build=null", "data.held_out.options.count=8")
KEY = "sk-a-key-that-is-nobodys"


def script(messages: list[dict[str, Any]]) -> Any:
    """Look up what tea costs; 500 for a customer."""
    if "cost" not in messages[0]["content"]:
        return 400
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    item = messages[0]["content"].split()[2]
    call = {"id": "1", "function": {"name": "price", "arguments": json.dumps({"item": item})}}
    return json.dumps({"choices": [{"message": {"content": None, "tool_calls": [call]}}]}).encode()


def evaluate(server: JudgeServer, *words: object) -> Any:
    quick = "failures.causes={engine: {retries: 0}}"
    return treadle("eval", *RECIPE, quick, "--url", server.url, "--model", "m", "--json", *words)


def test_the_result_and_all_that_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    dump = tmp_path / "new" / "played"
    with judging(script) as server:
        done = evaluate(server, "--limit", 4, "--dump", dump, "--api-key-env", "SOME_KEY", "data.table_by=null")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["model"] == f"m at {server.url}"
    result = found["result"]
    assert (result["tasks"], result["failed"], result["success"], result["steps_mean"]) == (4, 2, 1.0, 2.0)
    assert found["failures"] == {"engine: status 400: {}": 2}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert not [file for file in dump.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert KEY not in done.out + done.err

    report = treadle("report", dump)
    assert report.status == 0, report.err
    [statuses] = (line.split("statuses")[1] for line in report.out.splitlines() if "statuses" in line)
    assert sorted(statuses.strip().split(", ")) == ["done 2", "failed 2"]
    assert "failed 2x engine" in report.out and "tokenizer" not in report.out
    shown = treadle("show", dump, "evaluation-0001.0")
    assert shown.status == 0, shown.err
    for line in ("  <tool_call>price {", "  <|im_start|>tool", "model m", "reward 1, done"):
        assert line in shown.out
    assert "break" not in shown.out

    client = TestClient(make_app([dump]), base_url="http://127.0.0.1")
    [run] = client.get("/api/runs").json()["runs"]
    view = client.get(f"/api/runs/{run['key']}/trajectories/evaluation-0001.0").json()
    assert view["problem"] is None and [step["counted"]["written"] for step in view["steps"]] == [0, 7]
    spans = [(span["role"], span["kind"]) for span in view["steps"][1]["spans"] if span["kind"] != "template"]
    assert spans == [("user", "text"), ("assistant", "call"), ("tool", "text"), ("assistant", "text")]
    learned = treadle("sft", "tools-small", "--from", dump, "--out", tmp_path / "model")
    assert learned.status == 2 and "none of 0 training trajectories is selected" in learned.err


def test_no_pytorch_is_loaded() -> None:
    program = (
        "import sys; from treadle.cli.main import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    with judging(lambda m: "7") as server:
        words = ["eval", *RECIPE, "--url", server.url, "--model", "m", "--limit", "2"]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--url", "http://127.0.0.1:1/v1"), "--url needs --model, the model's name there"),
        (("--url", "there", "--model", "m"), "is not an address that begins with http:// or https://"),
        (("--url", "http://a/v1", "--model", "m", "--api-key-env", "NO_SUCH"), "'NO_SUCH' for the key is not set"),
        (("--url", "http://a/v1", "--model", "m", "--request", "{"), "is not JSON"),
        (("--url", "http://a/v1", "--model", "m", "--request", "[]"), "options"),
        (("--url", "http://a/v1", "--model", "m", "--limit", "0"), "--limit 0: it must be at least 1"),
        (("--url", "http://a/v1", "--model", "m", "--timeout", "0"), "timeout"),
        (("--url", "http://a/v1", "--model", "m", "--concurrency", "0"), "--concurrency 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(words: tuple[str, ...], error: str) -> None:
    done = treadle("eval", *RECIPE, *words)
    assert done.status == 2 and error in done.err


def test_replies_that_are_cut_at_the_recipes_limit_are_named() -> None:
    cut = json.dumps({"choices": [{"message": {"content": "one two"}, "finish_reason": "length"}]}).encode()
    with judging(lambda m: cut) as server:
        done = evaluate(server, "--limit", 2)
    assert done.status == 0 and "2 of 2 replies were cut off at the token limit" in done.err
    assert json.loads(done.out)["result"]["failed"] == 0
