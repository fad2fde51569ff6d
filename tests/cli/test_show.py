"""`treadle show`: exactly what is on record, token by token."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import SPELLED, SYSTEM, TRAJECTORIES, compacted, ids, record, text_of, treadle, whole
from tests.runs import shard_of, start
from tests.until import wait_until
from tests.worlds import END, chatml, tiny
from treadle.cli.main import main
from treadle.plan.inputs import load_inputs
from treadle.record.record import Record
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback


def test_json_is_what_the_shard_holds(finished: Trained) -> None:
    done = treadle("show", finished.path, "g000005.2", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    [row] = [r for r in pq.read_table(finished.path / "rollouts" / shard_of(finished.path, "g000005.2")).to_pylist()
             if r["trajectory_id"] == "g000005.2"]  # fmt: skip
    [only] = found["steps"]
    tokens = only["tokens"]
    assert [token["id"] for token in tokens] == row["completion_ids"]
    assert [token["policy_version"] for token in tokens] == row["policy_versions"] == [1] * len(tokens)
    assert [token["mask"] for token in tokens] == row["mask"]
    assert [token["logprob"] for token in tokens] == pytest.approx(row["logprobs"], abs=1e-6)
    assert only["prompt_tokens"] == only["new_prompt_tokens"] == len(row["prompt_ids"])
    tokenizer = Record.open(finished.path).tokenizer()
    assert only["new_prompt_text"] == tokenizer.decode(row["prompt_ids"], skip_special_tokens=False)
    assert found["status"] == "done" and found["reward"] == row["reward"]
    assert all(token["advantage"] == found["advantage"] for token in tokens)
    assert found["task"]["environment"] == "arithmetic"


def test_the_text_has_a_line_for_every_token(finished: Trained) -> None:
    found = json.loads(treadle("show", finished.path, "g000000.0", "--json").out)
    done = treadle("show", finished.path, "g000000.0")
    assert done.status == 0 and "\x1b" not in done.out
    lines = done.out.splitlines()
    assert lines[0].startswith("g000000.0   train, reward ")
    assert lines[1] == f"task {found['task']['task_id']}, environment arithmetic"
    [only] = found["steps"]
    assert f"step 0  prompt {only['prompt_tokens']} tokens ({only['prompt_tokens']} new), stop " in done.out
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("#")) + 2 :]
    for number, (line, token) in enumerate(zip(table, only["tokens"], strict=True)):
        assert line.split()[:2] == [str(number), str(token["id"])]
        assert repr(token["text"]) in line


def test_traced_tokens_show_what_the_learner_computed(tmp_path: Path) -> None:
    start(tmp_path / "run", "orchestration.traced_groups=1", "orchestration.updates=2")
    found = json.loads(treadle("show", tmp_path / "run", "g000000.0", "--json").out)
    printed = treadle("show", tmp_path / "run", "g000000.0").out
    traces = Record.open(tmp_path / "run").traces("g000000.0", 0)
    assert [step["update"] for step in found["steps"]] == [1, 1] == [trace.update for trace in traces]
    for step, trace in zip(found["steps"], traces, strict=True):
        tokens = step["tokens"]
        assert [t["learner_logprob"] for t in tokens] == pytest.approx(trace.logprobs.tolist(), abs=1e-6)
        assert [t["entropy"] for t in tokens] == pytest.approx(trace.entropy.tolist(), abs=1e-6)
        assert [t["advantage"] for t in tokens] == pytest.approx(trace.advantage.tolist(), rel=1e-6)
        assert [(t["ratio"], t["clipped"]) for t in tokens] == [(1.0, False)] * len(tokens)
        assert 0 <= step["waited"] <= step["seconds"] and step["started"] > 1.7e9
    assert printed.count(", traced in update 1\n") == 2 and re.search(
        r"#.*logprob.*learner +ratio +clipped +entropy", printed
    )
    evaluated = json.loads(treadle("show", tmp_path / "run", "e000002-0000.0", "--json").out)["steps"][0]
    assert evaluated["update"] is None and evaluated["tokens"][0]["learner_logprob"] is None
    assert "entropy" not in treadle("show", tmp_path / "run", "e000002-0000.0").out


def test_a_failed_trajectory_says_why(troubled: Trained) -> None:
    [failure] = json.loads(treadle("report", troubled.path, "--json").out)["failures"]
    done = treadle("show", troubled.path, failure["trajectory_id"])
    assert f"no reward, failed: environment: {failure['message']}" in done.out


def test_the_newest_trajectories(finished: Trained) -> None:
    done = treadle("show", finished.path)
    names = [line.split()[0] for line in done.out.splitlines()[2:]]
    assert len(names) == 20 and names[0] == "e000004g-0011.0"
    rows = json.loads(treadle("show", finished.path, "--json").out)
    assert [row["trajectory_id"] for row in rows] == names
    assert rows[0]["task_id"].startswith("arithmetic-held_out-") and rows[0]["status"] == "done"


def test_before_the_first_checkpoint_the_configured_tokenizer_is_used(finished: Trained, place: Place) -> None:
    shutil.copytree(finished.path, place.runs / "run")
    shutil.rmtree(place.runs / "run" / "checkpoints")
    assert treadle("show", place.runs / "run", "g000005.2").out == treadle("show", finished.path, "g000005.2").out


def test_how_each_step_relates_to_the_earlier_ones(broken: Path) -> None:
    done = treadle("show", broken, "g000000.0")
    assert (done.status, done.err) == (0, "")
    heads = re.findall(r"^step (\d)  prompt (\d+) tokens \((\d+) new\), .*\n(.*)$", done.out, re.MULTILINE)
    calls = TRAJECTORIES[0]
    ends = [len(whole(call)) for call in calls]
    opening, header = len(calls[0][0]), len(ids(chatml([SYSTEM], False) + "<|im_start|>"))
    shared = [0, ends[0], opening, header + len(ids("user\n")), ends[2], header, 0]
    assert [(int(step), int(prompt), int(new)) for step, prompt, new, _ in heads] == [
        (step, len(prompt), len(prompt) - known)
        for step, ((prompt, _), known) in enumerate(zip(calls, shared, strict=True))
    ]
    spelled, written = [*SPELLED, END], ids("page<|im_end|>\n<|im_start|>tool")
    kept, slid = ids("user\nWhat city?"), ids("tool\npage Acme,")
    assert [line for *_, line in heads if line.startswith(("break", "fork", "opens"))] == [
        f"break from step 1: tokenization at token {opening}, {min(ends[1], len(calls[2][0])) - opening} tokens "
        f"computed again: 'page<|im_end|>' {spelled} -> 'page<|im_end|>\\n<|im_start|>tool' {written}",
        f"fork: shares {shared[3]} tokens with step 2",
        f"break from step 4: truncated at token {header}, {min(ends[4], len(calls[5][0])) - header} tokens "
        f"computed again: 'user\\nWhat city?' {kept} -> 'tool\\npage Acme,' {slid}",
        "opens: shares nothing with the steps before it",
    ]
    steps = json.loads(treadle("show", broken, "g000000.0", "--json").out)["steps"]
    kinds = ["opens", "extends", "break", "fork", "extends", "break", "opens"]
    assert [step["relation"]["kind"] for step in steps] == kinds
    assert steps[2]["relation"]["was"] == {"ids": spelled, "text": "page<|im_end|>"}
    assert (steps[1]["relation"]["was"], steps[1]["relation"]["cause"]) == (None, None)
    assert [step["new_prompt_text"] for step in steps] == [
        text_of(prompt[known:]) for (prompt, _), known in zip(calls, shared, strict=True)
    ]


class Looks(Callback):
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys, self.out = path, capsys, ""

    def update(self, row: Mapping[str, Any]) -> None:
        if row["update"] == 2:
            written = json.loads((self.path / "status.json").read_text())["written"]
            wait_until(lambda: json.loads((self.path / "status.json").read_text())["written"] != written)
            self.capsys.readouterr()
            assert main(["top", str(self.path)]) == 0
            self.out = self.capsys.readouterr().out


@pytest.mark.quick(1)
def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    looks = Looks(path, capsys)
    inputs = load_inputs(tiny("orchestration.updates=3"))
    inputs.callbacks["looks"] = looks
    start(path, "orchestration.updates=3", inputs=inputs)
    lines = looks.out.splitlines()
    assert lines[0] == f"{path}: in progress, update 2 of 3"
    assert "versions: learner 2, published 2" in lines
    rows = {tuple(line.split()[:2]): line.split() for line in lines}
    assert rows["learner", "0"][2] == "0"
    assert rows["engine", "torch"][2:4] == ["0", "0"] and rows["engine", "torch"][-1] == "2"
    assert rows["rollout", "groups"][2:] == ["0", "0"] and rows["rollout", "attempts"][2:] == ["0"]
    assert rows["process", "of"][-1] == "MB" and rows["process", "of"][-3].endswith("%")


def test_a_run_that_has_finished(finished: Trained) -> None:
    done = treadle("top", finished.path)
    assert done.status == 0
    first, last = done.out.splitlines()
    assert first.endswith("run: finished, update 4 of 4")
    assert last.startswith("ended 20")


def test_a_run_that_was_killed_or_failed(finished: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "lock"):
        (run / name).write_bytes((finished.path / name).read_bytes())
    status = json.loads((finished.path / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "phase": "update"}))
    assert "during update" in treadle("top", run).out
    (run / "status.json").write_text(json.dumps({**status, "error": "RankError: \x1b[2Jgone"}))
    out = treadle("top", run).out
    assert "RankError: " in out and "gone" in out and "\x1b" not in out


def test_ranks_lost_engines_silence_and_the_last_message(
    finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((finished.path / "config.yaml").read_bytes())
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    nothing = dict.fromkeys(("process", "running", "waiting", "sessions", "cache", "version")) | {"error": ""}
    components = [
        {**nothing, "kind": "learner", "name": "0", "process": here, "running": 1},
        {**nothing, "kind": "learner", "name": "1", "process": {"host": "elsewhere", "pid": 1}, "running": 1},
        {**nothing, "kind": "engine", "name": "http://a", "sessions": 64, "running": 48, "waiting": 16, "cache": 0.875},
        {**nothing, "kind": "engine", "name": "http://b", "error": "it was killed"},
    ]
    status = json.loads((finished.path / "status.json").read_text())
    now = time.time()
    told = {"message": "task t, trajectory g0.1: gone", "message_at": now - 60, "written": now - 30}
    told |= {"phase": "rollout", "done": 3, "total": 64, "since": now - 90, "trained": 4, "published": 3}
    (run / "status.json").write_text(json.dumps({**status, **told, "process": here, "components": components}))
    monkeypatch.setattr(time, "time", lambda: now)
    holder = RunDirectory(run)
    holder.lock()
    try:
        out = treadle("top", run, "--once").out
    finally:
        holder.close()
    assert "versions: learner 4, published 3" in out
    assert "no status for 30 s, since rollout" in out
    assert "60 s ago: task t, trajectory g0.1: gone" in out
    assert "engine http://b: it was killed" in out
    [first, second] = [line.split() for line in out.splitlines() if line.startswith("learner")]
    assert first[-1] == "MB" and second == ["learner", "1", "1"]
    assert "88%" in out


def test_ctrl_c_ends_it_quietly(finished: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.cli.show.time.sleep", interrupt)
    done = treadle("top", finished.path)
    assert (done.status, done.out, done.err) == (0, "", "")


def test_segments_and_rejected_calls(tmp_path: Path) -> None:
    record(tmp_path / "run", compacted())
    lines = treadle("show", tmp_path / "run", "g000000.0").out.splitlines()
    assert lines[2] == "19 sampled tokens in 6 steps, and 6 in 2 that were not used"
    assert [line for line in lines if line.startswith(("segment", "rejected"))] == [
        "rejected: the summary is cut off",
        "segment 1  from the summary of step 3: 43 tokens in place of 84; cost: 2 calls, 11 tokens sampled, 63 read",
        "segment 2  shortened by environment or agent: 27 tokens in place of 59; cost: 26 read",
        "rejected: its answer was not used",
    ]
    assert sum(line.startswith(("step 2, summary  prompt", "step 3, summary  prompt")) for line in lines) == 2
    found = json.loads(treadle("show", tmp_path / "run", "g000000.0", "--json").out)
    assert [step["segment"] for step in found["steps"]] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [step["dropped"] for step in found["steps"]] == [None, None, "rejected", None, None, None, "rejected", None]
    assert [compaction["summary"] for compaction in found["compactions"]] == [3, None]
