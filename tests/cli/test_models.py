"""`treadle models`: what is in the cache, and getting more of it."""

import json
import os
import re
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import files, treadle
from tests.fake_hub import COMMIT, serving_hub
from tests.runs import put_config
from tests.towers import write
from treadle.models.weights import unique_weights, weights_sha256
from treadle.record.checkpoint_retention import checkpoint_updates, read_checkpoint
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory
from treadle.training.checkpoint import remove_others


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TREADLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "treadle" / "models"


def test_an_empty_cache_lists_the_models_with_a_name_and_is_not_made(own_cache: Path) -> None:
    for words in (("models",), ("models", "list")):
        done = treadle(*words)
        assert done.status == 0
        assert done.out.split()[:3] == ["smollm2", "not", "here"]
        assert "treadle models get smollm2" in done.out
    assert not own_cache.exists()


def test_a_gguf_file_is_converted_once_listed_and_evaluated(own_cache: Path) -> None:
    pytest.importorskip("gguf", reason="needs treadle[train]")
    from tests.gguf_files import write_gguf

    write_gguf(Path("tiny.gguf"))
    done = treadle("models", "get", "tiny.gguf")
    assert done.status == 0, done.err
    [directory] = (path for path in own_cache.iterdir() if path.is_dir())
    assert done.out.splitlines() == [
        "licence: mit",
        f"model directory: {directory}",
        "train from it: treadle train RECIPE model.path=tiny.gguf model.build=null",
    ]
    listed = treadle("models").out.splitlines()
    assert listed[0].startswith("smollm2  ")
    assert listed[1].split() == [str(Path("tiny.gguf").resolve()), "0.1", "MB", "licence", "mit", str(directory)]
    small = ("data.held_out={source: arithmetic, options: {count: 2}}", "rollout.max_completion_tokens=2")
    done = treadle("eval", "arithmetic", "--model", "tiny.gguf", *small)
    assert done.status == 0, done.err
    assert "success" in done.out


