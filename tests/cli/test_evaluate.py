"""`treadle eval`: the run's own figures again, and what it says where something is wrong."""

import itertools
import json
import re

import pytest
from transformers import AutoTokenizer

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import files, treadle
from treadle.orchestration.store.run_directory import RunDirectory


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("checkpoint", [None, "step-000002"])
def test_it_gives_exactly_what_the_run_recorded(temperature: float, checkpoint: str | None, finished: Trained) -> None:
    update = int(checkpoint[5:]) if checkpoint else 4
    rows = RunDirectory.open(finished.path).metrics()
    recorded = [
        row
        for row in rows
        if row.pop("kind") == "evaluation" and (row["update"], row["temperature"]) == (update, temperature)
    ]
    if temperature == 0 and checkpoint:
        assert recorded == []  # greedily only before and after
        return
    before = files(finished.path)
    words = ["--checkpoint", checkpoint] if checkpoint else []
    done = treadle("eval", finished.path, f"evaluation.temperature={temperature}", "--json", *words)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert [found["result"]] == recorded
    assert found["model"] == str(finished.path / "checkpoints" / f"step-{update:06d}")
    assert files(finished.path) == before


def test_the_table(finished: Trained) -> None:
    done = treadle("eval", finished.path, "data.held_out.options.count=5")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["a", "tasks", "success", "reward", "steps", "failed"]
    rows = [line.split() for line in lines[2:] if line[:1].isdigit()]
    assert sum(int(row[1]) for row in rows) == 5
    [whole] = [line.split() for line in lines if line.startswith("all")]
    assert whole[1] == "5" and whole[4:] == ["1.00", "0"]
    assert "temperature 1, success is a reward >= 1" in lines
    assert "\x1b" not in done.out


def test_a_model_on_a_recipes_tasks(finished: Trained) -> None:
    model = finished.path / "checkpoints" / "step-000004"
    for subject in (finished.place.recipe, finished.path):
        done = treadle("eval", subject, "--model", model, "--json")
        assert done.status == 0, done.err
        assert json.loads(done.out)["result"]["tasks"] == 12


def test_failed_attempts_are_counted_and_explained(troubled: Trained) -> None:
    done = treadle("eval", troubled.path)
    assert done.status == 0, done.err
    assert re.search(r"^failed \dx: environment: step raised ZeroDivisionError: \d+ leaves one over$", done.out, re.M)
    [whole] = [line.split() for line in done.out.splitlines() if line.startswith("all")]
    assert int(whole[-1]) > 0


WRONG = {
    "no such recipe": (["nope", "--model", "/nowhere"], 2, "no recipe 'nope'"),
    "no such checkpoint": (["RUN", "--checkpoint", "step-000009"], 1, "it has step-000002, step-000004"),
    "unknown key": (["RUN", "evaluation.temprature=0"], 2, "did you mean 'evaluation.temperature'?"),
    "tasks of Python": (["RUN", "data.held_out.source=in memory"], 2, "give data.held_out.source=FILE.jsonl"),
    "long prompts": (["RUN", "rollout.max_input_tokens=4"], 2, "rollout.max_input_tokens is 4; raise it"),
}


