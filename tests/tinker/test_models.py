"""Created models over one base: updates, files, and versions to sample by."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.models import distance, exact, make_group, make_step, norm, same_bits, tiny
from tests.tinker.kit import TOKENIZER, conversations, trained_model
from tests.training.reference import randomize
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.reductions import token_weights
from treadle.core.errors import CheckpointError, DataError, EngineError
from treadle.core.types import Group
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.lora import load_adapter
from treadle.models.weights import adapter_weights
from treadle.packing.flat import flatten
from treadle.tinker.data import AdamParams, Adapter, Datum, PromptScores, Sampling
from treadle.tinker.learner import TrainedModel
from treadle.tinker.models import Models, Version
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner

POLICY = ("logprobs", "advantages")
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    return copied(adapter_weights(model.model))


def base(folder: Path, **fields: Any) -> PreTrainedModel:
    """A tiny base with files."""
    model = tiny(**fields)
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@asynccontextmanager
async def open_models(model: PreTrainedModel, kept: int = 3) -> AsyncIterator[Models]:
    options = TorchEngineOptions((0,), cache_gib=0.1)
    models = Models(model, TOKENIZER, options, lambda ids: "".join(chr(97 + i) for i in ids), kept=kept)
    yield models
    await models.close()


# Training


def groups(seed: int) -> list[Group]:
    """Two groups of two attempts, of which one has two turns."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return random.integers(0, 32, count).astype(np.int32)

    made = []
    for number in range(2):
        trajectories = []
        for attempt in range(2):
            first = make_step(ids(4), ids(3), logprobs=-random.uniform(2, 4, 3))
            steps = [first]
            if attempt:
                steps.append(make_step(np.concatenate([first.full_ids, ids(2)]), ids(4), logprobs=[-3.0] * 4))
            trajectories.append((steps, float(attempt)))
        made.append(make_group(trajectories, index=number))
    return made


def datums(learner: Learner, batch: list[Group]) -> list[Datum]:
    """The steps as a client sends them, with the learner's advantages and its loss's weights."""
    flat = flatten(batch)
    advantage = learner._advantages(flat, None, None, None) * token_weights(flat, learner.algorithm)
    made = []
    for step, first in zip(flat.steps, flat.step_start, strict=False):
        prompt, sampled = len(step.prompt_ids), len(step.completion_ids)
        advantages, logprobs = np.zeros(prompt - 1 + sampled), np.zeros(prompt - 1 + sampled)
        advantages[prompt - 1 :] = advantage[first : first + sampled]
        logprobs[prompt - 1 :] = step.logprobs
        inputs = {"target_tokens": step.full_ids[1:].astype(np.int64), "logprobs": logprobs, "advantages": advantages}
        made.append(Datum(step.full_ids[:-1], inputs))
    return made


def test_the_first_updates_are_those_of_the_learner() -> None:
    """By importance sampling from the same adapter on the same data, with clipping by norm and weight decay."""
    optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.05, warmup=0)
    model = trained_model(train_unembed=False)
    algorithm = AlgorithmConfig(policy_loss="importance_sampling")
    learner = Learner(trained_model(train_unembed=False).model, TrainingConfig(optimizer=optimizer), algorithm, 10)
    (beta1, beta2), start = optimizer.betas, weights(model)
    params = AdamParams(0.01, beta1, beta2, 1e-8, optimizer.weight_decay, optimizer.max_grad_norm)
    assert same_bits(start, copied(adapter_weights(learner.model)))
    for update in range(3):
        data = datums(learner, groups(update))
        # In two calls, as clients send large batches.
        model.forward(data[:2], "importance_sampling", {}, backward=True)
        model.forward(data[2:], "importance_sampling", {}, backward=True)
        assert model.optim_step(params)["grad_norm"] > params.grad_clip_norm
        learner.train_batch(groups(update))
    assert distance(weights(model), start) > 1e-3
    assert distance(weights(model), adapter_weights(learner.model)) <= 1e-12 * norm(start)


def test_a_step_without_a_gradient_changes_nothing() -> None:
    model = trained_model()
    before = weights(model)
    assert model.optim_step(AdamParams(weight_decay=0.5)) == {"grad_norm": 0.0}
    assert same_bits(before, weights(model))


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": float("inf")},
        {"weight_decay": -1e-3},
    ],
)
def test_wrong_parameters_of_a_step_are_refused_and_keep_the_gradient(wrong: dict[str, float]) -> None:
    model = trained_model()
    model.forward(conversations(("weights",)), "cross_entropy", {}, backward=True)
    before = weights(model)
    with pytest.raises(DataError, match=next(iter(wrong))):
        model.optim_step(replace(AdamParams(), **wrong))
    assert same_bits(before, weights(model))
    assert model.optim_step(AdamParams())["grad_norm"] > 0