def test_a_directory_of_the_cache_that_is_no_model_is_named(own_cache: Path) -> None:
    (own_cache / "strange").mkdir(parents=True)
    done = treadle("models")
    assert done.status == 1
    assert f"{own_cache / 'strange'} is damaged: source.json: " in done.err
    assert "remove the directory" in done.err


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
    address = f"{finished.path}@{update}" if checkpoint else finished.path
    done = treadle("eval", address, f"evaluation.temperature={temperature}", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert [found["result"]] == recorded
    assert found["model"] == str(finished.path / "checkpoints" / f"step-{update:06d}")
    assert files(finished.path) == before


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


def test_several_attempts_give_pass_at_k_and_keep_the_first(finished: Trained, place: Place) -> None:
    dumps = {attempts: place.path / f"{attempts}" for attempts in (1, 4)}
    found = {}
    for attempts, dump in dumps.items():
        done = treadle("eval", finished.path, f"evaluation.attempts={attempts}", "--dump", dump, "--json")
        assert done.status == 0, done.err
        found[attempts] = json.loads(done.out)["result"]
    played = {n: exported(dump) for n, dump in dumps.items()}
    assert (len(played[1]), len(played[4])) == (12, 48)
    said = {n: [[step["completion_ids"] for step in t["steps"]] for t in rows] for n, rows in played.items()}
    first = [steps for steps, t in zip(said[4], played[4], strict=True) if t["attempt"] == 0]
    assert first == said[1]  # draws have addresses
    assert any(len({str(steps) for steps in said[4][n : n + 4]}) > 1 for n in range(0, 48, 4))
    assert found[1]["pass_at"] == {} and found[1]["attempts"] == 1
    rewards = [t["reward"] for t in played[4]]
    solved = [max(rewards[n : n + 4]) >= 1 for n in range(0, 48, 4)]
    assert (found[4]["pass_at"]["4"], found[4]["pass_tasks"]) == (sum(solved) / 12, 12)
    assert found[4]["pass_at"]["1"] == pytest.approx(found[4]["success"]) == sum(r >= 1 for r in rewards) / 48
    assert (found[4]["tasks"], found[4]["failed"], sum(found[4]["by_tasks"].values())) == (12, 0, 12)
    table = treadle("eval", finished.path, "evaluation.attempts=4", "data.held_out.options.count=3").out.splitlines()
    passes = ("pass@1", "pass@2", "pass@4", "pass@k")
    assert table[0].split() == ["a", "tasks", "success", *passes, "tasks", "reward", "steps", "failed"]


def test_a_dump_has_texts_and_ids(troubled: Trained, place: Place) -> None:
    dump = place.path / "new" / "played"
    done = treadle("eval", troubled.path, "--dump", dump)
    assert done.status == 0, done.err
    played = exported(dump)
    assert len(played) == 12
    failed = [t for t in played if t["status"] == "failed"]
    assert failed and all(t["reward"] is None and "ZeroDivisionError" in t["failure"]["message"] for t in failed)
    tokenizer = AutoTokenizer.from_pretrained(next(troubled.path.glob("checkpoints/step-*")))
    for trajectory in played:
        assert trajectory["task_id"] and trajectory["task"]["extras"]
        assert sum(trajectory["components"].values()) == (trajectory["reward"] or 0)
        for step in trajectory["steps"]:
            assert step["prompt"] == tokenizer.decode(step["prompt_ids"])
            assert step["completion"] == tokenizer.decode(step["completion_ids"])
            assert len(step["logprobs"]) == len(step["completion_ids"]) <= 8
    done = treadle("eval", troubled.path, "--dump", dump)
    assert done.status == 1 and "is already in use" in done.error  # before anything is played
    done = treadle("eval", troubled.path, "--dump", dump / "config.yaml" / "such")
    assert done.status == 2 and "Not a directory; name another directory" in done.error


def exported(dump: Path) -> list[dict[str, Any]]:
    """Return the trajectories of a dump."""
    file = dump.with_suffix(".jsonl")
    done = treadle("export-traces", dump, file)
    assert done.status == 0, done.err
    return [json.loads(line) for line in file.read_text().splitlines()]


PLAIN = ["SHA256SUMS", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
         "tokenizer.json", "tokenizer_config.json"]  # fmt: skip


def test_an_export_is_the_checkpoints_model_to_transformers_and_to_treadle(finished: Trained, tmp_path: Path) -> None:
    before = files(finished.path)
    done = treadle("export", finished.path, tmp_path / "models" / "demo")
    assert done.status == 0, done.err
    assert files(finished.path) == before
    assert sorted(p.name for p in (tmp_path / "models" / "demo").iterdir()) == ["README.md", *PLAIN]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "demo")
    trained = json.loads((finished.path / "summary.json").read_text())["weights_sha256"]
    assert weights_sha256(unique_weights(loaded)) == trained
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "demo")
    assert "1 + 1" in tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)
    words = (f"model.path={tmp_path / 'models' / 'demo'}", "model.build=null", "model.tokenizer=null")
    done = finished.place.train(*words, "warm_start=null", "orchestration.updates=1", name="on")
    assert done.status == 0, done.err


def test_an_export_is_uploaded_in_another_dtype_with_its_card(
    finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, served = tmp_path / "half", tmp_path / "served"
    served.mkdir()
    with serving_hub("acme/tiny", served) as (endpoint, _):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "wrong")
        done = treadle("export", finished.path, tmp_path / "own", "--push", "acme/tiny")
        assert done.status == 2 and "--push: 'acme/tiny'" in done.err and "HF_TOKEN" in done.err
        monkeypatch.setenv("HF_TOKEN", "key")
        done = treadle("export", finished.path, half, "--dtype", "bfloat16", "--push", "acme/tiny")
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1] == f"uploaded: {endpoint}/acme/tiny/commit/{COMMIT}"
    assert {path.name: path.read_bytes() for path in served.iterdir()} == {
        path.name: path.read_bytes() for path in half.iterdir()
    }
    loaded = AutoModelForCausalLM.from_pretrained(served, dtype="auto")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert loaded.dtype == torch.bfloat16
    assert weights_sha256(unique_weights(loaded)) == weights_sha256(unique_weights(trained.bfloat16()))
    assert f"{json.loads((finished.path / 'summary.json').read_text())['held_out_success_after']:.3f} |" in (
        served / "README.md"
    ).read_text(encoding="utf-8")
    done = treadle("export", finished.path, tmp_path / "no", "--push", "tiny")
    assert (done.status, (tmp_path / "no").exists()) == (2, False) and "give ORG/NAME" in done.error


