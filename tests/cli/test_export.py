"""`treadle export`: a plain model directory, complete or absent, also while checkpoints come and go."""

import json
import os
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Trained
from tests.cli.worlds import files, treadle
from tests.orchestration.runs import put_config, start
from tests.worlds import Quiet
from treadle.models.weights import unique_weights, weights_sha256
from treadle.orchestration.export import export_checkpoint
from treadle.orchestration.store.checkpoint_retention import checkpoint_updates, read_checkpoint
from treadle.orchestration.store.ledger import Ledger
from treadle.training.checkpoint import remove_others

PLAIN = ["SHA256SUMS", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
         "tokenizer.json", "tokenizer_config.json"]  # fmt: skip


def test_an_export_is_the_checkpoints_model_to_transformers_and_to_treadle(finished: Trained, tmp_path: Path) -> None:
    before = files(finished.path)
    done = treadle("export", finished.path, tmp_path / "models" / "demo")
    assert done.status == 0, done.err
    assert files(finished.path) == before
    assert sorted(p.name for p in (tmp_path / "models" / "demo").iterdir()) == PLAIN
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "demo")
    trained = json.loads((finished.path / "summary.json").read_text())["weights_sha256"]
    assert weights_sha256(unique_weights(loaded)) == trained
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "demo")
    assert "1 + 1" in tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)
    words = (f"model.path={tmp_path / 'models' / 'demo'}", "model.build=null", "model.tokenizer=null")
    done = finished.place.train(*words, "warm_start=null", "orchestration.updates=1", name="on")
    assert done.status == 0, done.err


def test_which_checkpoint(finished: Trained, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    figures = {r["update"]: r["success"] for r in rows if r["kind"] == "evaluation" and r["temperature"] == 1}
    best = max((2, 4), key=lambda update: (figures[update], -update))
    for which, update in (("step-000002", 2), ("latest", 4), ("best", best)):
        done = treadle("export", finished.path, tmp_path / which, "--checkpoint", which)
        assert done.status == 0, done.err
        assert f"step-{update:06d}: " in done.out
        source = finished.path / "checkpoints" / f"step-{update:06d}" / "model.safetensors"
        assert (tmp_path / which / "model.safetensors").read_bytes() == source.read_bytes()
    done = treadle("eval", finished.path, "--checkpoint", "best", "--json")
    assert json.loads(done.out)["result"]["success"] == figures[best]
    done = treadle("export", finished.path, tmp_path / "out", "--checkpoint", "step-000009")
    assert done.status == 1 and "it has step-000002, step-000004" in done.error


def test_a_template_of_the_run_goes_with_it(finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of all that the tokenizer has."""

    def read_named(*asked: Any) -> tuple[Any, dict[str, bytes]]:
        checkpoint, found = read_checkpoint(*asked)
        return checkpoint, {**found, "additional_chat_templates/tool_use.jinja": b"TOOLS"}

    monkeypatch.setattr("treadle.orchestration.export.read_checkpoint", read_named)
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


class Exporting(Quiet):
    """Exports each checkpoint of a run from inside it."""

    def __init__(self, run: Path, out: Path) -> None:
        super().__init__()
        self.run, self.out = run, out

    def update(self, row: Any) -> None:
        export_checkpoint(self.run, self.out / str(row["update"]))


def test_while_the_run_goes_on(tmp_path: Path) -> None:
    options = ("orchestration.checkpoint_every=1", "orchestration.keep_last=1")
    start(tmp_path / "run", *options, progress=Exporting(tmp_path / "run", tmp_path))
    shas = [weights_sha256(load_file(tmp_path / str(update) / "model.safetensors")) for update in range(1, 5)]
    assert len(set(shas)) == 4


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
    done = treadle("export", run, out, "--checkpoint", which)
    thread.join()
    assert checkpoint_updates(run / "checkpoints") == [2]
    if which == "latest":
        assert done.status == 0, done.err
        assert "step-000002: " in done.out and sorted(p.name for p in out.iterdir()) == PLAIN
    else:
        assert done.status == 1 and "has no checkpoint 'step-000004'; it has step-000002" in done.error
        assert not out.exists()


def test_a_damaged_checkpoint_leaves_nothing(finished: Trained, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished.path, run)
    weights = run / "checkpoints" / "step-000004" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4] + bytes(4 * [7]))
    assert "is damaged" in treadle("export", run, out).error
    weights.write_bytes(good[:100])
    assert "is damaged" in treadle("export", run, out).error
    weights.unlink()
    assert "is damaged: model.safetensors is gone; restore it, or take another checkpoint (step-000002)" in (
        treadle("export", run, out).error
    )
    assert not out.exists()