def test_a_gradient_that_is_not_finite_is_cleared() -> None:
    model = trained_model()
    before = weights(model)
    model.forward(conversations(("weights",)), "cross_entropy", {}, backward=True)
    next(p for p in model.model.parameters() if p.grad is not None).grad.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(DataError, match="norm is nan"):
        model.optim_step(AdamParams())
    assert same_bits(before, weights(model))
    assert model.optim_step(AdamParams()) == {"grad_norm": 0.0}


async def test_models_over_one_base_do_not_touch_each_other() -> None:
    base_model = exact()
    untouched = copied(dict(base_model.state_dict()))
    async with open_models(base_model) as models:
        one = models.create("one", Adapter(2), seed=1)
        alone = TrainedModel(exact(), Adapter(5, train_mlp=False), 2, 8192, TOKENIZER)
        two = models.create("two", Adapter(5, train_mlp=False), seed=2)
        for seed in range(2):
            for model, data in ((one, conversations(POLICY, seed=seed)), (two, conversations(POLICY, seed=9 - seed))):
                model.forward(data, "ppo", {}, backward=True)
            alone.forward(conversations(POLICY, seed=9 - seed), "ppo", {}, backward=True)
            for model in (two, alone, one):
                model.optim_step(AdamParams(0.1))
        assert same_bits(weights(two), weights(alone))
        assert distance(weights(one), weights(TrainedModel(base_model, Adapter(2), 1, 8192, TOKENIZER))) > 0.1
        with pytest.raises(DataError, match="'one' already"):
            models.create("one", Adapter(2), seed=1)
        models.unload("one")
        with pytest.raises(KeyError):
            models["one"]
    assert same_bits(untouched, {name: tensor for name, tensor in base_model.state_dict().items()})


@pytest.mark.parametrize("tied", [True, False])
def test_which_layers_an_adapter_has(tied: bool) -> None:
    def layers(**adapter: bool) -> set[str]:
        model = TrainedModel(exact(tie_word_embeddings=tied), Adapter(2, **adapter), 0, 8192, TOKENIZER)
        return {name.split(".lora_")[0].rpartition(".")[2] for name in weights(model)}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers() == attention | mlp | {"lm_head"}
    assert layers(train_unembed=False) == attention | mlp
    assert layers(train_mlp=False, train_unembed=False) == attention
    assert layers(train_attn=False) == mlp | {"lm_head"}
    assert layers(train_attn=False, train_mlp=False) == {"lm_head"}
    with pytest.raises(DataError, match="nothing to train"):
        layers(train_attn=False, train_mlp=False, train_unembed=False)


def test_an_adapter_of_rank_zero_is_refused() -> None:
    with pytest.raises(DataError, match="rank"):
        TrainedModel(exact(), Adapter(0), 0, 8192, TOKENIZER)


# Files


def trained_once(model: TrainedModel, seed: int) -> None:
    model.forward(conversations(("weights",), seed=seed), "cross_entropy", {}, backward=True)
    model.optim_step(AdamParams(0.01, weight_decay=0.1))


def test_a_saved_model_continues_with_the_same_bits(tmp_path: Path) -> None:
    model = trained_model(base(tmp_path / "base"))
    trained_once(model, 0)
    model.save(tmp_path / "saved")
    trained_once(model, 1)
    another = trained_model(base(tmp_path / "base"))
    another.forward(conversations(("weights",), seed=5), "cross_entropy", {}, backward=True)  # dropped by loading
    another.load(tmp_path / "saved", optimizer=True)
    trained_once(another, 1)
    assert same_bits(weights(model), weights(another))
    fresh = trained_model(base(tmp_path / "base"))
    for loaded in (another, fresh):
        loaded.load(tmp_path / "saved", optimizer=False)
        trained_once(loaded, 1)
    assert same_bits(weights(another), weights(fresh))
    assert distance(weights(model), weights(fresh)) > 1e-4


def test_a_saved_model_is_an_adapter_for_treadle(tmp_path: Path) -> None:
    model = trained_model(base(tmp_path / "base"), train_unembed=False)
    model.save(tmp_path / "saved")
    model.save(tmp_path / "saved")  # replaced
    merged = base(tmp_path / "base")
    load_adapter(merged, tmp_path / "saved", None)
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(merged(tokens).logits, model.model(tokens).logits, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "saved/tokenizer.json").is_file()


