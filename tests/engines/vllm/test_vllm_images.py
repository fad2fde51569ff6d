"""Images on vLLM's servers: what is sent is what the model's chat template writes, and what comes back is checked."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.engines.kit import sampling
from tests.engines.vllm.conftest import python_with_vllm
from tests.runs import check_finished, start, updates
from tests.seeing import FAMILIES, own_logits, picture, prompt, tokenizer, whole, write
from tests.sources import FixedWeights
from treadle.core.config import build
from treadle.core.errors import EngineError
from treadle.core.images import PLACE, Picture, PromptImage
from treadle.core.types import Ids
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.images import Pictures, check_ids, prompt_of
from treadle.engines.vllm.launch import ServerProcess
from treadle.loop.engines import servers_see
from treadle.models.config import ModelConfig
from treadle.models.vision import ImageProcessor

LINES = ["\n" * number for number in (4, 3, 2, 1)]
"""Tokens of Gemma's tokenizer, which vLLM looks for."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
# As small as vLLM's kernels allow.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"num_attention_heads": 1, "num_key_value_heads": 1, "rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
SERVED = [family for family in FAMILIES if not family.startswith("gemma")]
"""vLLM's CPU build sees Gemma's images in one direction; a run is then refused at its start."""
SIDES = (32, 32), (64, 32)


