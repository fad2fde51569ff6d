"""Every family of models trains packed as it trains alone, or in rows of its own where layers cannot share prefixes."""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from tests.models import (
    FAMILIES,
    HYBRIDS,
    MORE_FAMILIES,
    ROW_FAMILIES,
    distance,
    exact,
    full,
    make_group,
    make_step,
    norm,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.models import quiet as quiet
from tests.rollout import families
from tests.training.reference import (
    COUPLED,
    LAYOUTS,
    accumulated,
    earlier_policy,
    forked_groups,
    make_learner,
    over_ranks,
    separate_gradient,
)
from tests.training.test_end_tokens import PUBLISHED, published
from tests.worlds import ROOT, user
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.errors import DataError
from treadle.core.types import FunctionCall, Message, ToolCall
from treadle.models.chat import load_chat
from treadle.models.support import decoder_of, slides, why_not_packable
from treadle.packing.flat import flatten
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.replies import Parser, parser_name
from treadle.training.learner import Learner

EVERY = [*FAMILIES, *MORE_FAMILIES]
PACKED = [*EVERY, *HYBRIDS]
ALGORITHM = AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=10.0, entropy_coef=0.01)


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", PACKED)
def test_a_tree_with_forks_trains_as_each_step_alone(family: str) -> None:
    """Whole and in chunks, sequences much longer than the sliding windows."""
    groups = forked_groups(3)
    model = exact(family)
    wanted, _ = separate_gradient(model, groups, ALGORITHM)
    assert norm(wanted) > 1e-2
    with torch.no_grad():
        logprobs = np.concatenate([full(step_logprobs(model, step)[0]) for step in flatten(groups).steps])
    for name, budget in (("tree within batch", 8192), ("tree within batch", 9), ("tree within group", 60)):
        again = family in HYBRIDS and budget < 8192  # layers are computed twice, also in the backward pass
        learner = make_learner(
            model, ALGORITHM, max_tokens_per_microbatch=budget, gradient_checkpointing=again, **LAYOUTS[name]
        )
        np.testing.assert_allclose(learner.logprobs(flatten(groups)), logprobs, rtol=1e-12, atol=1e-12)
        found, _ = accumulated(learner, groups)
        assert distance(found, wanted) <= 1e-12 * norm(wanted), (name, budget)


@pytest.mark.parametrize("family", EVERY)
def test_a_layer_that_slides_is_known_from_the_configuration(family: str) -> None:
    config = tiny(family).config
    found = [slides(config, layer) for layer in range(2)]
    assert any(found) == ("sliding" in family)
    assert all(found) == (family == "mistral-sliding")


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *((name, "sliding_window", 200) for name in EVERY if "sliding" in name),
        ("gemma2-half-sliding", "attn_logit_softcapping", 9.0),
        *(("granite", "logits_scaling", 0.9), ("cohere", "logit_scale", 0.9)),
        ("gemma3-capped", "final_logit_softcapping", 0.9),
    ],
)
def test_windows_and_scaling_of_the_head_matter_in_these_tests(family: str, field: str, value: float) -> None:
    """A guard for the test above: with the same weights and another window or scale the numbers differ."""
    fields: dict[str, Any] = {field: value}
    model, other = exact(family), exact(family, **fields)
    assert distance(weights_of(model), weights_of(other)) == 0
    one, two = (full(make_learner(m).logprobs(flatten(forked_groups()))) for m in (model, other))
    assert np.abs(one - two).max() > 1e-3


HEAD = "| family | a reply ends with | roles beside user and assistant | tools | thoughts | what breaks |"
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "-",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


SAME_TEMPLATE = {"llama3_1": "llama3_1, llama3_3"}
CALL = ToolCall(id="abcdefghi", type="function", function=FunctionCall(name="look", arguments='{"q": "x"}'))


def table() -> str:
    return "\n".join([HEAD, "|---|---|---|---|---|---|", *map(row, PUBLISHED)])