def test_a_model_of_another_rank_or_base_is_not_loaded(tmp_path: Path) -> None:
    model = trained_model(base(tmp_path / "base"))
    model.save(tmp_path / "saved")
    before = weights(other := trained_model(base(tmp_path / "base"), rank=4))
    with pytest.raises(CheckpointError, match="rank"):
        other.load(tmp_path / "saved", optimizer=True)
    assert same_bits(before, weights(other))
    elsewhere = trained_model(base(tmp_path / "other", seed=3))
    with pytest.raises(CheckpointError, match="another one"):
        elsewhere.load(tmp_path / "saved", optimizer=True)


# Sampling


def plain_logprobs(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].float()
    return np.asarray(logits.log_softmax(-1).detach().numpy())


def assert_sampled_by(model: PreTrainedModel, samples: Any) -> None:
    for sequence in samples.sequences:
        whole = np.concatenate([PROMPT, sequence.ids])
        each = plain_logprobs(model, whole)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, each[np.arange(len(each)), sequence.ids], atol=1e-4)


async def test_a_version_is_sampled_while_training_goes_on() -> None:
    base_model = tiny()
    async with open_models(base_model) as models:
        model = models.create("m", Adapter(3), seed=1)
        randomize(model.model)
        version = models.publish("m", "v1")
        frozen = model.copy()
        sampling = Sampling(max_tokens=12, seed=3, stop=())
        before = await models.sample(version, PROMPT, sampling, 4)

        def train() -> None:
            for seed in range(3):
                model.forward(conversations(("weights",), seed=seed), "cross_entropy", {}, backward=True)
                model.optim_step(AdamParams(0.5))

        during, _ = await asyncio.gather(models.sample(version, PROMPT, sampling, 4), asyncio.to_thread(train))
        after = await models.sample(models.publish("m", "v2"), PROMPT, sampling, 4)
        for samples in (before, during):
            assert_sampled_by(frozen, samples)
        assert_sampled_by(model.copy(), after)
        assert_sampled_by(base_model, await models.sample(None, PROMPT, sampling, 2))
        assert [s.ids.tolist() for s in before.sequences] == [s.ids.tolist() for s in during.sequences]
        assert len({tuple(s.ids) for s in before.sequences}) == 4
        assert [s.ids.tolist() for s in before.sequences] != [s.ids.tolist() for s in after.sequences]


async def test_a_client_s_next_turn_is_computed_from_where_its_last_one_ended() -> None:
    async with open_models(base_model := tiny()) as models:
        [first] = (await models.sample(None, PROMPT, Sampling(6, stop=()), 1)).sequences
        whole = np.concatenate([PROMPT, first.ids, PROMPT])
        [second] = (await models.sample(None, whole, Sampling(6, stop=()), 1)).sequences
        [served] = models._samplers._served.values()
        assert served.engine.counters.reused == len(PROMPT) + 5  # not the last sampled one, whose keys nothing needed
        each = plain_logprobs(base_model, np.concatenate([whole, second.ids]))[len(whole) - 1 :]
        np.testing.assert_allclose(second.logprobs, each[np.arange(6), second.ids], atol=1e-4)


async def test_what_ends_a_sample() -> None:
    async with open_models(tiny()) as models:
        [free] = (await models.sample(None, PROMPT, Sampling(max_tokens=40, seed=1, stop=()), 1)).sequences
        assert (len(free.ids), free.stop_reason) == (40, "length")
        third = int(free.ids[2])

        async def ended(stop: Any, max_tokens: int | None = 40) -> tuple[list[int], str]:
            [one] = (await models.sample(None, PROMPT, Sampling(max_tokens, seed=1, stop=stop), 1)).sequences
            return one.ids.tolist(), one.stop_reason

        until = free.ids.tolist()[: free.ids.tolist().index(third) + 1]
        assert await ended([third]) == (until, "stop")
        assert await ended(chr(97 + third)) == (until, "stop")
        assert await ended([chr(97 + third)]) == (until, "stop")
        assert (await ended(None, None))[0][-1] == 0  # the model's own end
        with pytest.raises(DataError, match="not both"):
            await ended(["a", 3])
        with pytest.raises(DataError, match="max_tokens"):
            await ended(None, 0)
        with pytest.raises(EngineError, match="in \\[0, 32\\)"):
            await models.sample(None, np.array([32], np.int32), Sampling(1))


