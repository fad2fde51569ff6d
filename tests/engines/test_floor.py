"""Models whose layers cannot use the engine's cache are sampled call by call, with one of their own, and as exactly."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines.kit import (
    CONTEXT,
    PROMPT,
    End,
    Script,
    ids,
    learner_gap,
    logprobs,
    moved,
    plain_logprobs,
    random_scripts,
    recorded,
    sampling,
    serving,
    swapped,
    texts,
    wanted_logprobs,
)
from tests.models import ROW_FAMILIES, exact, random_groups, tiny
from tests.models import quiet as quiet
from tests.sources import publish
from treadle.algorithms.config import AlgorithmConfig
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.floor import RowModel
from treadle.engines.torch.kv_cache import KVCall
from treadle.engines.torch.model import Predicted
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import PinnedEngine
from treadle.models.config import LoraConfig
from treadle.models.lora import add_adapters
from treadle.models.weights import adapter_weights, unique_weights
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot share prefixes"),
    pytest.mark.filterwarnings("ignore:.*is sampled call by call"),
]
REASONS = {
    "mamba": "its Mamba layers",
    "jamba": "its Mamba layers",
    "deepseek-indexed": "it has indexed_attention layers",
    "glm-indexed": "it has indexed_attention layers",
    "deepseek-compressed": "it has heavily_compressed_attention layers",
    "llama4-chunked": "it has chunked_attention layers",
    "minimax": "1 of 2 layers of MiniMaxForCausalLM did not read the engine's cache",
    "recurrent-gemma": "1 of 2 layers of RecurrentGemmaForCausalLM did not read the engine's cache",
    "bloom": "2 of 2 layers of BloomForCausalLM did not read the engine's cache",
    "doge": "DogeAttention makes its own attention mask",
    "rwkv": "2 of 2 layers of RwkvForCausalLM did not read the engine's cache",
    "xlstm": "2 of 2 layers of xLSTMForCausalLM did not read the engine's cache",
}
WITHOUT = {"recurrent-gemma", "xlstm"}  # states in the layers themselves; a cache of other widths than these layers


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", list(ROW_FAMILIES))
def test_it_says_why_once_and_reports_what_the_learner_computes(family: str) -> None:
    """Sessions of several turns, some of which go back, side by side and one after another."""
    model, scripts = exact(family), random_scripts(3)
    for max_batch in (1, 3, 256):
        with pytest.warns(UserWarning, match="is sampled call by call") as record:
            played, engine = recorded(model, scripts, max_batch=max_batch)
        [said] = [str(w.message) for w in record if "is sampled" in str(w.message)]
        how = "each token with all before it" if family in WITHOUT else "with its own cache"
        assert re.search(f"call by call, {how}, which is slower: {REASONS[family]}", said)
        assert engine.counters.reused == 0 and not engine._batch._cached.cache.pasts
        assert learner_gap(model, played) < 1e-5


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", list(ROW_FAMILIES))
def test_what_a_call_samples_depends_on_nothing_else_to_the_bit(family: str) -> None:
    model, scripts = tiny(family), random_scripts(7)
    together, _ = recorded(model, scripts)
    again, _ = recorded(model, scripts)
    assert logprobs(together).tobytes() == logprobs(again).tobytes()
    for number, script in enumerate(scripts):
        alone, _ = recorded(model, [script])
        assert texts(alone) == texts([together[number]])
        assert logprobs(alone).tobytes() == logprobs([together[number]]).tobytes()


@pytest.mark.parametrize("mutant", ["none", "shared", "another's"])
def test_a_cache_of_another_row_would_show(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one prompt begin with copies, and rows move when others end."""
    if mutant == "shared":
        monkeypatch.setattr("treadle.engines.torch.kv_cache.deepcopy", lambda past: past)
    elif mutant == "another's":
        forward = RowModel.forward

        def rolled(self: RowModel, call: KVCall, ids: Tensor) -> Predicted:
            pasts = call.cache.pasts
            pasts.update(zip(pasts, [*list(pasts.values())[1:], *list(pasts.values())[:1]], strict=True))
            return forward(self, call, ids)

        monkeypatch.setattr(RowModel, "forward", rolled)
    model = exact("jamba")
    scripts = [Script(PROMPT, seed=n, max_tokens=2 + 5 * n, observations=[ids(n)] * 2) for n in range(4)]
    played, _ = recorded(model, scripts, lock_step=False)
    assert learner_gap(model, played) < 1e-5 if mutant == "none" else learner_gap(model, played) > 1e-3


def test_many_prompts_of_all_lengths_are_each_computed_whole() -> None:
    model, random = exact("jamba"), np.random.default_rng(0)
    scripts = [Script(random.integers(0, 32, 5 + n).astype(np.int32), seed=n) for n in range(20)]
    assert learner_gap(model, recorded(model, scripts)[0]) < 1e-5


