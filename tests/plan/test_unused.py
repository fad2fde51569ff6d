"""What a model's directory has and a run does not use is named, by a dry run and in the run's log."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import start
from tests.training.test_peft_adapters import write
from tests.worlds import Quiet, tiny
from treadle.api.train import dry_run
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.model_files import is_adapter, tokenizer_directory
from treadle.models.unused import unused_parts
from treadle.models.weights import adapter_weights, unique_weights
from treadle.training.checkpoint import export_model
from treadle.training.make import load_model

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model, without its manifest."""
    config = tiny().model
    export_model(tmp_path / "model", load_model(config, 0), tokenizer_directory(config))
    (tmp_path / "model/SHA256SUMS").unlink()
    return tmp_path / "model"


def add(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | fields))


def add_adapter(model: Path, folder: Path) -> None:
    write(model, folder)
    for file in folder.glob("adapter_*"):
        file.rename(model / file.name)


def unused(model: Path, **sampling: float) -> list[str]:
    return unused_parts(ModelConfig(path=str(model)), SAMPLING | sampling)


def test_each_part_has_a_line(model: Path) -> None:
    assert unused(model) == [] and unused_parts(tiny().model, SAMPLING) == []
    add(model / "generation_config.json", temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.0, do_sample=True)
    assert unused(model) == [
        "temperature 0.6, top_k 20, top_p 0.95 of generation_config.json; `rollout` sets a run's sampling"
    ]
    add(model / "generation_config.json", repetition_penalty=1.05, suppress_tokens=[7])
    assert unused(model, temperature=0.6, top_k=20, top_p=0.95) == [
        "repetition_penalty 1.05, suppress_tokens [7] of generation_config.json; `rollout` sets a run's sampling"
    ]
    add(model / "config.json", vision_config={"depth": 2}, audio_config=None, text_config=None)
    assert unused(model)[0] == "the model's parts for input other than text (vision_config)"
    (model / "adapter_config.json").write_text("{}")
    assert unused(model)[0].startswith("the adapter beside the model (adapter_config.json)")


@pytest.mark.parametrize("weights", [True, False])
def test_an_adapter_beside_a_model_is_no_part_of_it(model: Path, tmp_path: Path, weights: bool) -> None:
    """transformers would add it."""
    config = ModelConfig(path=str(model))
    before = unique_weights(make_model(config, 0, 0, weights))
    add_adapter(model, tmp_path / "adapter")
    loaded = make_model(config, 0, 0, weights)
    after = unique_weights(loaded)
    assert loaded.name_or_path == loaded.config.name_or_path == str(model) and not adapter_weights(loaded)
    assert before.keys() == after.keys() and all(p.requires_grad for p in loaded.parameters())
    assert not weights or all(torch.equal(before[name], after[name]) for name in before)
    assert not is_adapter(model)


def test_a_run_of_such_a_model_says_so_and_is_one_of_the_model_alone(model: Path, tmp_path: Path) -> None:
    plain = ("model.build=null", "model.tokenizer=null", f"model.path={model}", "orchestration.updates=1")
    alone = start(tmp_path / "alone", *plain)
    add_adapter(model, tmp_path / "adapter")
    add(model / "generation_config.json", top_k=20)
    config = tiny(*plain)
    progress, tried = Quiet(), list[str]()
    dry_run(config, tmp_path / "runs", tried.append)
    both = start(tmp_path / "both", *plain, progress=progress)
    assert both["weights_sha256"] == alone["weights_sha256"]
    said = [line for line in progress.lines if line.startswith("not used of")]
    assert len(said) == 2 and "adapter_config.json" in said[0] and "top_k 20" in said[1]
    assert tried == said
    checkpoint = tmp_path / "both/checkpoints/step-000001"
    assert not is_adapter(checkpoint) and not list(checkpoint.glob("adapter*"))