def row(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, renderer = load_chat(published(name, Path(folder)), None)
    ends = tokenizer.convert_ids_to_tokens(list(renderer.stop_ids))
    assert isinstance(ends, list)
    shown = ", ".join(f"`{end}`".replace("|", "\\|") for end in ends)
    breaks = ", ".join(dict.fromkeys([*thought_breaks(renderer), *end_breaks(renderer)])) or "-"
    label = SAME_TEMPLATE.get(name, name)
    return (
        f"| {label} | {shown} | {roles(renderer, name)} | {tools(renderer, name)} | {thoughts(renderer)} | {breaks} |"
    )


def roles(renderer: ChatRenderer, name: str) -> str:
    """Those that the template writes; of a system message, whether only one is taken."""
    found = [role for role in ("system", "developer", "tool") if takes(renderer, role, name)]
    one = "system" in found and renderer.merged(SEVERAL) is not SEVERAL
    return ", ".join(f"{role} (merged into one)" if role == "system" and one else role for role in found) or "none"


SEVERAL = Message(role="system", content="a"), user("b"), Message(role="system", content="c")


def takes(renderer: ChatRenderer, role: str, name: str) -> bool:
    said = Message(role=role, content="zqzz")
    reply, offered = Message(role="assistant", content="a"), []
    if role == "tool" and families.FAMILIES[name].tools:
        said["tool_call_id"], offered = CALL["id"], [LOOK]
        reply = Message(role="assistant", content="", tool_calls=[CALL])
    messages = [user("q"), reply, said] if role == "tool" else [said, user("q")]
    try:
        return "zqzz" in renderer.decode(Conversation(renderer).render(messages, offered).ids)
    except DataError:
        return False


def tools(renderer: ChatRenderer, name: str) -> str:
    return tools_of(renderer) if families.FAMILIES[name].tools else "-"


def tools_of(renderer: ChatRenderer) -> str:
    problem = renderer.tools_problem([LOOK], renderer.parser("auto"))
    label = parser_name(renderer.parser("auto")).removeprefix("auto (").removesuffix(")")
    if "leaves it out" in problem:
        return "written, calls left out"
    return "written, calls not read" if problem else f"`{label}`"


def thoughts(renderer: ChatRenderer) -> str:
    conversation = Conversation(renderer)
    prompt = conversation.render([user("q")])
    begun = renderer.decode(prompt.ids).rstrip().endswith("<think>")
    parse = renderer.parser("auto")
    taken = not isinstance(parse, Parser) or parse.thoughts
    return "begun by the prompt" if begun else "taken out" if taken else "-"


def thought_breaks(renderer: ChatRenderer) -> list[str]:
    """Why the next question's prompt does not go on, if the reply was thought about."""
    conversation, parse = Conversation(renderer), renderer.parser("auto")
    prompt = conversation.render([user("q")])
    begun = renderer.decode(prompt.ids).rstrip().endswith("<think>")
    text = "hm\n</think>\n\nyes" if begun else "<think>\nhm\n</think>\n\nyes"
    return broken(conversation, prompt, renderer, text, parse(("<think>" if begun else "") + text, []))


def end_breaks(renderer: ChatRenderer) -> list[str]:
    conversation = Conversation(renderer)
    prompt = conversation.render([user("q")])
    return broken(conversation, prompt, renderer, "yes", Message(role="assistant", content="yes"))


def broken(conversation: Conversation, prompt: Any, renderer: ChatRenderer, text: str, reply: Message) -> list[str]:
    ids = np.concatenate([renderer.encode(text), renderer.end_of_turn[-1:]]).astype(np.int32)
    conversation.record(prompt, ids, reply)
    cause = conversation.render([user("q"), reply, user("r")]).break_cause
    return [] if cause is None else [str(cause)]


def test_the_page_has_the_table_of_families() -> None:
    assert table() in (ROOT / "docs" / "rendering.md").read_text(), "run python -m tests.training.test_families"


if __name__ == "__main__":
    print(table())


REASONS = {
    "mamba": "its Mamba layers cannot continue from a state with several tokens",
    "jamba": "its Mamba layers cannot continue from a state with several tokens",
    "deepseek-indexed": "it has indexed_attention layers",
    "glm-indexed": "it has indexed_attention layers",
    "deepseek-compressed": "it has heavily_compressed_attention layers",
    "llama4-chunked": "it has chunked_attention layers",
    "minimax": "1 of 2 layers of MiniMaxForCausalLM attended through the prefix tree; the others would mix sequences",
    "recurrent-gemma": "1 of 2 layers of RecurrentGemmaForCausalLM attended through the prefix tree; the others .*",
    "bloom": "0 of 2 layers of BloomForCausalLM attended through the prefix tree; the others would mix sequences",
    "doge": "DogeAttention makes its own attention mask, which tree attention does not implement",
    "rwkv": "0 of 2 layers of RwkvForCausalLM attended through the prefix tree; the others would mix sequences",
    "xlstm": "0 of 2 layers of xLSTMForCausalLM attended through the prefix tree; the others would mix sequences",
}


def rows_learner(family: str, *args: Any, **training: Any) -> Learner:
    with pytest.warns(UserWarning, match="cannot share prefixes") as record:
        learner = make_learner(exact(family), *args, **training)
    assert len(record) == 1
    return learner


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", list(ROW_FAMILIES))
def test_it_warns_once_with_the_reason_and_trains_as_each_step_alone(family: str) -> None:
    """In rows that, padding included, never exceed the budget: a hard bound."""
    groups = forked_groups(groups=1)
    algorithm = AlgorithmConfig(entropy_coef=0.05)
    model = exact(family)
    old = earlier_policy(model, groups)
    wanted, metrics = separate_gradient(model, groups, algorithm, old)
    for budget in (26, 60, 8192):
        with pytest.warns(UserWarning, match=rf"{REASONS[family]}\): it is trained with packing 'step'") as record:
            learner = make_learner(exact(family), algorithm, max_tokens_per_microbatch=budget)
        assert len(record) == 1
        sizes: list[tuple[int, int]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sizes.append(kwargs["input_ids"].shape)  # noqa: B023

        decoder_of(learner.model).register_forward_pre_hook(note, with_kwargs=True)
        found, totals = accumulated(learner, groups, old)
        assert max(rows * longest for rows, longest in sizes) <= budget
        assert max(rows for rows, _ in sizes) > 1 or budget == 26  # padding is tested
        limit = 1e-7 if family == "xlstm" else 1e-12  # xLSTM's logits alone change by 2e-8 with padding behind
        assert distance(found, wanted) <= limit * norm(wanted)
        for name, value in metrics.items():
            assert totals[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_packing_is_step_there(layout: str) -> None:
    groups = forked_groups()
    wanted, _ = separate_gradient(exact("jamba"), groups, AlgorithmConfig(policy_loss=COUPLED))
    learner = rows_learner(
        "jamba",
        AlgorithmConfig(policy_loss=COUPLED),
        max_tokens_per_microbatch=70,
        gradient_checkpointing=True,
        **LAYOUTS[layout],
    )
    for ranks in (1, 3):
        found, _ = over_ranks(learner, groups, None, ranks)
        assert distance(found, wanted) <= 1e-12 * norm(wanted)
    _, metrics = accumulated(learner, groups)
    trained = [step for step in flatten(groups).steps if len(step.completion_ids)]
    assert metrics["packed_sequences"] == len(trained)
    assert metrics["packed_tokens"] == sum(len(step.full_ids) for step in trained)


def test_a_step_longer_than_the_budget_is_an_error_there() -> None:
    learner = rows_learner("jamba", max_tokens_per_microbatch=9)
    fits, long = make_step([1] * 5, [2] * 4), make_step([1] * 5, [2] * 5)
    learner.train_batch([make_group([([fits], 1.0)])])
    with pytest.raises(DataError, match=r"a call of 10 tokens exceeds max_tokens_per_microbatch = 9.*raise the budget"):
        learner.train_batch([make_group([([fits, long], 1.0)])])


# Which models


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("mamba", {}, "Mamba layers"),
        ("falcon_mamba", {}, "Mamba layers"),
        ("jamba", {}, "Mamba layers"),
        ("llama4_text", {}, "chunked_attention"),
        ("deepseek_v32", {}, "indexed_attention"),
        ("bart", {}, "cross-attention"),
        ("whisper", {}, "cross-attention"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    ],
)
def test_layers_that_cannot_share_prefixes_are_told_from_the_configuration(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, why_not_packable(AutoConfig.for_model(model_type, **fields)) or "")


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "ministral", "phi", "phi3", "gemma", "gemma3"),
        *(
            "gemma3_text",
            "gemma4_text",
            "olmo2",
            "olmo3",
            "olmoe",
            "granite",
            "granitemoe",
            "cohere",
            "cohere2",
            "glm4",
        ),
        *("smollm3", "starcoder2", "ernie4_5", "exaone4", "deepseek_v3", "opt", "gpt2", "gpt_neox", "seed_oss"),
        *("gemma2", "gpt_oss", "nemotron", "stablelm", "glm4_moe_lite"),
        *("qwen3_5_text", "qwen3_next", "bamba", "falcon_h1", "nemotron_h", "lfm2", "mamba2", "granitemoehybrid"),
    ],
)
def test_what_can_share_prefixes_is_told_from_the_configuration(model_type: str) -> None:
    assert why_not_packable(AutoConfig.for_model(model_type)) is None