@pytest.mark.parametrize("right", [True, False])
def test_a_cache_that_computes_otherwise_is_not_used(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax does not know from its cache where it is."""
    prepare = RowModel._prepare

    def without_positions(self: RowModel) -> bool:
        stateful = prepare(self)
        self._takes = dict.fromkeys(self._takes - {"position_ids"}).keys()
        return stateful

    if not right:
        monkeypatch.setattr(RowModel, "_prepare", without_positions)
    model = exact("minimax")
    played, engine = recorded(model, random_scripts(3))
    assert isinstance(engine._model, RowModel) and engine._model.keeps is right
    assert learner_gap(model, played) < 1e-5
    if not right:
        monkeypatch.setattr(RowModel, "_own_cache_is_right", lambda self: True)
        assert learner_gap(model, recorded(model, random_scripts(3))[0]) > 1e-3


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["recurrent-gemma", "jamba", "doge"])
async def test_weights_change_between_two_tokens(family: str) -> None:
    models = [tiny(family, max_position_embeddings=CONTEXT)]
    models += [moved(tiny(family, max_position_embeddings=CONTEXT), seed) for seed in (1, 2)]
    prompts = [PROMPT, ids(9, 9), PROMPT[:3]]
    for in_flight in ("keep", "recompute"):
        end = End()
        async with serving(models[0], lock_step=False, stop_token_ids=[], decode=end, in_flight=in_flight) as engine:
            answers = await swapped(engine, end, models, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert [span.version for span in answer.policy_versions] == [0, 1, 2]
            if in_flight == "keep" and family not in WITHOUT:
                wanted = wanted_logprobs(models, prompt, answer)
            else:
                wanted = np.select(
                    [answer.versions_per_token() == version for version in range(3)],
                    [plain_logprobs(model, prompt, answer) for model in models],
                )
            np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["bloom", "jamba", "recurrent-gemma"])
async def test_sessions_keep_the_adapter_of_their_first_call(family: str) -> None:
    model = exact(family)
    add_adapters(model, LoraConfig(rank=2, targets="all-linear"), 0)
    learner = Learner(model, TrainingConfig(), AlgorithmConfig(), 3)
    engine = PinnedEngine(lambda: TorchEngine(model, TorchEngineOptions([2], max_batch=8)), 2)
    played = []
    for version in range(2):
        await engine.update_weights(adapter_weights(model), version)
        engine.open_session(str(version))
        played.append(await engine.generate(PROMPT, sampling(version), session=str(version)))
        learner.train_batch(random_groups(version))  # with which models hold states of their last pass
    again = await engine.generate(PROMPT, sampling(0), session="0")
    assert again.logprobs.tobytes() == played[0].logprobs.tobytes()
    await engine.close()


@pytest.mark.parametrize("family", ["bloom", "jamba", "recurrent-gemma"])
async def test_it_scores_what_it_sampled_and_sleeps(family: str) -> None:
    async with serving(model := tiny(family), sessions="a") as engine:
        answer = await engine.generate(PROMPT, sampling(), session="a")
        scores = await engine.score(np.concatenate([PROMPT, answer.token_ids]))
        np.testing.assert_allclose(scores[len(PROMPT) - 1 :], answer.logprobs, atol=1e-5)
        await engine.sleep()
        await publish(engine, unique_weights(model), 1)
        again = await engine.generate(PROMPT, sampling(), session="a")
        assert again.logprobs.tobytes() == answer.logprobs.tobytes()


@pytest.mark.parametrize("family", ["minimax", "glm-indexed"])
async def test_it_reports_the_experts_that_the_learner_chooses(family: str) -> None:
    model = tiny(family)
    learner = Learner(model, TrainingConfig(routing_replay=True), AlgorithmConfig(), 1)
    async with serving(model, sessions="a", routing=True) as engine:
        answer = await engine.generate(PROMPT, sampling(), session="a")
    experts = learner.forward.experts(np.concatenate([PROMPT, answer.token_ids]))
    assert answer.routing is not None
    assert np.sort(answer.routing, -1).tolist() == np.sort(experts[len(PROMPT) - 1 : -1], -1).tolist()


@pytest.mark.parametrize("family", ["minimax", "xlstm", "bloom", "rwkv"])
def test_half_precision_stays_near(family: str) -> None:
    """MiniMax has float32 buffers beside, xLSTM computes them."""
    model, scripts = tiny(family), random_scripts(3)
    half, engine = recorded(model, scripts, dtype="bfloat16")
    assert engine._model.model.dtype == torch.bfloat16
    assert learner_gap(model, half) < 0.3
