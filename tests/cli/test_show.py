"""`treadle show`: exactly what is on record, token by token."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import treadle
from treadle.cli.show import as_json
from treadle.cli.transcript import known_tokens, load_run_tokenizer
from treadle.core.types import SamplingParams, Step, StopReason


def step(prompt: list[int], completion: list[int], version: int = 0) -> Step:
    size = len(completion)
    return Step(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(size, -0.5, np.float32),
        policy_versions=np.full(size, version, np.int32),
        sampling=SamplingParams(),
        stop_reason=StopReason.STOP,
    )


def test_json_is_what_the_shard_holds(finished: Trained) -> None:
    done = treadle("show", finished.path, "g000005.2", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    [row] = [r for r in pq.read_table(finished.path / "rollouts" / "train-g000004.parquet").to_pylist()
             if r["trajectory_id"] == "g000005.2"]  # fmt: skip
    [only] = found["steps"]
    tokens = only["tokens"]
    assert [token["id"] for token in tokens] == row["completion_ids"]
    assert [token["policy_version"] for token in tokens] == row["policy_versions"] == [1] * len(tokens)
    assert [token["mask"] for token in tokens] == row["mask"]
    assert [token["logprob"] for token in tokens] == pytest.approx(row["logprobs"], abs=1e-6)
    assert only["prompt_tokens"] == only["new_prompt_tokens"] == len(row["prompt_ids"])
    tokenizer = load_run_tokenizer(finished.path)
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


def test_greedy_tokens_are_masked_and_have_no_advantage(finished: Trained) -> None:
    found = json.loads(treadle("show", finished.path, "e000004g-0003.0", "--json").out)
    assert found["split"] == "held_out" and found["advantage"] is None
    assert {(t["mask"], t["advantage"]) for s in found["steps"] for t in s["tokens"]} == {(False, None)}


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


def test_an_unknown_trajectory_names_some_that_exist(finished: Trained) -> None:
    done = treadle("show", finished.path, "g999999.0")
    assert (done.status, done.out) == (1, "")
    assert "no trajectory 'g999999.0'" in done.error and "for example e000004g-0011.0" in done.error


def test_a_shard_that_is_gone(finished: Trained, place: Place) -> None:
    shutil.copytree(finished.path, place.runs / "run")
    (place.runs / "run" / "rollouts" / "train-g000004.parquet").unlink()
    done = treadle("show", place.runs / "run", "g000005.2")
    assert done.status == 1 and "train-g000004.parquet, which is gone" in done.error


def test_before_the_first_checkpoint_the_configured_tokenizer_is_used(finished: Trained, place: Place) -> None:
    shutil.copytree(finished.path, place.runs / "run")
    shutil.rmtree(place.runs / "run" / "checkpoints")
    assert treadle("show", place.runs / "run", "g000005.2").out == treadle("show", finished.path, "g000005.2").out


def test_what_an_earlier_step_held_is_not_new() -> None:
    steps = [
        step([1, 2], [3]),
        step([1, 2, 3, 4], [5]),  # continues
        step([1, 2, 9], [6]),  # a fork: shares two tokens with the first
        step([1, 2, 3, 4, 5, 7], [8]),  # goes on behind the second
        step([6, 6], [6]),  # shares nothing
    ]
    # As many tokens in common with two earlier steps: the later one is named.
    assert [known_tokens(steps, n) for n in range(5)] == [(0, None), (3, 0), (2, 1), (5, 1), (0, None)]


def test_a_break_and_what_is_not_trained_are_shown(finished: Trained) -> None:
    row = {"advantage": 0.5, "task": "{}", "trajectory_id": "g0.0"}
    untrained = replace(step([40, 41], [42]), mask=np.array([False]))
    found = as_json(row, [untrained, step([50, 51, 52], [53], version=3)], load_run_tokenizer(finished.path))
    first, second = found["steps"]
    assert (first["appends"], second["appends"]) == (False, False)
    assert (second["continues"], second["new_prompt_tokens"]) == (None, 3)
    assert first["tokens"][0]["advantage"] is None and not first["tokens"][0]["mask"]
    assert second["tokens"][0]["advantage"] == 0.5 and second["tokens"][0]["policy_version"] == 3
