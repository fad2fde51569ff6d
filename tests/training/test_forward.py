"""What a model must be like to be packed, and log-probabilities in row chunks."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from tests.models import distance, exact, gradients, make_group, make_step, norm, same_bits, tiny
from tests.training.reference import (
    COUPLED,
    LAYOUTS,
    LOSSES,
    accumulated,
    earlier_policy,
    forked_groups,
    make_learner,
    separate_gradient,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.core.errors import ConfigError
from treadle.core.types import Group
from treadle.models.support import refuse_randomness
from treadle.packing.flat import flatten
from treadle.training import lm_head as distribution
from treadle.training.config import TrainingConfig
from treadle.training.forward import Forward
from treadle.training.learner import Learner
from treadle.training.objective import Gradient, concat, lookup

# Refusals


@pytest.mark.parametrize(
    ("family", "fields", "name"),
    [
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("phi3", {"resid_pdrop": 0.2}, "resid_pdrop = 0.2"),
        ("phi3", {"embd_pdrop": 0.2}, "embd_pdrop = 0.2"),
        ("qwen3-moe", {"model_type": "mixtral", "router_jitter_noise": 0.01}, "router_jitter_noise = 0.01"),
        (
            "qwen3-moe",
            {"model_type": "phimoe", "router_jitter_noise": 0.0, "input_jitter_noise": 0.01},
            "input_jitter_noise = 0.01",
        ),
    ],
)
def test_dropout_and_routing_noise_are_refused(family: str, fields: dict[str, Any], name: str) -> None:
    """What is trained would not be the policy that sampled."""
    with pytest.raises(ConfigError, match=rf"has (dropout of .*|{name}); set it to 0 in the model's config"):
        make_learner(tiny(family, **fields))


def test_a_dropout_module_is_refused_whatever_the_configuration_says() -> None:
    model = tiny()
    refuse_randomness(model)
    layer: Any = model.model.layers[1]
    layer.mlp.extra = nn.Dropout(0.0)
    refuse_randomness(model)
    layer.mlp.extra = nn.Dropout(0.3)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has dropout of model\.layers\.1\.mlp\.extra = 0\.3"):
        make_learner(model)


class Deaf(nn.Module):
    """Attention that does not go through transformers' interface: the mean of values up to each token."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.values, self.out, self.repeat = own.v_proj, own.o_proj, own.num_key_value_groups

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        values = self.values(hidden_states).repeat(1, 1, self.repeat)
        count = torch.arange(1, values.shape[1] + 1)[:, None]
        return self.out(values.cumsum(1) / count), None


def with_layer(model: PreTrainedModel, attention: Any, layer: int = 1) -> PreTrainedModel:
    block: Any = model.model.layers[layer]
    block.self_attn = attention(block.self_attn)
    return model


def test_a_layer_that_does_not_attend_through_the_tree_is_trained_in_rows() -> None:
    """It would mix the sequences of a micro-batch."""
    with pytest.warns(UserWarning, match="1 of 2 layers of Qwen3ForCausalLM attended through the prefix tree"):
        assert not make_learner(with_layer(tiny(), Deaf)).forward.shares


def state(model: PreTrainedModel) -> dict[str, Any]:
    """How a model is set up to compute: everything but its weights."""
    return {
        "attention": [m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)],
        "training": [module.training for module in model.modules()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
    }


