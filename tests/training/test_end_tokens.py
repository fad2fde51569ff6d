"""Which tokens end a reply: all that a model's files name, as recorded tokens, here and in what is exported."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.models import tiny
from tests.rollout.families import FAMILIES, World, small_vocabulary
from tests.worlds import user
from treadle.core.errors import ConfigError
from treadle.core.files import Manifest
from treadle.core.types import BreakCause, Message
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.rendering.conversation import Conversation, check_turns
from treadle.training.checkpoint import export_model
from treadle.training.make import load_model

TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))
QUESTION = user("q")

# The tokenizer's eos_token and generation_config.json's eos_token_id, as the models on the hub have them.
PUBLISHED = {
    "qwen2_5": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_5_think": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_6": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_8": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "llama3": ("<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>"]),
    "llama3_1": ("<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "gemma": ("<eos>", None),
    "gemma3": ("<eos>", ["<eos>", "<end_of_turn>"]),
    "gemma4": ("<eos>", ["<eos>", "<turn|>"]),
    "glm4moe": ("<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gptoss": ("<|return|>", ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "deepseekv3": (FAMILIES["deepseekv3"].stops[0], FAMILIES["deepseekv3"].stops[0]),
    "phi3_5": ("<|endoftext|>", ["<|end|>", "<|assistant|>", "<|endoftext|>"]),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "smollm2": ("<|im_end|>", "<|im_end|>"),
    "smollm3": ("<|im_end|>", "<|im_end|>"),
    "mistral_nemo": ("</s>", "</s>"),
    "mistral_small_3_2": ("</s>", "</s>"),
    "ministral_3": ("</s>", "</s>"),
    "ministral_3_reasoning": ("</s>", "</s>"),
    "kimi_k2": ("[EOS]", "<|im_end|>"),
    "kimi_k2_thinking": ("[EOS]", "<|im_end|>"),
    "nemotron_3_nano": ("<|im_end|>", ["<|endoftext|>", "<|im_end|>"]),
}


def published(name: str, folder: Path, declared: bool = True) -> ModelConfig:
    """A tokenizer's directory as the model's own; declared: with its generation_config.json."""
    family = FAMILIES[name]
    eos, ends = PUBLISHED[name]
    world = World(family, small_vocabulary())
    world.tokenizer.add_special_tokens([eos, *([ends] if isinstance(ends, str) else ends or [])])
    hf: Any = PreTrainedTokenizerFast(
        tokenizer_object=world.tokenizer,
        eos_token=eos,
        chat_template=world.hf.chat_template,
        bos_token=family.bos or None,
    )
    hf.save_pretrained(str(folder))
    if ends is not None and declared:
        ids = hf.convert_tokens_to_ids(ends)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "temperature": 0.6}))
    return ModelConfig(build={"model_type": "qwen3"}, tokenizer=str(folder), chat_template_kwargs=family.options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_starts_and_all_its_end_tokens_end_a_reply(name: str, tmp_path: Path) -> None:
    tokenizer, renderer = load_chat(published(name, tmp_path), None)
    eos, ends = PUBLISHED[name]
    expected = {eos, *([ends] if isinstance(ends, str) else ends or ["<end_of_turn>"])}
    assert set(tokenizer.convert_ids_to_tokens(list(renderer.stop_ids))) == expected
    check_turns(renderer, [QUESTION], several=True)
    reply = Message(role="assistant", content="well")
    for end in renderer.stop_ids:  # each is recorded as sampled, and has its cause where the template has another
        conversation = Conversation(renderer)
        prompt = conversation.render([QUESTION])
        sampled = np.array([*renderer.encode("well"), end], np.int32)
        conversation.record(prompt, sampled, reply)
        following = conversation.render([QUESTION, reply, QUESTION])
        carried = [*prompt.ids.tolist(), *sampled.tolist()]
        if following.break_cause is None:
            assert following.ids[: len(carried)].tolist() == carried
        elif name != "deepseekv3":
            assert following.break_cause == BreakCause.END_TOKEN_REWRITTEN
            assert following.ids[: len(carried) - 1].tolist() == carried[:-1]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("gptoss", "llama3_1")])
def test_without_generation_config_the_template_tells_what_ends_its_turns(name: str, tmp_path: Path) -> None:
    _, renderer = load_chat(published(name, tmp_path, declared=False), None)
    check_turns(renderer, [QUESTION], several=True)


def test_the_setting_takes_their_place(tmp_path: Path) -> None:
    config = published("qwen3", tmp_path)
    tokenizer, renderer = load_chat(config.model_copy(update={"stop_tokens": ("<|im_end|>", "</tool_call>")}), None)
    assert tokenizer.convert_ids_to_tokens(list(renderer.stop_ids)) == ["<|im_end|>", "</tool_call>"]
    with pytest.raises(ConfigError, match=r"model\.stop_tokens: the tokenizer has no token '<\|eot_id\|>'"):
        load_chat(config.model_copy(update={"stop_tokens": ("<|eot_id|>",)}), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 99999}', r"generation_config\.json: eos_token_id 99999 is none of the tokenizer's \d+ ids"),
        ("{", r"generation_config\.json cannot be read"),
        ('{"eos_token_id": [0, true]}', r"generation_config\.json: eos_token_id is an id or a list of them, got True"),
        ("[]", r"generation_config\.json: expected an object, found list"),
    ],
)
def test_a_file_that_cannot_be_right_is_named(content: str, message: str, tmp_path: Path) -> None:
    config = published("qwen3", tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_chat(config, None)


def test_a_tokenizer_without_template_or_end_is_refused_until_they_are_given(tmp_path: Path) -> None:
    config = published("qwen3", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    template = tmp_path.parent / "template.jinja"
    shutil.move(tmp_path / "chat_template.jinja", template)
    with pytest.raises(ConfigError, match=r"no chat template; add .* or set model\.chat_template"):
        load_chat(config, None)
    assert load_chat(config.model_copy(update={"chat_template": str(template)}), None)[1].stop_ids
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del facts["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"names no eos_token, and neither .* set model\.stop_tokens"):
        load_chat(config.model_copy(update={"chat_template": str(template)}), None)


# What is exported


def model_directory(folder: Path, **generation: Any) -> ModelConfig:
    export_model(folder, tiny("qwen3", vocab_size=726), TOKENIZER)
    (folder / "SHA256SUMS").unlink()
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig(path=str(folder))


def test_files_of_the_models_directory_come_along(tmp_path: Path) -> None:
    config = model_directory(tmp_path / "model", eos_token_id=[2, 0], temperature=0.6)
    for name in ("LICENSE", "preprocessor_config.json", "model.safetensors.index.json", "pytorch_model.bin", ".hidden"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "original").mkdir()
    model = load_model(config, 0)
    export_model(tmp_path / "export", model, tmp_path / "model")
    there = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"LICENSE", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja"} <= there
    assert not there & {"model.safetensors.index.json", "pytorch_model.bin", ".hidden", "original"}
    generation = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 0], "temperature": 0.6}
    export_model(tmp_path / "again", load_model(ModelConfig(path=str(tmp_path / "export")), 0), tmp_path / "export")
    assert {path.name for path in (tmp_path / "again").iterdir()} == there


def test_the_tokenizer_is_exported_whole_and_no_other_ones_files(tmp_path: Path) -> None:
    config, tokenizer = model_directory(tmp_path / "model", eos_token_id=[2, 0]), tmp_path / "tokenizer"
    (tmp_path / "model" / "special_tokens_map.json").write_text('{"eos_token": "<|other|>"}')
    (tmp_path / "model" / "added_tokens.json").write_text('{"<|other|>": 5}')
    (tmp_path / "model" / "vocab.json").write_text("{}")
    facts = json.loads(shutil.copytree(TOKENIZER, tokenizer).joinpath("tokenizer_config.json").read_text())
    facts = {name: fact for name, fact in facts.items() if name not in ("eos_token", "added_tokens_decoder")}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(facts))
    (tokenizer / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    other = config.model_copy(update={"tokenizer": str(tokenizer)})
    for configured in (other, ModelConfig(build=TINY, tokenizer=str(tokenizer))):
        target = tmp_path / f"export of {configured.path is None}"
        export_model(target, load_model(configured, 0), tokenizer)
        exported, ours = (
            load_chat(ModelConfig(path=str(path), tokenizer=str(path)), None)[0] for path in (target, tokenizer)
        )
        assert exported.special_tokens_map == ours.special_tokens_map and len(exported) == len(ours)
        assert exported.chat_template == ours.chat_template and set(exported.chat_template) == {"default", "tool_use"}
        Manifest.load(target).prove(["additional_chat_templates/tool_use.jinja"])


TINY = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 1, "num_attention_heads": 2},
}


@pytest.mark.parametrize("given", [None, ("<|im_end|>", "a")])
def test_a_model_from_scratch_gets_its_end_tokens(given: tuple[str, ...] | None, tmp_path: Path) -> None:
    """llama's own default is id 2, whatever that is here."""
    config = ModelConfig(build=TINY, tokenizer="demo", stop_tokens=given)
    export_model(tmp_path / "model", load_model(config, 0), TOKENIZER)
    stops = load_chat(config, None)[1].stop_ids
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == list(stops)
    assert load_chat(ModelConfig(path=str(tmp_path / "model")), None)[1].stop_ids == stops
