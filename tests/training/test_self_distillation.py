"""The policy is its own teacher, with more in its prompt: what it sees, which weights it has, what is learned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.models import distance, exact, make_step, make_trajectory, norm, random_groups, same_bits, tiny, weights_of
from tests.training.reference import (
    LAYOUTS,
    OtherPrompts,
    adapted,
    advantage_of,
    forked_groups,
    learner_gradients,
    make_learner,
    taught_advantages,
)
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig
from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest
from treadle.core.types import Group, Message, Step, Task, Trajectory
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.models.pretrained import load_pretrained
from treadle.models.weights import saved
from treadle.packing.flat import flatten
from treadle.rendering.conversation import Conversation
from treadle.training.checkpoint import load_checkpoint, save_checkpoint
from treadle.training.config import OptimizerConfig, TrainingConfig, check_algorithm
from treadle.training.learner import Learner
from treadle.training.objective import TracedGroups
from treadle.training.teacher_prompts import TeacherPrompts

TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"
RENDERER = load_chat(ModelConfig(build={"model_type": "qwen3"}, tokenizer="demo"), None)[1]
FAST = OptimizerConfig(learning_rate=1e-2)
Messages = Callable[..., list[Message]]


def section(**fields: Any) -> DistillationConfig:
    return DistillationConfig(context="tests:context", **{"coef": 0.5, **fields})


def learner_of(model: PreTrainedModel, prompts: TeacherPrompts | None = None, **fields: Any) -> Learner:
    training = {key: fields.pop(key) for key in ("packing", "sharing") if key in fields}
    algorithm = AlgorithmConfig(distillation=section(**fields))
    traced = TracedGroups(share=1.0)
    return make_learner(
        model,
        algorithm,
        traced=traced,
        prompts=prompts or OtherPrompts(),
        optimizer=FAST,
        max_tokens_per_microbatch=40,
        **training,
    )


# Weights


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("weights", ["current", "start", "ema"])
@pytest.mark.parametrize("policy", [exact, lambda: adapted(exact())], ids=["all weights", "adapters"])
def test_each_token_is_taught_the_difference_to_the_teachers_prompt(
    policy: Callable[[], PreTrainedModel], weights: str, layout: dict[str, Any]
) -> None:
    groups, prompts, decay = forked_groups(groups=2), OtherPrompts(), 0.6
    fields: dict[str, Any] = {"ema_decay": decay} if weights == "ema" else {}
    learner = learner_of(policy(), None, weights=weights, **fields, **layout)
    before, teacher = policy(), policy()
    for _ in range(2):
        [result] = learner.train_batch(groups)
        batch, expected = flatten(groups), taught_advantages(before, teacher, groups, learner_section(learner), prompts)
        traced = np.concatenate([trace.advantage for trace in result.traces])
        np.testing.assert_allclose(traced[batch.mask], expected[batch.mask], rtol=1e-6, atol=1e-6)
        asked = np.array([ids is not None for ids in prompts.of(batch)])[batch.step_id]
        taught = taught_advantages(before, teacher, groups, section(coef=1.0, rewards=0.0), prompts)
        assert 0 < asked[batch.mask].mean() < 1
        assert result.metrics["taught_fraction"] == pytest.approx(asked[batch.mask].mean())
        assert result.metrics["teacher_kl"] == pytest.approx(-taught[batch.mask & asked].mean(), abs=1e-9)
        for name, tensor in saved(before).items():
            tensor.copy_(saved(learner.model)[name])
        share = {"current": 0.0, "start": 1.0, "ema": decay}[weights]
        for name, tensor in saved(teacher).items():
            tensor.mul_(share).add_(saved(before)[name], alpha=1 - share)


def learner_section(learner: Learner) -> DistillationConfig:
    assert learner.algorithm.distillation is not None
    return learner.algorithm.distillation


def test_as_a_loss_it_teaches_nothing_where_it_was_not_asked() -> None:
    class Silent(TeacherPrompts):
        def __init__(self) -> None: ...

        def of(self, batch: Any) -> list[Any]:
            return [None for _ in batch.steps]

    batch = flatten(random_groups(0))
    advantage = advantage_of(batch, AlgorithmConfig())
    plain = make_learner(exact(), max_tokens_per_microbatch=40)
    plain.accumulate(batch, advantage)
    for form in ("loss", "advantage", "reverse_top_k", "forward_top_k"):
        learner = learner_of(exact(), Silent(), form=form)
        theirs = learner.teacher_scores(batch)
        assert theirs is not None and theirs.logp.isnan().all()
        learner.accumulate(batch, advantage, teacher=theirs)
        found, expected = learner_gradients(learner), learner_gradients(plain)
        assert distance(found, expected) <= 1e-12 * norm(expected)


@pytest.mark.parametrize("weights", ["start", "ema"])
@pytest.mark.parametrize("lora", [False, True])
def test_training_goes_on_bit_by_bit(lora: bool, weights: str, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    bases = (load_pretrained(tmp_path / "base", "base") for _ in range(2))
    learner, again = (learner_of(adapted(base) if lora else base, weights=weights) for base in bases)
    learner.train_batch(random_groups(0))
    start, digest = weights_of(learner.model), save_checkpoint(tmp_path / "a", learner, TOKENIZER)
    load_checkpoint(Manifest.load(tmp_path / "a", digest), again, TOKENIZER)
    first, second = (each.train_batch(random_groups(1))[0] for each in (learner, again))
    assert first.metrics == second.metrics
    assert same_bits(weights_of(learner.model), weights_of(again.model))
    assert learner.teacher and again.teacher
    assert same_bits(learner.teacher.weights(), again.teacher.weights())
    assert not same_bits(weights_of(learner.model), start)


def test_a_teacher_of_the_start_is_that_after_a_warm_start() -> None:
    learner = learner_of(tiny(), weights="start")
    for parameter in learner.model.parameters():
        parameter.data.mul_(1.1)
    learner.begin_here()
    assert learner.teacher and same_bits(saved(learner.model), learner.teacher.weights())


def test_another_teacher_is_refused_on_resume(tmp_path: Path) -> None:
    def taught(seed: int) -> Learner:
        algorithm = AlgorithmConfig(distillation=DistillationConfig(teacher="T"))
        return make_learner(tiny(), algorithm, teacher=tiny(seed=seed))

    digest = save_checkpoint(tmp_path / "a", taught(5), TOKENIZER)
    checkpoint = Manifest.load(tmp_path / "a", digest)
    load_checkpoint(checkpoint, taught(5), TOKENIZER)
    with pytest.raises(CheckpointError, match="another teacher: weights or configuration in"):
        load_checkpoint(checkpoint, taught(6), TOKENIZER)


# Prompts


def with_answer(
    task: Task, trajectory: Trajectory, step: Step, siblings: Sequence[Trajectory], messages: Messages
) -> list[Message]:
    return [*messages(step), Message(role="user", content=f"It is {task.ground_truth}.")]


def with_sibling(
    task: Task, trajectory: Trajectory, step: Step, siblings: Sequence[Trajectory], messages: Messages
) -> list[Message] | None:
    good = [other for other in siblings if other.reward == 1]
    return [*messages(good[0].steps[-1], reply=True), *task.prompt] if good else None


def with_what_followed(
    task: Task, trajectory: Trajectory, step: Step, siblings: Sequence[Trajectory], messages: Messages
) -> list[Message] | None:
    asked, last = messages(step), messages(trajectory.steps[-1])
    return [*asked, *last[len(asked) :]] if step is not trajectory.steps[-1] else None


def same(*given: Any) -> Any:
    return given[-1](given[2])


def played_group() -> Group:
    """Two attempts of two steps at one task, the second one right, as an environment plays them."""
    opening = (Message(role="system", content="Search, then answer."), Message(role="user", content="Who?"))
    made: list[Trajectory] = []
    for answer, reward in (("chess", 0.0), ("golf", 1.0)):
        conversation, messages, steps = Conversation(RENDERER), list(opening), []
        for text in ("<search> Anna</search>", f"<answer> {answer}</answer>"):
            reply = Message(role="assistant", content=text)
            prompt = conversation.render(messages)
            steps.append(make_step(prompt.ids, RENDERER.reply(reply)))
            conversation.record(prompt, steps[-1].completion_ids, reply)
            messages += [reply, Message(role="tool", content="page Anna, hobby golf")]
        made.append(make_trajectory(steps, reward, 0, len(made)))
    return Group("g000000", 0, 0, 0, Task("task-0", opening, ground_truth="golf"), tuple(made))


def prompts_of(function: Callable[..., Any] | str, limit: int = 512) -> list[str | None]:
    name = function if isinstance(function, str) else f"{__name__}:{function.__name__}"
    made = TeacherPrompts(name, RENDERER, limit).of(flatten([played_group()]))
    return [None if prompt is None else RENDERER.decode(prompt[0]) for prompt in made]


OPENING = "<|im_start|>system\nSearch, then answer.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
SEARCHED = (
    "<|im_start|>assistant\n<search> Anna</search><|im_end|>\n<|im_start|>tool\npage Anna, hobby golf<|im_end|>\n"
)
ASKS = "<|im_start|>assistant\n"


def test_a_context_has_the_ground_truth_what_followed_and_siblings() -> None:
    answer = "<|im_start|>user\nIt is golf.<|im_end|>\n"
    assert prompts_of(with_answer) == [OPENING + answer + ASKS, OPENING + SEARCHED + answer + ASKS] * 2
    assert prompts_of(with_what_followed) == [OPENING + SEARCHED + ASKS, None] * 2
    right = OPENING + SEARCHED + "<|im_start|>assistant\n<answer> golf</answer><|im_end|>\n" + OPENING + ASKS
    assert prompts_of(with_sibling) == [right, right, None, None]


def test_asked_the_same_the_policy_teaches_itself_nothing() -> None:
    prompts = TeacherPrompts(f"{__name__}:same", RENDERER, 512)
    learner = learner_of(exact(vocab_size=760, max_position_embeddings=512), prompts, rewards=0.0)
    [result] = learner.train_batch([played_group()])
    assert max(np.abs(trace.advantage).max() for trace in result.traces) < 1e-12 and len(result.traces) == 4
    assert result.metrics["taught_fraction"] == 1


def test_the_teacher_is_not_asked_beyond_its_context() -> None:
    lengths = [len(step.full_ids) for step in flatten([played_group()]).steps]
    assert [each is None for each in prompts_of(same, limit=lengths[0])] == [False, True, False, True]


def wrong_text(*given: Any) -> str:
    return "think"


def nothing_at_all(*given: Any) -> list[Any]:
    return []


def wrong_message(*given: Any) -> list[Any]:
    return [{"role": "user"}]


def fails(*given: Any) -> Any:
    raise KeyError("hint")


def two(task: Task, step: Step) -> None: ...


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong_text", r"for step 0 of g000000\.0, must return a list of messages .*: its result must be a list"),
        ("nothing_at_all", r"for step 0 of g000000\.0, must return a list of messages .*: its result is \[\]"),
        ("wrong_message", r"must return a list of messages .*: its result: message 0 needs 'role' and 'content'"),
        ("fails", r"for step 0 of g000000\.0, raised KeyError: 'hint'"),
        ("two", r"is called as context\(task, trajectory, step, siblings, messages\), but: too many positional"),
        ("TOKENIZER", r"must be a function"),
        ("absent", r"absent"),
    ],
)
def test_a_context_that_is_wrong_is_named(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.distillation\.context: '{__name__}:{name}'.*{reason}"):
        prompts_of(f"{__name__}:{name}")


def test_a_prompt_that_no_template_wrote_cannot_be_read_back() -> None:
    group = played_group()
    first = group.trajectories[0]
    raw = replace(first, steps=(make_step([5, 6, 7], [8]), *first.steps[1:]))
    prompts = TeacherPrompts(f"{__name__}:same", RENDERER, 512)
    with pytest.raises(ConfigError, match="raised DataError: the messages of this prompt cannot be read back"):
        prompts.of(flatten([replace(group, trajectories=(raw, group.trajectories[1]))]))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "neither teacher nor context"),
        ({"teacher": "T", "weights": "ema"}, "weights is 'ema', but the teacher is another model"),
        ({"context": "m:f", "ema_decay": 0.5}, r"ema_decay is 0\.5, but weights is 'current'"),
        ({"teacher": "T", "top_k": 9}, "top_k is 9, but form 'advantage' compares sampled tokens"),
        ({"teacher": "T", "coef": 0}, "coef is 0, so that the teacher would teach nothing"),
    ],
)
def test_what_means_nothing_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_algorithm(AlgorithmConfig(distillation=DistillationConfig(**fields)), TrainingConfig())
