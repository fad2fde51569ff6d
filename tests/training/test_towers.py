"""A checkpoint with towers: its language part is trained, and all else comes out as it went in."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.models import quiet as quiet
from tests.models import random_groups, same_bits, weights_of
from tests.towers import IMAGE, TOKENIZER, TOWERS, VOCABULARY, image_logits, is_of_language, original, tensors, write
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest
from treadle.core.types import SamplingParams
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import load_engine
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import adapter_weights, described, published, rest_of, trained
from treadle.training.checkpoint import checkpoint_bytes, export_model, load_checkpoint, save_checkpoint
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot share prefixes")
LORA = LoraConfig(rank=2)
SHARING = [family for family in TOWERS if family != "qwen3_5"]
KL = AlgorithmConfig(kl=KlConfig(coef=0.1))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("towers")
    for family in TOWERS:
        write(root / family, family)
    return root


def load(directory: Path, adapter: Path | None = None, lora: LoraConfig | None = None, **options: Any) -> Any:
    config = ModelConfig(path=str(directory), adapter=None if adapter is None else str(adapter))
    return make_model(config, 726, 0, lora=lora, **options)


def learner_of(model: Any, algorithm: AlgorithmConfig | None = None) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    algorithm = algorithm or AlgorithmConfig()
    reference = make_reference(algorithm.kl, model)
    return Learner(model, TrainingConfig(optimizer=optimizer), algorithm, updates=4, reference=reference)


def train(learner: Learner, seed: int = 0) -> None:
    learner.train_batch(random_groups(seed, groups=1, size=2, vocabulary=500))


def restored(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and same_bits({"": tensor}, {"": other})


@pytest.mark.parametrize("family", TOWERS)
def test_what_goes_out_has_all_that_came_in_under_its_names(directories: Path, tmp_path: Path, family: str) -> None:
    base = directories / family
    came = tensors(base)
    learner = learner_of(load(base))
    train(learner)
    save_checkpoint(tmp_path / "checkpoint", learner, TOKENIZER)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint").glob("*.safetensors"))
    assert 0.8 < checkpoint_bytes(learner) / size < 1.2

    resumed = learner_of(load(base))
    load_checkpoint(Manifest.load(tmp_path / "checkpoint"), resumed, TOKENIZER)
    assert same_bits(weights_of(learner.model), weights_of(resumed.model))
    for each in (learner, resumed):
        train(each, 1)
    assert same_bits(weights_of(learner.model), weights_of(resumed.model))

    export_model(tmp_path / "export", resumed.model, TOKENIZER)
    before = image_logits(original(base), family)
    for directory in (tmp_path / "checkpoint", tmp_path / "export"):
        goes = tensors(directory)
        assert goes.keys() == came.keys()
        moved = {name for name in came if not restored(came[name], goes[name])}
        assert moved == {name for name in came if is_of_language(name)}
        assert not torch.equal(image_logits(original(directory), family), before)
        assert json.loads((directory / "config.json").read_text())["model_type"] == family
        assert (directory / "preprocessor_config.json").read_text() == '{"size": 16}'


@pytest.mark.parametrize("family", TOWERS)
def test_untrained_it_sees_what_it_saw(directories: Path, tmp_path: Path, family: str) -> None:
    base = directories / family
    export_model(tmp_path / "export", load(base), TOKENIZER)
    again = load(tmp_path / "export")
    export_model(tmp_path / "again", again, TOKENIZER)
    before = image_logits(original(base), family)
    for directory in (tmp_path / "export", tmp_path / "again"):
        assert tensors(directory).keys() == tensors(base).keys()
        assert torch.equal(image_logits(original(directory), family), before)


@pytest.mark.parametrize("family", TOWERS)
def test_text_is_scored_as_by_the_whole_model(directories: Path, family: str) -> None:
    """Positions of three axes equal plain ones for text."""
    learner = learner_of(load(directories / family))
    ids = np.random.default_rng(0).integers(5, 500, 40).astype(np.int32)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = original(directories / family)(input_ids=tokens, use_cache=False).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(learner.forward.exact_logprobs(ids), wanted, atol=1e-4)


@pytest.mark.parametrize("family", TOWERS)
def test_adapters_are_of_the_language_part_and_load_on_the_original(
    directories: Path, tmp_path: Path, family: str
) -> None:
    base = directories / family
    learner = learner_of(load(base, lora=LORA))
    assert all(is_of_language(name) and ".lora_" in name for name, _ in trained(learner.model))
    train(learner)
    save_checkpoint(tmp_path / "checkpoint", learner, TOKENIZER)
    resumed = learner_of(load(base, lora=LORA))
    load_checkpoint(Manifest.load(tmp_path / "checkpoint"), resumed, TOKENIZER)
    export_model(tmp_path / "adapter", resumed.model, TOKENIZER)

    whole = original(base)
    before = image_logits(whole, family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # errors otherwise: peft warns of keys that are missing
        loaded = peft.PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
    named = {name for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert named == {name.replace(".weight", ".default.weight") for name in load_file(_adapter(tmp_path / "adapter"))}
    seen = image_logits(loaded, family)
    assert not torch.equal(seen, before)

    merged = load(base, tmp_path / "adapter")
    assert not adapter_weights(merged)
    export_model(tmp_path / "merged", merged, TOKENIZER)
    assert (image_logits(original(tmp_path / "merged"), family) - seen).abs().max() < 1e-4
    came, goes = tensors(base), tensors(tmp_path / "merged")
    assert came.keys() == goes.keys()
    assert all(restored(came[name], goes[name]) for name in came if not is_of_language(name))
    export_model(tmp_path / "trained on", load(base, tmp_path / "adapter", LORA), TOKENIZER)
    assert _adapter(tmp_path / "trained on").read_bytes() == _adapter(tmp_path / "adapter").read_bytes()


def _adapter(directory: Path) -> Path:
    return directory / "adapter_model.safetensors"


@pytest.mark.parametrize("family", SHARING)
async def test_the_engine_has_the_language_part_alone(directories: Path, tmp_path: Path, family: str) -> None:
    model = load(directories / family)
    export_model(tmp_path / "export", model, TOKENIZER)
    assert all(is_of_language(name) for name, _ in published(model))
    learner = learner_of(model)
    options = TorchEngineOptions(stop_token_ids=[2])
    engines = TorchEngine(model, options), load_engine(tmp_path / "export", options, torch.get_num_threads(), False)
    train(learner)
    for engine in engines:
        await engine.update_weights(dict(published(model)), 1)
        engine.open_session("a")
        prompt = np.arange(5, 30, dtype=np.int32)
        answer = await engine.generate(prompt, SamplingParams(max_tokens=12, seed=3), session="a")
        ids = np.concatenate([prompt, answer.token_ids])
        if ids.max() < IMAGE:  # a placeholder of an image among them is another matter
            np.testing.assert_allclose(
                answer.logprobs, learner.forward.exact_logprobs(ids)[len(prompt) - 1 :], atol=1e-4
            )
        await engine.close()


@pytest.mark.parametrize("lora", [None, LORA])
async def test_an_engine_of_another_process_has_the_same_names(
    directories: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    model = load(directories / "gemma3", lora=lora)
    export_model(tmp_path / "export", model, TOKENIZER)
    engine = load_engine(
        tmp_path / "export", TorchEngineOptions(stop_token_ids=[2]), torch.get_num_threads(), deterministic=False
    )
    await engine.update_weights({name: torch.zeros_like(t) for name, t in published(model)}, 1)
    assert isinstance(engine, TorchEngine)
    assert described(engine._model.model).keys() == described(model).keys()
    await engine.close()


def test_towers_need_no_memory(directories: Path) -> None:
    """They stay in their files, also where the model is copied: for a reference, a teacher, an engine."""
    learner = learner_of(load(directories / "qwen3_vl"), KL)
    assert learner.reference is not None
    for model in (learner.model, learner.reference.forward.model, copy.deepcopy(learner.model)):
        assert all(is_of_language(name) for name in model.state_dict())
        assert rest_of(model) is rest_of(learner.model)
    train(learner)
    assert {t.dtype for t in rest_of(learner.model).values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", TOWERS)
def test_without_weights_names_and_shapes_are_the_same(directories: Path, family: str) -> None:
    """As a dry run and all ranks but the first have it."""
    shapes, model = load(directories / family, weights=False), load(directories / family)
    assert all(parameter.is_meta for parameter in shapes.parameters())
    assert {n: t.shape for n, t in described(shapes).items()} == {n: t.shape for n, t in described(model).items()}
    assert rest_of(shapes).keys() == rest_of(model).keys()


def test_what_transformers_leaves_out_is_kept(directories: Path, tmp_path: Path) -> None:
    """Heads that draft tokens (mtp) are in no model of transformers."""
    base = write(tmp_path / "base", "qwen3_5")
    file = base / "model.safetensors"
    more = {"mtp.fc.weight": torch.randn(4, 4).bfloat16(), "mtp.count": torch.tensor(3)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    learner = learner_of(load(base))
    train(learner)
    save_checkpoint(tmp_path / "checkpoint", learner, TOKENIZER)
    found = tensors(tmp_path / "checkpoint")
    assert found.keys() == tensors(base).keys() and all(restored(found[name], more[name]) for name in more)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4", "mistral3"])
def test_tied_weights_are_written_once(tmp_path: Path, family: str) -> None:
    """Under the name that the files have; a copy under the other name would be one of before the update."""
    base = write(tmp_path / "base", family, tied=True)
    for twice in (False, True):
        if twice:
            came = load_file(base / "model.safetensors")
            [embedding] = [name for name in came if name.endswith(".embed_tokens.weight")]
            came["lm_head.weight"] = came[embedding].clone()
            save_file(came, base / "model.safetensors", {"format": "pt"})
        learner = learner_of(load(base))
        assert learner.model.get_output_embeddings().weight is learner.model.get_input_embeddings().weight
        train(learner)
        export_model(tmp_path / f"export {twice}", learner.model, TOKENIZER)
        assert "lm_head.weight" not in tensors(tmp_path / f"export {twice}")
        there = original(tmp_path / f"export {twice}")
        assert torch.equal(there.get_output_embeddings().weight, learner.model.get_output_embeddings().weight)


def test_files_of_several_parts(directories: Path, tmp_path: Path) -> None:
    original(directories / "mistral3").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 1
    export_model(tmp_path / "export", load(tmp_path / "base"), TOKENIZER)
    came, goes = tensors(tmp_path / "base"), tensors(tmp_path / "export")
    assert same_bits(came, goes)


PUBLISHED = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "mistral3": {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_other_names_that_transformers_loads(tmp_path: Path, family: str) -> None:
    """Such as those of older checkpoints, which transformers itself would not write."""
    base = write(tmp_path / "base", family)

    def renamed(name: str) -> str:
        return next(
            (new + name.removeprefix(old) for old, new in PUBLISHED[family].items() if name.startswith(old)), name
        )

    save_file({renamed(n): t for n, t in tensors(base).items()}, base / "model.safetensors", {"format": "pt"})
    original(base)
    learner = learner_of(load(base))
    train(learner)
    export_model(tmp_path / "export", learner.model, TOKENIZER)
    assert tensors(tmp_path / "export").keys() == tensors(base).keys()
    there: Any = original(tmp_path / "export").get_input_embeddings()
    mine: Any = learner.model.get_input_embeddings()
    assert torch.equal(there.weight, mine.weight)


def test_a_class_that_needs_its_tower_for_text_is_refused_by_name(tmp_path: Path) -> None:
    text = {**TOWERS["mistral3"]["text_config"], "model_type": "qwen2"}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}
    made = AutoConfig.for_model("qwen2_audio", text_config=text, audio_config=audio, audio_token_index=IMAGE)
    AutoModelForMultimodalLM.from_config(made).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="Qwen2AudioForConditionalGeneration cannot compute text with its language"):
        learner_of(load(tmp_path / "base"))


def test_another_tower_is_another_model(directories: Path, tmp_path: Path) -> None:
    learner = learner_of(load(directories / "gemma3"))
    train(learner)
    save_checkpoint(tmp_path / "checkpoint", learner, TOKENIZER)
    base = write(tmp_path / "base", "gemma3")
    came = load_file(base / "model.safetensors")
    came["vision_tower.post_layernorm.bias"] += 1
    save_file(came, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"vision_tower\.post_layernorm\.bias, which is not trained, has other"):
        load_checkpoint(Manifest.load(tmp_path / "checkpoint"), learner_of(load(base)), TOKENIZER)


@pytest.mark.parametrize("missing", ["model.visual.merger.norm.bias", "model.language_model.norm.weight"])
def test_a_directory_that_lacks_a_weight_is_refused(tmp_path: Path, missing: str) -> None:
    base = write(tmp_path / "base", "qwen3_vl")
    came = load_file(base / "model.safetensors")
    save_file({name: t for name, t in came.items() if name != missing}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack 1 of the model's, for example {missing}"):
        load(base)


def test_a_language_model_alone_comes_out_as_it_went_in(directories: Path, tmp_path: Path) -> None:
    """Also one of a family that has towers elsewhere."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(directories / "qwen3_5").save_pretrained(tmp_path / "text")
    model = load(tmp_path / "text")
    export_model(tmp_path / "export", model, TOKENIZER)
    came, goes = tensors(tmp_path / "text"), tensors(tmp_path / "export")
    assert came.keys() == goes.keys() and not rest_of(model)
    assert json.loads((tmp_path / "export/config.json").read_text())["model_type"] == "qwen3_5_text"
    assert model.config.vocab_size == VOCABULARY
