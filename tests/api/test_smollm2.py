"""SmolLM2, from the package index: what it says, that its prompts carry sampled ids, and that it can be trained.

Converted once, into the cache (`TREADLE_CACHE`, else the user's).
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import treadle
from tests.runs import recorded
from treadle.api.get_model import get_model
from treadle.core.errors import DownloadError
from treadle.core.types import Message
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.models.model_cache import ModelSource
from treadle.packing.breaks import Kind, relations
from treadle.packing.flat import PackedCall
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("orchestration_smollm2")]  # what its tests share is made once
pytest.importorskip("gguf", reason="needs treadle[train]")
SMOLLM2 = ModelConfig(path="smollm2")


@pytest.fixture(scope="module", autouse=True)
def directory() -> Path:
    try:
        return get_model("smollm2", print)
    except DownloadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return load_chat(SMOLLM2, None)[1]


class Twice(treadle.Environment):
    """Says "Why?" once; what is said then is worth 1 in 2."""

    async def reset(self, task: treadle.Task) -> list[Message]:
        self.turns = 0
        return list(task.prompt)

    async def step(self, text: str) -> treadle.EnvStep:
        self.turns += 1
        if self.turns == 1:
            return treadle.EnvStep([{"role": "user", "content": "Why?"}])
        return treadle.EnvStep(reward=float(len(text) % 2), done=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One update of two groups of two attempts, each of two steps."""
    path = tmp_path_factory.mktemp("smollm2") / "run"
    questions = ("What is the capital of France?", "Name a colour.")
    tasks = [treadle.Task(f"task-{n}", [{"role": "user", "content": text}]) for n, text in enumerate(questions)]
    settings = {
        "training.tasks_per_update": 2,
        "training.group_size": 2,
        "training.threads": 1,
        "orchestration.updates": 1,
        "rollout.max_steps": 2,
        "rollout.max_input_tokens": 96,
        "rollout.max_completion_tokens": 8,
    }
    treadle.train(Twice, tasks, model="smollm2", run=path, settings=settings)
    yield path
    shutil.rmtree(path)  # checkpoints of 1.6 GB


def test_it_is_a_model_that_can_read(directory: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert model.num_parameters() == 134_515_008
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
    assert ModelSource.read(directory).licence == "apache-2.0"


def test_its_template_has_a_system_message_and_its_prompts_carry_what_was_sampled(renderer: ChatRenderer) -> None:
    conversation = Conversation(renderer)
    messages: list[Message] = [{"role": "user", "content": "Count   12 <|im_end|>"}]
    first = conversation.render(messages)
    assert renderer.decode(first.ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nCount   12 <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    [end] = renderer.stop_ids
    assert [int(i) for i in first.ids].count(end) == 2  # the user's own is text
    odd = [*(renderer.encode(letter)[0] for letter in "Paris"), end]  # letter by letter
    conversation.record(first, np.array(odd), {"role": "assistant", "content": "Paris"})
    again = conversation.render(
        [*messages, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "?"}]
    )
    assert [int(i) for i in again.ids[: len(first.ids) + len(odd)]] == [*(int(i) for i in first.ids), *odd]


def test_engine_and_learner_compute_the_same(run: Path) -> None:
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (row["trajectories"], row["failed"], row["steps_mean"]) == (4, 0, 2.0)
    assert row["trainable_tokens"] > 16
    assert row["logprob_gap_max"] < 1e-4
    assert abs(row["ratio_mean"] - 1) < 1e-4
    assert row["gradient_norm"] > 0
    assert np.isfinite(row["loss"])


def test_every_second_step_appends_to_the_first(run: Path, renderer: ChatRenderer) -> None:
    trajectories = recorded(run)
    assert len(trajectories) == 4
    for _, steps in trajectories:
        calls = [PackedCall(step.full_ids, len(step.prompt_ids), first=0) for step in steps]
        kinds = [relation.kind for relation in relations(calls, renderer.decode)]
        assert kinds[1:] == [Kind.EXTENDS]


def test_the_trained_model_is_a_model_path_of_its_own(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000001"
    config = json.loads((checkpoint / "config.json").read_bytes())
    assert (config["model_type"], "quantization_config" in config) == ("llama", False)
    load_chat(ModelConfig(path=str(checkpoint)), None)
