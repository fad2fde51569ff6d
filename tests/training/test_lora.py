"""Adapters: their gradients, updates, reference and files, against dense computations and peft itself."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import (
    FAMILIES,
    HYBRIDS,
    MORE_FAMILIES,
    ROW_FAMILIES,
    VOCABULARY,
    distance,
    exact,
    full,
    gradients,
    in_float64,
    norm,
    ragged_groups,
    random_groups,
    same_bits,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training.reference import LAYOUTS, LORA, accumulated, adapted, literal_loss, make_learner, randomize, scale
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.lora import adapt, add_adapters, target_names
from treadle.models.weights import adapter_weights, trained
from treadle.packing.flat import flatten
from treadle.training.checkpoint import export_model, load_checkpoint, save_checkpoint
from treadle.training.config import OptimizerConfig
from treadle.training.learner import Learner

TOKENIZER = Path(__file__).parents[2] / "src/treadle/recipes/tokenizer"
ADAPTED = ("qwen3", "qwen2", "llama", "gemma3-half-sliding", "qwen3-moe")


@pytest.mark.parametrize("family", ADAPTED)
@settings(max_examples=3)
@given(groups=ragged_groups(max_groups=2, max_size=3, max_steps=4), budget=st.sampled_from([3, 20, 8192]))
def test_the_gradient_of_adapters_is_that_of_each_step_alone(family: str, groups: list[Any], budget: int) -> None:
    model = adapted(exact(family))
    literal = literal_loss(model, groups, AlgorithmConfig(), None)
    if literal.loss.requires_grad:
        literal.loss.backward()
    wanted = gradients(model)
    limit = 1e-12 * max(norm(wanted), 1e-2 * scale(flatten(groups), AlgorithmConfig()))
    for layout in LAYOUTS.values():
        learner = make_learner(model, max_tokens_per_microbatch=budget, **layout)
        accumulated(learner, groups)
        assert distance(gradients(learner.model), wanted) <= limit
        assert all(p.grad is None for p in learner.model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("family", ADAPTED)
def test_in_float32_too(family: str) -> None:
    model, groups = adapted(tiny(family)), random_groups(0)
    precise = in_float64(copy.deepcopy(model))
    literal_loss(precise, groups, AlgorithmConfig(), None).loss.backward()
    learner = make_learner(model)
    accumulated(learner, groups)
    wanted = gradients(precise)
    assert distance(gradients(learner.model), wanted) <= 1e-5 * norm(wanted)


def test_a_base_in_bfloat16_has_adapters_in_float32() -> None:
    """On one rank, with gradients near those of the same values in float32."""
    model, groups = tiny(), random_groups(0)
    adapt(model, None, LORA, 1, half=True, weights=True)
    randomize(model)
    learner = make_learner(model, precision="bfloat16_pure")
    found, _ = accumulated(learner, groups)
    wanted, _ = accumulated(make_learner(copy.deepcopy(model).float()), groups)
    assert {(p.dtype, p.requires_grad) for p in learner.model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }
    assert 0 < distance(found, wanted) < 0.1 * norm(wanted)


def test_two_updates_are_a_dense_computation() -> None:
    """AdamW over the adapters alone; the base keeps its bits, weight decay or not."""
    optimizer = OptimizerConfig(learning_rate=0.02, weight_decay=0.1)
    model, batches = adapted(exact()), [random_groups(seed) for seed in (0, 1)]
    learner = make_learner(model, optimizer=optimizer)
    base = {name: p for name, p in weights_of(learner.model).items() if ".lora_" not in name}
    for groups in batches:
        learner.train_batch(groups)
    dense = torch.optim.AdamW(
        [p for name, p in model.named_parameters() if ".lora_" in name],
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
    )
    for groups in batches:
        dense.zero_grad()
        literal_loss(model, groups, AlgorithmConfig(), None).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        dense.step()
    after = weights_of(learner.model)
    assert distance(after, weights_of(model)) < 1e-12
    assert same_bits(base, {name: after[name] for name in base})
    assert len(learner.optimizer.state) == len(adapter_weights(model)) == len(list(trained(model)))


def logprobs(model: PreTrainedModel, groups: list[Any]) -> Any:
    steps = [step for group in groups for t in group.trajectories for step in t.steps]
    with torch.no_grad():
        return np.concatenate([full(step_logprobs(model, step)[0]) for step in steps])


def test_the_reference_is_the_adapter_of_the_start() -> None:
    groups, algorithm = random_groups(0), AlgorithmConfig(kl=KlConfig(coef=0.1, reset_every=2))
    model = adapted(exact())
    learner = make_learner(model, algorithm, optimizer=OptimizerConfig(learning_rate=0.1))
    batch, start = flatten(groups), logprobs(model, groups)

    def found() -> NDArray[np.float64]:
        assert learner.reference is not None
        return full(learner.frozen_scores(learner.reference, batch).logp)

    def reference() -> Any:
        return np.abs(found() - start).max()

    assert reference() < 1e-12
    learner.update(batch)
    assert reference() < 1e-12 < np.abs(full(learner.logprobs(batch)) - start).max()
    learner.update(batch)
    assert np.abs(found() - full(learner.logprobs(batch))).max() < 1e-12 < reference()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    export_model(directory, tiny(vocab_size=512), TOKENIZER)
    return directory


def load(base: Path, lora: LoraConfig | None = LORA, adapter: Path | None = None) -> PreTrainedModel:
    config = ModelConfig(path=str(base), adapter=None if adapter is None else str(adapter))
    return make_model(config, 512, 0, lora=lora)


def moved_learner(base: Path, **fields: Any) -> Learner:
    learner = make_learner(
        load(base, LoraConfig(**{"rank": 3, "alpha": 5, **fields})), AlgorithmConfig(kl=KlConfig(coef=0.1))
    )
    learner.train_batch(random_groups(0))
    return learner


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of transformers, which peft still asks
@pytest.mark.parametrize("fields", [{}, {"rank_stabilized": True}, {"targets": "attention"}, {"targets": ("up_proj",)}])
def test_a_checkpoint_is_an_adapter_that_peft_loads(base: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    learner = moved_learner(base, **fields)
    save_checkpoint(tmp_path / "adapter", learner, TOKENIZER)
    assert not list((tmp_path / "adapter").glob("model*"))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    merged = load(base, None, tmp_path / "adapter")
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        wanted = learner.model(input_ids=ids).logits
        assert torch.equal(theirs(input_ids=ids).logits, wanted)
        assert (merged(input_ids=ids).logits - wanted).abs().max() < 1e-5
    assert not adapter_weights(merged) and all(p.requires_grad for p in merged.parameters())


def test_training_goes_on_bit_by_bit(base: Path, tmp_path: Path) -> None:
    learner = moved_learner(base)
    digest = save_checkpoint(tmp_path / "a", learner, TOKENIZER)
    again = make_learner(load(base), AlgorithmConfig(kl=KlConfig(coef=0.1)))
    load_checkpoint(Manifest.load(tmp_path / "a", digest), again, TOKENIZER)
    for each in (learner, again):
        each.train_batch(random_groups(1))
    assert same_bits(weights_of(learner.model), weights_of(again.model))
    assert learner.reference and again.reference
    assert same_bits(learner.reference.weights(), again.reference.weights())


def test_what_does_not_belong_together_is_refused(base: Path, tmp_path: Path) -> None:
    digest = save_checkpoint(tmp_path / "a", moved_learner(base), TOKENIZER)
    manifest = Manifest.load(tmp_path / "a", digest)
    export_model(tmp_path / "other", tiny(seed=3, vocab_size=512), TOKENIZER)
    for model, error in (
        (load(tmp_path / "other"), "belongs to the base .* is another one"),
        (load(base, LoraConfig(rank=4, alpha=5)), "training.lora.rank is 4, and the adapter in .* has 3"),
        (load(base, None), "holds an adapter, and training.lora is not set"),
    ):
        with pytest.raises(CheckpointError, match=error):
            load_checkpoint(manifest, make_learner(model), TOKENIZER)
    with pytest.raises(CheckpointError, match="another one"):
        load(tmp_path / "other", None, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"training.lora.rank is 8, and the adapter .* has 3"):
        load(base, LoraConfig(rank=8, alpha=5), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json in"):
        load(base, None, base)
    settings = json.loads((tmp_path / "a/adapter_config.json").read_text())
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora/adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    (tmp_path / "dora/adapter_model.safetensors").write_bytes((tmp_path / "a/adapter_model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="has use_dora = True, which is not supported"):
        load(base, None, tmp_path / "dora")


def test_targets() -> None:
    model = tiny("qwen3-moe")
    assert target_names(model, "all-linear") == target_names(model, "attention")  # experts are no linear layers
    assert target_names(tiny(), "mlp") == ["down_proj", "gate_proj", "up_proj"]
    recurrent = [
        "in_proj_a",
        "in_proj_b",
        "in_proj_qkv",
        "in_proj_z",
        "k_proj",
        "o_proj",
        "out_proj",
        "q_proj",
        "v_proj",
    ]
    assert target_names(tiny("qwen3-5"), "attention") == recurrent
    assert target_names(tiny("qwen3-5"), "mlp") == ["down_proj", "gate_proj", "up_proj"]
    with pytest.raises(ConfigError, match=r"no linear layers named \['gate'\]; it has .*experts, routers and the head"):
        target_names(model, ("q_proj", "gate"))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *HYBRIDS, *ROW_FAMILIES])
def test_every_adapter_of_every_family_takes_part(family: str) -> None:
    """Some layers read the weights of a projection past it; some names peft takes for those of experts."""
    model = tiny(family)
    wanted = set(target_names(model, "all-linear"))
    add_adapters(model, LoraConfig(rank=2), 0)
    adapted = [name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    assert {name.rpartition(".")[2] for name in adapted} == wanted and len(set(adapted)) == len(adapted)
    ids = torch.arange(12)[None] % VOCABULARY
    model.train()(ids, use_cache=False).logits.log_softmax(-1)[..., 0].sum().backward()
    still = [n for n, p in model.named_parameters() if ".lora_B." in n and (p.grad is None or not p.grad.any())]
    chooses = {"deepseek-indexed": "indexer", "glm-indexed": "indexer"}  # which has no gradient
    small = {"deepseek-compressed": "compressor", "doge": "dt_proj", "xlstm": "ffn.proj_"}  # unused at these sizes
    assert not [name for name in still if (chooses | small).get(family, "-") not in name]


@pytest.mark.parametrize("family", ["bamba", "granite-hybrid", "falcon-h1", "nemotron-h", "mamba2"])
def test_projections_that_fused_kernels_take_over_get_no_adapters(family: str) -> None:
    assert "in_proj" in target_names(tiny(family), "all-linear")
    assert "out_proj" not in target_names(tiny(family), "all-linear")
    with pytest.raises(ConfigError, match=r"no linear layers named \['out_proj'\]"):
        target_names(tiny(family), ("out_proj",))