@pytest.mark.parametrize(("words", "status", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input(words: list[str], status: int, message: str, finished: Trained) -> None:
    done = treadle("eval", *(str(finished.path) if word == "RUN" else word for word in words))
    assert (done.status, done.out) == (status, "")
    assert done.error.startswith("error: ") and message in done.error


def test_several_attempts_give_pass_at_k_and_keep_the_first(finished: Trained, place: Place) -> None:
    dumps = {attempts: place.path / f"{attempts}.jsonl" for attempts in (1, 4)}
    found = {}
    for attempts, dump in dumps.items():
        done = treadle("eval", finished.path, f"evaluation.attempts={attempts}", "--dump", dump, "--json")
        assert done.status == 0, done.err
        found[attempts] = json.loads(done.out)["result"]
    played = {n: [json.loads(line) for line in dump.read_text().splitlines()] for n, dump in dumps.items()}
    assert (len(played[1]), len(played[4])) == (12, 48)
    first = [t["steps"] for t in played[4] if t["attempt"] == 0]
    assert first == [t["steps"] for t in played[1]]  # draws have addresses
    assert any(a["steps"] != b["steps"] for a, b in itertools.pairwise(played[4]) if a["task_id"] == b["task_id"])
    assert found[1]["pass_at"] == {} and found[1]["attempts"] == 1
    rewards = [t["reward"] for t in played[4]]
    solved = [max(rewards[n : n + 4]) >= 1 for n in range(0, 48, 4)]
    assert found[4]["pass_at"]["4"] == sum(solved) / 12
    assert found[4]["pass_at"]["1"] == pytest.approx(found[4]["success"]) == sum(r >= 1 for r in rewards) / 48
    assert (found[4]["tasks"], found[4]["failed"], sum(found[4]["by_tasks"].values())) == (12, 0, 12)
    table = treadle("eval", finished.path, "evaluation.attempts=4", "data.held_out.options.count=3").out.splitlines()
    assert table[0].split() == ["a", "tasks", "success", "pass@2", "pass@4", "reward", "steps", "failed"]


def test_a_dump_has_texts_and_ids(troubled: Trained, place: Place) -> None:
    dump = place.path / "played.jsonl"
    done = treadle("eval", troubled.path, "--dump", dump)
    assert done.status == 0, done.err
    played = [json.loads(line) for line in dump.read_text().splitlines()]
    assert len(played) == 12
    failed = [t for t in played if t["status"] == "failed"]
    assert failed and all(t["reward"] is None and "ZeroDivisionError" in t["failure"] for t in failed)
    tokenizer = AutoTokenizer.from_pretrained(next(troubled.path.glob("checkpoints/step-*")))
    for trajectory in played:
        assert trajectory["task_id"] and trajectory["extras"]
        assert sum(trajectory["components"].values()) == (trajectory["reward"] or 0)
        for step in trajectory["steps"]:
            assert step["prompt"] == tokenizer.decode(step["prompt_ids"])
            assert step["completion"] == tokenizer.decode(step["completion_ids"])
            assert len(step["logprobs"]) == len(step["completion_ids"]) <= 8
    done = treadle("eval", troubled.path, "--dump", place.path)
    assert done.status == 2 and "is not a regular file; name another" in done.error  # before anything is played
    done = treadle("eval", troubled.path, "--dump", place.path / "no" / "such.jsonl")
    assert done.status == 2 and "No such file or directory" in done.error


@pytest.mark.parametrize("file", ["/dev/null", "/proc/played.jsonl", "x" * 255])
def test_a_dump_that_could_not_be_written_is_refused_before_anything_is_read(place: Place, file: str) -> None:
    done = treadle("eval", place.path / "no-run", "--dump", file)
    assert done.status == 2 and done.error.startswith("error: --dump: ")
    assert not list(place.path.glob(".*.tmp"))


def test_evaluations_sample_in_their_own_way(finished: Trained, place: Place) -> None:
    dumps = []
    for name, options in (("greedy", ["temperature=0"]), ("one", ["top_k=1", "max_completion_tokens=1"])):
        dumps.append(place.path / f"{name}.jsonl")
        words = [f"evaluation.{option}" for option in options]
        done = treadle("eval", finished.path, *words, "evaluation.attempts=2", "--dump", dumps[-1])
        assert done.status == 0, done.err
    greedy, one = ([json.loads(line) for line in dump.read_text().splitlines()] for dump in dumps)
    assert (len(greedy), len(one)) == (12, 24)  # greedy attempts would all be the same
    ids = {t["task_id"]: t["steps"][0]["completion_ids"] for t in greedy}
    assert all(t["steps"][0]["completion_ids"] == ids[t["task_id"]][:1] for t in one)
    done = treadle("eval", finished.path, "evaluation.max_completion_tokens=100")
    assert done.status == 2 and "64 + max_completion_tokens 100 = 164 exceeds" in done.error
