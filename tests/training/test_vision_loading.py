"""Models that see: their part for images loaded alone, or with the language model, or built from a configuration."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import towers
from tests.models import same_bits
from tests.seeing import FAMILIES, _fields, own_logits, picture, prompt, tokenizer, whole, write
from treadle.core.errors import ConfigError
from treadle.core.images import PLACE
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.towers import frozen_tower, load_tower, tower_of
from treadle.models.vision import ImageProcessor, Tower
from treadle.models.weights import rest_of, saved
from treadle.training.checkpoint import export_model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    for family in FAMILIES:
        write(root / family, family)
    return root


def load(directory: Path, **options: Any) -> Any:
    return make_model(ModelConfig(path=str(directory)), 726, 0, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_loaded_alone_makes_the_whole_model_s_features(directories: Path, family: str) -> None:
    base = directories / family
    alone = load_tower(base)
    assert not any(towers.is_of_language(name) for name in alone.state_dict())
    processor = ImageProcessor(base)
    _, images = prompt(processor, tokenizer(family), f"a {PLACE} b {PLACE}", [picture(1), picture(2, (64, 32))])
    towers_of_it = Tower(whole(base), processor), Tower(alone, processor)
    for image in images:
        one, other = (tower.features(image) for tower in towers_of_it)
        assert same_bits({"": one.rows}, {"": other.rows})
        assert all(torch.equal(a, b) for a, b in zip(one.deep, other.deep, strict=True))


def test_one_tower_for_a_process_and_none_for_a_text_model(directories: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(directories / "idefics3"))
    tower = tower_of(config, "cpu")
    assert tower is not None and tower_of(config, "cpu") is tower
    text = make_model(
        ModelConfig(build={"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1}, tokenizer="demo"), 700, 0
    )
    export_model(tmp_path / "text", text, towers.TOKENIZER)
    assert frozen_tower(tmp_path / "text") is None


def test_nothing_is_loaded_before_the_first_image(directories: Path, tmp_path: Path) -> None:
    """So that text is trained without a processor; the first image then says what is missing."""
    base = shutil.copytree(directories / "qwen3_vl", tmp_path / "base")
    for file in base.glob("*processor_config.json"):
        file.unlink()
    tower = frozen_tower(base)
    assert tower is not None
    with pytest.raises(ConfigError, match="no usable image processor"):
        _ = tower.processor.placeholder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_is_loaded_and_written_under_its_names(directories: Path, tmp_path: Path, family: str) -> None:
    base = directories / family
    model = load(base, whole=True)
    assert saved(model).keys() == towers.tensors(base).keys() and not rest_of(model)
    export_model(tmp_path / "export", model, base)
    assert same_bits(towers.tensors(base), towers.tensors(tmp_path / "export"))
    shapes = load(base, whole=True, weights=False)
    assert {n: t.shape for n, t in saved(shapes).items()} == {n: t.shape for n, t in saved(model).items()}


def built(**more: Any) -> dict[str, Any]:
    own = tokenizer("idefics3")
    return {"model_type": "idefics3", **_fields("idefics3", own.get_vocab(), len(own)), **more}


def test_a_built_model_sees_and_its_export_goes_on(directories: Path, tmp_path: Path) -> None:
    """The processor lies beside the tokenizer, and goes with every export."""
    (tmp_path / "tokenizer").mkdir()
    for file in (directories / "idefics3").iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, tmp_path / "tokenizer")
    made = built()
    del made["text_config"]["vocab_size"]
    config = ModelConfig(build=made, tokenizer=str(tmp_path / "tokenizer"))
    one, two, other = (make_model(config, 740, seed, whole=True) for seed in (0, 0, 1))
    assert one.config.text_config.vocab_size == 740
    assert same_bits(saved(one), saved(two)) and not same_bits(saved(one), saved(other))
    assert tower_of(config, "cpu") is None

    export_model(tmp_path / "export", one, tmp_path / "tokenizer")
    assert json.loads((tmp_path / "export" / "processor_config.json").read_text())["image_seq_len"] == 4
    tower = frozen_tower(tmp_path / "export")
    assert tower is not None
    beside = ImageProcessor(tmp_path / "tokenizer")
    ids, images = prompt(beside, tokenizer("idefics3"), f"a {PLACE} b", [picture(1)])
    there = whole(tmp_path / "export")
    assert torch.equal(tower.features(images[0]).rows, Tower(one, tower.processor).features(images[0]).rows)
    changed = prompt(tower.processor, tokenizer("idefics3"), f"a {PLACE} b", [picture(2)])[1]
    assert not torch.equal(
        own_logits(there, tower.processor, ids, images)[-1], own_logits(there, tower.processor, ids, changed)[-1]
    )


@pytest.mark.parametrize(
    ("build", "whole", "message"),
    [
        ({"model_type": "qwen3"}, True, "model_type 'qwen3' see no images"),
        ({"model_type": "idefics3"}, False, "random: set training.vision=train"),
        (built(scale_faktor=2), True, r"idefics3 knows no \['scale_faktor'\]; did you mean 'scale_factor'"),
        (built(vision_config={"depht": 2}), True, r"idefics3.vision_config knows no \['depht'\]"),
        (built(vision_config={"attention_dropout": 0.1}), True, "attention_dropout = 0.1"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(build: dict[str, Any], whole: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(ModelConfig(build=build, tokenizer="demo"), 700, 0, whole=whole)


def test_a_text_model_has_no_vision_to_train(tmp_path: Path) -> None:
    fields = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = make_model(ModelConfig(build={"model_type": "qwen3", **fields}, tokenizer="demo"), 700, 0)
    export_model(tmp_path / "text", text, towers.TOKENIZER)
    with pytest.raises(ConfigError, match="sees no images; leave it out"):
        make_model(ModelConfig(path=str(tmp_path / "text")), 700, 0, whole=True)


def test_images_of_other_families_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="images are not supported for mistral3; take a model of one of idefics3"):
        load_tower(towers.write(tmp_path / "mistral3", "mistral3"))