@pytest.mark.parametrize(("training", "checkpointing"), [(False, True), (True, False)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3-half-sliding", "lfm2"])
@pytest.mark.filterwarnings("ignore:.*cannot share prefixes")
def test_a_model_is_left_as_it_was(family: str, training: bool, checkpointing: bool) -> None:
    """By making a forward pass ready, by computing one, and by one that fails; its own output is the same."""
    model, ids = tiny(family).train(training), torch.tensor([[1, 2, 3, 4]])
    before, expected = state(model), model(ids, use_cache=False).logits
    learner = Learner(model, TrainingConfig(gradient_checkpointing=checkpointing), AlgorithmConfig(), 10)
    assert state(model) == before
    learner.train_batch(forked_groups())
    assert state(model) == before
    batch = flatten(forked_groups())
    [tree, *_] = learner.trees(batch)

    def fail(_: Any) -> Any:
        raise LookupError

    with pytest.raises(LookupError):
        learner.forward.backward(tree, torch.ones(len(batch)), fail)
    assert state(model) == before
    fresh = tiny(family).train(training)
    Forward(fresh, 64, checkpointing)
    assert torch.equal(fresh(ids, use_cache=False).logits, expected)


def test_a_sliding_layer_that_keeps_its_window_to_itself_is_trained_in_rows() -> None:
    model = tiny("gemma3-half-sliding")
    layers: Any = model.model.layers
    layers[0].self_attn.sliding_window = None
    with pytest.warns(UserWarning, match=r"layer 0 of Gemma3ForCausalLM has a sliding window that it does not pass"):
        assert not make_learner(model).forward.shares


def test_a_window_that_only_the_models_own_mask_knows_is_trained_in_rows() -> None:
    """Unless no sequence is long enough to meet it."""
    noiseless: dict[str, Any] = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "num_local_experts": 4}
    narrow, wide = (tiny("llama", model_type="phimoe", sliding_window=size, **noiseless) for size in (5, 256))
    make_learner(wide)
    with pytest.warns(UserWarning, match=r"layer 0 of PhimoeForCausalLM has a sliding window that it does not pass"):
        assert not make_learner(narrow).forward.shares


def test_a_window_that_every_layer_has_and_tells_is_fine() -> None:
    """Though the configuration names no layer types."""
    make_learner(tiny("llama", model_type="mistral", sliding_window=5))


class Louder(Qwen3ForCausalLM):
    """A head that its configuration does not name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out


class Shifted(nn.Module):
    """Attention with positions of its own making: those of the row, not those that it was given."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **more: Any) -> Any:
        cos, sin = (
            (torch.arange(hidden_states.shape[1]) / 10)[None, :, None].expand_as(p) for p in position_embeddings
        )
        return self.own(hidden_states, position_embeddings=(cos, sin), **more)


def test_a_model_that_computes_something_else_in_a_batch_than_alone_is_refused() -> None:
    stock = tiny()
    louder = Louder(cast(Any, stock.config))
    louder.load_state_dict(stock.state_dict())
    with pytest.raises(
        ConfigError, match=r"Louder computes other logits in a batch than alone \(they differ by 1\.0%\)"
    ):
        make_learner(louder)
    with pytest.warns(UserWarning, match=r"its logits differ by .* when packed"):
        assert not make_learner(with_layer(tiny(), Shifted)).forward.shares


def test_attention_with_a_mask_of_its_own_is_trained_in_rows() -> None:
    """Not found by comparing logits: a fresh Doge's mask is constant."""
    with pytest.warns(UserWarning, match="DogeAttention makes its own attention mask"):
        make_learner(tiny("llama", model_type="doge"))


# Row chunks


@pytest.mark.quick(4)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("family", ["qwen3", "granite", "cohere", "gemma3-capped"])
@pytest.mark.parametrize("rows", [3, 10])
def test_logits_in_row_chunks_give_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, family: str, rows: int, entropy_coef: float
) -> None:
    groups = forked_groups(groups=1)
    model = exact(family)
    algorithm = AlgorithmConfig(entropy_coef=entropy_coef)
    whole, metrics = accumulated(make_learner(model, algorithm), groups)
    learner = make_learner(model, algorithm)
    heights: list[int] = []
    learner.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: heights.append(len(args[0])))
    monkeypatch.setattr(distribution, "CHUNK_BYTES", rows * 32 * 8 + 7)
    found, totals = accumulated(learner, groups)
    assert max(heights) == rows
    assert distance(found, whole) <= 1e-13 * norm(whole)
    assert totals == pytest.approx(metrics, rel=1e-13)
    wanted, _ = separate_gradient(model, groups, algorithm)
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


MEASURE = """
import resource, torch
from treadle.training import lm_head as distribution
from treadle.training.lm_head import Head, pair_logprobs
torch.set_num_threads(1)
distribution.CHUNK_BYTES //= 32
V, P = 151_669, 150
head = Head(torch.nn.Linear(8, V, bias=False), 1.0, None)

def train(rows):
    hidden = torch.randn(rows, 8, requires_grad=True)
    logp, entropy = pair_logprobs(head, hidden, torch.arange(rows), torch.ones(rows), True)
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()

train(1)
torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=False)  # imports a lot
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train(P)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, 4 * P * V)
"""