def test_which_checkpoint(finished: Trained, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    figures = {r["update"]: r["success"] for r in rows if r["kind"] == "evaluation" and r["temperature"] == 1}
    best = max((2, 4), key=lambda update: (figures[update], -update))
    run = finished.path
    addresses = {f"{run}@2": 2, f"{run}@latest": 4, f"{run}@best": best, f"{run}/checkpoints/step-000002": 2}
    for which, (address, update) in enumerate(addresses.items()):
        done = treadle("export", address, tmp_path / str(which))
        assert done.status == 0, done.err
        assert f"step-{update:06d}: " in done.out
        source = finished.path / "checkpoints" / f"step-{update:06d}" / "model.safetensors"
        assert (tmp_path / str(which) / "model.safetensors").read_bytes() == source.read_bytes()
    done = treadle("eval", f"{run}@best", "--json")
    assert json.loads(done.out)["result"]["success"] == figures[best]
    done = treadle("export", f"{run}@9", tmp_path / "out")
    assert done.status == 1 and "it has step-000002, step-000004" in done.error


def test_a_template_of_the_run_goes_with_it(finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_named(*asked: Any) -> tuple[Any, dict[str, bytes]]:
        checkpoint, found = read_checkpoint(*asked)
        return checkpoint, {**found, "additional_chat_templates/tool_use.jinja": b"TOOLS"}

    monkeypatch.setattr("treadle.api.export.read_checkpoint", read_named)
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}OWN {{ m.content }}{% endfor %}")
    config = (run / "config.yaml").read_text()
    put_config(run, config.replace("chat_template: null", f"chat_template: {tmp_path / 'own.jinja'}"))
    assert treadle("export", run, tmp_path / "out").status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tools: Any
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        talk = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(talk, tools=tools, tokenize=False) == "OWN x"


def removed_while_read(checkpoint: Path, file: str) -> threading.Thread:
    """Whoever reads this file of it finds it removed when done, by a run that went back to an earlier one."""
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)

    def remove() -> None:
        with (checkpoint / file).open("wb") as pipe:  # waits for the reader
            others = {path.name for path in checkpoint.parent.iterdir()} - {checkpoint.name}
            with closing(Ledger(checkpoint.parents[1] / "ledger.sqlite")) as ledger:
                ledger.return_to(min(others))
            remove_others(checkpoint.parent, others)
            pipe.write(content)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("which", ["latest", "step-000004"])
def test_a_checkpoint_that_vanishes_while_it_is_read(which: str, file: str, finished: Trained, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished.path, run)
    thread = removed_while_read(run / "checkpoints" / "step-000004", file)
    done = treadle("export", f"{run}@{which}", out)
    thread.join()
    assert checkpoint_updates(run / "checkpoints") == [2]
    if which == "latest":
        assert done.status == 0, done.err
        assert "step-000002: " in done.out and sorted(p.name for p in out.iterdir()) == ["README.md", *PLAIN]
    else:
        assert done.status == 1 and "has no checkpoint 'step-000004'; it has step-000002" in done.error
        assert not out.exists()


def test_what_shows_a_whole_run_refuses_a_checkpoint_that_is_not_there(finished: Trained) -> None:
    for command in ("report", "show", "plot"):
        done = treadle(command, f"{finished.path}@7")
        assert done.status == 2 and "has no checkpoint 'step-000007'; it has step-000002" in done.err


def test_it_says_what_a_directory_is(finished: Trained, tmp_path: Path) -> None:
    checkpoint = finished.path / "checkpoints" / "step-000004"
    done = treadle("models", "about", str(checkpoint))
    assert done.status == 0, done.err
    lines = [re.split(r"  +", line.strip()) for line in done.out.splitlines()]
    assert [line[0] for line in lines] == ["kind", "language model", "prefixes"]
    assert lines[0][1] == "Qwen3ForCausalLM (qwen3)" and lines[2][1].startswith("shared by")
    base = write(tmp_path / "base", "qwen3_5")
    done = treadle("models", "about", str(base))
    assert done.status == 0, done.err
    assert "Qwen3_5ForConditionalGeneration (qwen3_5)" in done.out
    assert re.search(r"^the rest +21 tensors, 0\.\d MB; in every checkpoint and export as they are", done.out, re.M)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": "models/warm"}')
    done = treadle("models", "about", str(tmp_path / "adapter"))
    assert "a LoRA adapter of rank 4, for model.adapter" in done.out and "models/warm" in done.out
    done = treadle("models", "about", str(tmp_path))
    assert done.status == 2 and "treadle models about: no config.json in" in done.err