@dataclass
class Model:
    directory: Path
    family: str

    @classmethod
    def made(cls, directory: Path, family: str) -> "Model":
        own = tokenizer(family)
        if family.startswith("gemma"):
            own.add_tokens(LINES)
        sizes = {"head_dim": 32, "vocab_size": len(own), **SIZES.get(family, {})}
        if family == "gemma4":
            sizes["vocab_size_per_layer_input"] = len(own)
        write(directory, family, **sizes)
        own.save_pretrained(directory)
        return cls(directory, family)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.directory, local_files_only=True)

    def encode(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    @cached_property
    def pictures(self) -> Pictures:
        processor = ImageProcessor(self.directory)
        return Pictures(processor, self.encode, self.tokenizer.decode, len(self.tokenizer), 1e-3)

    def prompt(self, texts: Sequence[str], shown: Sequence[Picture]) -> tuple[Ids, list[PromptImage]]:
        """Ids of texts with pictures between them, encoded as a whole."""
        processor = self.pictures.processor
        made = [processor.prepared(each.url) for each in shown]
        ids = self.encode(texts[0] + "".join(one.text + text for one, text in zip(made, texts[1:], strict=True)))
        where = np.split(np.flatnonzero(ids == processor.placeholder), np.cumsum([each.tokens for each in made])[:-1])
        _, images = prompt(processor, self.tokenizer, PLACE.join(texts), shown)
        return ids, [
            replace(image, start=int(places[0]), length=int(places[-1] + 1 - places[0]))
            for image, places in zip(images, where, strict=True)
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.made(tmp_path_factory.mktemp("models") / request.param, request.param)


TEXTS = st.lists(st.sampled_from(["a", " see", "\n", "\n\n", " ", "<|im_end|>"]), max_size=3).map("".join)


@settings(max_examples=30)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_a_prompt_is_sent_as_the_template_writes_it(model: Model, texts: list[str]) -> None:
    """Also where white space of the text and of what stands for an image is one token."""
    ids, images = model.prompt(texts, [picture(seed, SIDES[seed % 2]) for seed in range(len(texts) - 1)])
    sent = model.pictures.collapsed(ids, images)
    assert model.tokenizer.decode(sent) == model.pictures.processor.name.join(texts)


async def test_what_cannot_be_sent_or_was_not_expanded_as_recorded_is_an_error(model: Model) -> None:
    ids, images = model.prompt(["see ", " then"], [picture(0)])
    trained = replace(model.pictures, trained=True)
    for pictures, changes in ((model.pictures, False), (trained, True)):
        calls = [await prompt_of(ids, images, label, pictures) for label in ("run.1", "run.2", "another.1")]
        first, second, third = (call["content_parts"][0]["uuid"] for call in calls)
        assert (first != second) == changes and first != third
    with pytest.raises(EngineError, match="started without the model's tower, and are shown 1 images"):
        await prompt_of(ids, images, "label", None)
    with pytest.raises(EngineError, match="are not those of its processor"):
        model.pictures.collapsed(np.roll(ids, 1), images)
    check_ids("a server", {"prompt_token_ids": ids.tolist()}, ids, images)
    check_ids("a server", {}, ids, [])
    with pytest.raises(EngineError, match=rf"makes {len(ids)} ids of a prompt of {len(ids)} .* others from id 2 on"):
        check_ids("a server", {"prompt_token_ids": [*ids[:2].tolist(), 1, *ids[3:].tolist()]}, ids, images)
    with pytest.raises(EngineError, match=f"makes {len(ids) - 1} ids .* others from id {len(ids) - 1} on"):
        check_ids("a server", {"prompt_token_ids": ids[:-1].tolist()}, ids, images)
    with pytest.raises(EngineError, match="makes 0 ids"):
        check_ids("a server", {}, ids, images)


def test_servers_have_a_tower_where_images_come(model: Model, tmp_path: Path) -> None:
    def sees(known: bool, directory: Path = model.directory, **engine: Any) -> bool:
        return servers_see(build(EngineConfig, {"kind": "vllm", **engine}), ModelConfig(path=str(directory)), known)

    assert sees(True) and not sees(False)
    assert not sees(True, options={"args": {"language_model_only": True}})
    assert sees(False, options={"args": {"language-model-only": False}})
    assert sees(False, options={"servers": ["http://127.0.0.1:9"]})
    assert not sees(True, kind="torch")
    for file in model.directory.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    assert not sees(True, tmp_path)


@pytest.fixture
def python(model: Model) -> str:
    found = python_with_vllm()
    torchvision = model.family != "idefics3"
    if torchvision and subprocess.run([found, "-c", "import torchvision"], capture_output=True).returncode:
        pytest.skip(f"vLLM's class of {model.family} needs torchvision beside it")
    return found


ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("model", SERVED, indirect=True)
async def test_a_server_computes_what_transformers_does(python: str, model: Model, tmp_path: Path) -> None:
    """Over two turns, of which the second begins as the first; a greedy reply is transformers' own."""
    half = model.family == "qwen3_5"  # as vLLM's CPU build wants gated delta nets
    options = {"python": python, "environment": ENVIRONMENT, "args": {"language-model-only": None}}
    config = build(EngineConfig, {"kind": "vllm", "options": options, **({"dtype": "bfloat16"} if half else {})})
    engine, _ = await open_engine(
        config,
        FixedWeights(),
        serve=lambda number: ServerProcess(model.directory, config, tmp_path / "log"),
        stop_token_ids=[],
        pictures=replace(model.pictures, tolerance=0.1) if half else model.pictures,
    )
    try:
        engine.open_session("a")
        own = whole(model.directory)
        wide = picture(1, (64, 32) if model.family.startswith("qwen") else (32, 32))  # not to be scaled
        ids, images = model.prompt(["see ", " and ", " then"], [picture(0), wide])
        for _ in range(2):
            logits = own_logits(own, model.pictures.processor, ids, images)
            wanted = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
            gap = np.abs(await engine.score(ids, images=images) - wanted.numpy())
            assert gap.mean() < 0.05 if half else gap.max() < 1e-5
            answer = await engine.generate(ids, sampling(temperature=0.0, max_tokens=1), session="a", images=images)
            assert half or answer.token_ids.tolist() == [int(logits[-1].argmax())]
            more, others = model.prompt([" now ", "."], [picture(2)])
            ids = np.concatenate([ids, answer.token_ids, more])
            images = [*images, *(replace(each, start=each.start + len(ids) - len(more)) for each in others)]
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("model", ["idefics3", "qwen3_vl"], indirect=True)
def test_a_run_trains_what_a_server_saw(python: str, model: Model, tmp_path: Path) -> None:
    """With a trained tower, whose features a server must not keep."""
    engine = ("engine.kind=vllm", f"engine.options.python={python}", f"engine.options.environment={ENVIRONMENT}")
    seen = (
        f"model.path={model.directory}",
        "model.build=null",
        "model.tokenizer=null",
        "environment=tests.seeing:Looks",
    )
    rest = ("rollout.max_input_tokens=300", "training.vision=train", "training.optimizer.learning_rate=0.01")
    start(tmp_path / "run", *engine, *seen, *rest)
    check_finished(tmp_path / "run")  # what was sampled has the learner's log-probabilities to 1e-4
    assert all(row["logprob_gap_max"] < 1e-3 for row in updates(tmp_path / "run"))