@pytest.mark.slow
def test_peak_memory_at_a_large_vocabulary_stays_far_below_the_logits() -> None:
    """Forward and backward, in a fresh process; several arrays of the size of the logits would be needed whole."""
    # The C library keeps small blocks that were freed; those of the full size it returns.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, env=env)
    peak, logits = map(int, done.stdout.split())
    assert peak < 0.5 * logits


# Vocabulary


def test_a_vocabulary_smaller_than_the_probes_ids_is_fine() -> None:
    model = tiny(vocab_size=3)
    (result,) = make_learner(model).train_batch(
        [make_group([([make_step([1], [2])], 1.0), ([make_step([1], [0])], 0.0)])]
    )
    assert result.metrics["gradient_norm"] > 0


@contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model's decoder computes, padding included."""
    sizes: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        sizes.append(kwargs["input_ids"].numel())

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    yield sizes
    handle.remove()


def long_step() -> list[Group]:
    """One step of 60 tokens: nothing to share, nothing to cut between."""
    prompt, completion = [i % 31 for i in range(40)], [i * 7 % 32 for i in range(20)]
    return [make_group([([make_step(prompt, completion)], 1.0), ([make_step(prompt[:3], [5])], 0.0)])]


def nodes(learner: Learner, groups: Sequence[Group]) -> list[int]:
    return [len(tree) for tree in learner.trees(flatten(groups))]


@pytest.mark.quick(4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 16, 59])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_longer_than_the_budget_trains_as_it_does_alone(loss: str, budget: int, checkpointing: bool) -> None:
    groups = long_step()
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    old = earlier_policy(model, groups)
    wanted, _ = separate_gradient(model, groups, algorithm, old)
    learner = make_learner(
        model, algorithm, max_tokens_per_microbatch=budget, gradient_checkpointing=checkpointing, **LAYOUTS["step"]
    )
    assert max(nodes(learner, groups)) >= 60 > budget
    with computed(learner.model) as sizes:
        found, _ = accumulated(learner, groups, old)
    assert max(sizes) == budget
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", [7, 13])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_no_forward_pass_computes_more_nodes_than_the_budget(layout: dict[str, Any], budget: int) -> None:
    """A hard bound, in training and in scoring, with a coupled loss too."""
    groups = forked_groups(groups=1, length=6)
    learner = make_learner(
        exact("gemma3-half-sliding"), AlgorithmConfig(policy_loss=COUPLED), max_tokens_per_microbatch=budget, **layout
    )
    assert max(nodes(learner, groups)) > budget
    with computed(learner.model) as sizes:
        learner.logprobs(flatten(groups))
        accumulated(learner, groups)
    assert max(sizes) == budget


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_streamed_tree_that_forks_across_pieces_trains_as_each_step_alone(loss: str) -> None:
    """One tree, cut at every place in turn: pieces begin in trunks, at forks and in leaves."""
    groups = forked_groups(1, groups=1, length=2)
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    wanted, _ = separate_gradient(model, groups, algorithm)
    batch = flatten(groups)
    whole = make_learner(model, algorithm, **LAYOUTS["tree within batch"])
    (tree,) = whole.trees(batch)
    for budget in (*range(1, 6), len(tree) // 2, len(tree) - 1, len(tree)):
        whole.forward.budget = budget  # the layout stays one tree
        whole.model.zero_grad()
        objective = whole.objective(batch, advantages(batch, algorithm))
        gradient: Gradient = objective.gradient
        temperature = torch.from_numpy(batch.temperature).double()
        if whole.policy_loss.couples:
            gradient = lookup(objective.gradient(concat([whole.forward.scores(tree, temperature)], temperature)))
        with computed(whole.model) as sizes:
            whole.forward.backward(tree, temperature, gradient, entropy_grad=True)
        assert max(sizes) <= budget
        assert distance(gradients(whole.model), wanted) <= 1e-12 * norm(wanted), budget


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", [9, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_gradient_checkpointing_changes_nothing(layout: dict[str, Any], budget: int) -> None:
    """Whole and streamed, the same bits."""
    groups = forked_groups(groups=1)
    found = []
    for checkpointing in (False, True):
        learner = make_learner(
            tiny(),
            AlgorithmConfig(entropy_coef=0.05),
            max_tokens_per_microbatch=budget,
            gradient_checkpointing=checkpointing,
            **layout,
        )
        with computed(learner.model) as sizes:
            found.append(accumulated(learner, groups)[0])
        assert max(sizes) <= budget
    assert same_bits(*found)