async def test_log_probabilities_of_a_prompt() -> None:
    model = tiny()
    async with open_models(model) as models:
        wanted = np.array([[3, -1], [0, 31], [-1, -1], [7, 7]])
        scores = PromptScores(logprobs=True, top=4, targets=wanted, top_sampled=2)
        samples = await models.sample(None, PROMPT, Sampling(max_tokens=3, stop=()), 1, scores)
        every = plain_logprobs(model, PROMPT)
        assert samples.prompt_logprobs is not None and samples.prompt_top is not None
        assert np.isnan(samples.prompt_logprobs[0])
        np.testing.assert_allclose(samples.prompt_logprobs[1:], every[np.arange(4), PROMPT[1:]], atol=1e-5)
        assert (samples.prompt_top.ids[0] == 0).all() and (samples.prompt_top.logprobs[0] == -99999).all()
        np.testing.assert_array_equal(samples.prompt_top.ids[1:], np.argsort(-every)[:, :4])
        np.testing.assert_allclose(samples.prompt_top.logprobs[1:], -np.sort(-every)[:, :4], atol=1e-5)
        asked = np.where(wanted < 0, 0, np.take_along_axis(every, wanted.clip(0), 1))
        assert isinstance(samples.target_logprobs, np.ndarray)
        np.testing.assert_allclose(samples.target_logprobs, asked, atol=1e-5)
        [sequence] = samples.sequences
        each = plain_logprobs(model, np.concatenate([PROMPT, sequence.ids]))[4:]
        assert sequence.top is not None
        np.testing.assert_array_equal(sequence.top.ids, np.argsort(-each)[:, :2])
        none = await models.sample(None, PROMPT, Sampling(), 0, PromptScores(logprobs=True))
        assert not none.sequences and none.prompt_logprobs is not None
        for wrong in (PromptScores(top=33), PromptScores(targets=wanted[1:]), PromptScores(targets=wanted + 30)):
            with pytest.raises(DataError):
                await models.sample(None, PROMPT, Sampling(1), 1, wrong)


async def test_a_version_comes_back_from_files_whatever_its_rank(tmp_path: Path) -> None:
    async with open_models(base(tmp_path / "base")) as models:
        model = models.create("m", Adapter(6, train_attn=False), seed=1)
        randomize(model.model)
        model.save(tmp_path / "saved")
        version = models.load_version(tmp_path / "saved", "again")
        assert_sampled_by(model.copy(), await models.sample(version, PROMPT, Sampling(8, stop=()), 2))
        recorded = json.loads((tmp_path / "saved/base.json").read_text())
        assert recorded["path"] == str(tmp_path / "base")
    async with open_models(base(tmp_path / "other", seed=4)) as others:
        with pytest.raises(CheckpointError, match="another one"):
            others.load_version(tmp_path / "saved", "again")


async def test_engines_of_unused_versions_are_closed_and_come_back() -> None:
    """Never one in use."""
    async with open_models(tiny(), kept=1) as models:
        model = models.create("m", Adapter(2), seed=1)
        versions: list[Version] = []
        for number in range(3):
            randomize(model.model, number)
            versions.append(models.publish("m", f"v{number}"))
        sampling = Sampling(max_tokens=8, stop=())

        async def ids(version: Version) -> list[list[int]]:
            return [s.ids.tolist() for s in (await models.sample(version, PROMPT, sampling, 2)).sequences]

        alone = [await ids(version) for version in versions]
        assert len(models._samplers._served) == 1
        together = await asyncio.gather(*(ids(version) for version in versions * 2))
        assert together == alone * 2
        assert len(models._samplers._served) == 1


async def test_a_prompt_of_one_token() -> None:
    async with open_models(tiny()) as models:
        scores = PromptScores(logprobs=True, top=2, targets=np.zeros((0, 3), np.int64))
        samples = await models.sample(None, PROMPT[:1], Sampling(4, stop=()), 1, scores)
        assert samples.prompt_logprobs is not None and np.isnan(samples.prompt_logprobs).tolist() == [True]
        assert samples.prompt_top is not None and samples.prompt_top.ids.shape == (1, 2)
        assert samples.target_logprobs is not None and samples.target_logprobs.shape == (0, 3)


async def test_a_base_is_opened_with_its_tokenizer_and_its_end_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    tiny(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    models = Models.open(tmp_path, cache_gib=0.1)
    try:
        assert models.vocabulary == len(tokenizer)
        prompt = np.array(tokenizer.encode("what is"), np.int32)
        [free] = (await models.sample(None, prompt, Sampling(60, seed=2, stop=()), 1)).sequences
        text = tokenizer.decode(free.ids.tolist(), skip_special_tokens=False)
        stop = str(text)[8:11]
        [short] = (await models.sample(None, prompt, Sampling(60, seed=2, stop=[stop]), 1)).sequences
        assert short.stop_reason == "stop" and len(short.ids) < 60
        assert stop in tokenizer.decode(short.ids.tolist(), skip_special_tokens=False)
        assert models._samplers._options.stop_token_ids == (tokenizer.eos_token_id,)
    finally:
        await models.close()
