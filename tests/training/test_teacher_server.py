"""A teacher behind a server that answers as vLLM does: what it scores is what the same model scores in process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

pytest.importorskip("httpx")

from tests.http_servers import answering, serving
from tests.judge.servers import quick as quick
from tests.models import VOCABULARY, each_step, tiny
from tests.runs import check_finished, start, updates
from tests.training.reference import FewIds, forked_groups, make_learner
from tests.worlds import Quiet
from tests.worlds import tiny as recipe
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig
from treadle.api.sft import learn_demonstrations
from treadle.core.config_diff import changes
from treadle.core.errors import ConfigError, TrainingStopped
from treadle.core.types import Group, Step
from treadle.packing.flat import flatten
from treadle.plan.validation import check_changes, check_config, check_playing, check_settings
from treadle.training import teacher_server
from treadle.training.config import WarmStartConfig
from treadle.training.teacher_server import TeacherServer, covering

TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


class Scripted:
    """failing: statuses of the first calls. renamed: an id that is another text here. asked: sequences that were.

    keys: headers `Authorization` of all calls.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.tokenizer = model, AutoTokenizer.from_pretrained(str(TOKENIZER))
        self.failing: list[int] = []
        self.renamed: int | None = None
        self.asked: list[list[int]] = []
        self.keys: set[str | None] = set()

    def __call__(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        self.keys.add(headers["Authorization"])
        status = self.failing.pop() if self.failing else 200
        return status, self.answer(path, body) if status == 200 else {"error": "out of order"}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return {"max_model_len": 128}
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode([7 if i == self.renamed else i for i in body["tokens"]])}
        assert (path, body["max_tokens"], body["temperature"]) == ("/v1/completions", 1, 0.0)
        self.asked.append(ids := body["prompt"])
        with torch.no_grad():
            logp = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        entries = [
            None,
            *(self.entry(row, after, body["prompt_logprobs"]) for row, after in zip(logp[:-1], ids[1:], strict=True)),
        ]
        return {"choices": [{"prompt_logprobs": entries}]}

    def entry(self, logp: torch.Tensor, token: int, k: int) -> dict[str, Any]:
        order = logp.argsort(descending=True).tolist()
        named = {token, *order[:k]}
        return {str(i): {"logprob": logp[i].item(), "rank": order.index(i) + 1, "decoded_token": "?"} for i in named}


def groups() -> list[Group]:
    """At temperature 1, but for greedy steps, which are not trained."""

    def at_one(step: Step) -> Step:
        return replace(step, sampling=replace(step.sampling, temperature=float(step.sampling.temperature > 0)))

    return each_step(at_one, forked_groups(groups=2))


@pytest.mark.parametrize("form", ["advantage", "loss", "reverse_top_k", "forward_top_k"])
def test_a_server_teaches_what_its_model_would_in_process(
    form: Literal["advantage", "loss", "reverse_top_k", "forward_top_k"],
) -> None:
    fields: dict[str, Any] = {"form": form} | ({"top_k": 3} if form.endswith("k") else {})
    batch, teacher = flatten(groups()), tiny(seed=5)
    local = make_learner(
        tiny(), AlgorithmConfig(distillation=DistillationConfig(teacher="T", **fields)), teacher=teacher
    )
    script = Scripted(teacher)
    with serving(answering(script)) as url:
        algorithm = AlgorithmConfig(distillation=DistillationConfig(teacher="T", **fields))
        served = make_learner(tiny(), algorithm, server=TeacherServer(url))
        script.failing = [503, 500]
        mine, theirs = local.teacher_scores(batch), served.teacher_scores(batch)
        (one,), (other,) = (each.train_batch(groups()) for each in (local, served))
    assert mine is not None and theirs is not None
    torch.testing.assert_close(theirs.logp[batch.mask], mine.logp[batch.mask], rtol=1e-5, atol=1e-5)
    if mine.top is not None and mine.top_ids is not None and theirs.top is not None and theirs.top_ids is not None:
        torch.testing.assert_close(theirs.top[batch.mask], mine.top[batch.mask], rtol=1e-5, atol=1e-5)
        assert theirs.top_ids[batch.mask].tolist() == mine.top_ids[batch.mask].tolist()
    assert other.metrics["teacher_kl"] == pytest.approx(one.metrics["teacher_kl"], abs=1e-5)
    assert other.advantage == pytest.approx(one.advantage, abs=1e-5)
    assert other.metrics["gradient_norm"] == pytest.approx(one.metrics["gradient_norm"], rel=1e-4)
    assert len(script.asked) < 2 * len(batch.steps)  # prefixes of others are not asked for again


def test_a_server_credits_turns_as_its_model_would_in_process() -> None:
    section = DistillationConfig(teacher="T", form="turns", coef=0.1)
    algorithm, teacher = AlgorithmConfig(advantage="step_return", distillation=section), tiny(seed=5)
    local = make_learner(tiny(), algorithm, teacher=teacher, truths=FewIds())
    with serving(answering(Scripted(teacher))) as url:
        served = make_learner(tiny(), algorithm, server=TeacherServer(url), truths=FewIds())
        (one,), (other,) = (each.train_batch(groups()) for each in (local, served))
    assert other.metrics["truth_logprob"] == pytest.approx(one.metrics["truth_logprob"], abs=1e-5)
    assert other.advantage == pytest.approx(one.advantage, abs=1e-5)


def test_sequences_are_covered_by_the_longest_that_begin_with_them() -> None:
    keys = [b"ab", b"", b"abcd", b"abce", b"ab", b"b", b"abc"]
    assert covering(keys) == [b"abcd", b"", b"abcd", b"abce", b"abcd", b"b", b"abcd"] or covering(keys) == [
        *(b"abce", b"", b"abcd", b"abce", b"abce", b"b", b"abce")
    ]


def test_a_server_that_cannot_teach_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    script, tokenizer = Scripted(tiny()), AutoTokenizer.from_pretrained(str(TOKENIZER))
    monkeypatch.setattr(teacher_server, "_DECODED", 16)
    with serving(answering(script)) as url:
        server = TeacherServer(f"{url}/v1")
        server.check(tokenizer, 127, 0)
        assert server.context == 127
        with pytest.raises(ConfigError, match=r"scores up to 127 tokens, .* may have 128; .* --max-model-len 129"):
            server.check(tokenizer, 128, 0)
        script.failing = [400, 200]  # the second call, which scores
        with pytest.raises(ConfigError, match=r"is not a vLLM server that scores prompts: status 400"):
            server.check(tokenizer, 127, 0)
        script.renamed = 3
        with pytest.raises(ConfigError, match=r"token 3 is .* for the trained model, and not for "):
            server.check(tokenizer, 127, 0)
    monkeypatch.setattr(teacher_server, "_AT_START", 0.05)
    with pytest.raises(ConfigError, match=r"is not a vLLM server that scores prompts: no answer within 0\.05 s"):
        server.check(tokenizer, 127, 0)


def test_a_server_that_fails_for_too_long_or_refuses_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    step = flatten(groups()).steps[0]
    script = Scripted(tiny())
    with serving(answering(script)) as url:
        script.failing = [400]
        with pytest.raises(TrainingStopped, match=r"status 400: .*; restart it, and resume"):
            TeacherServer(url).scores([step], [len(step.completion_ids)], 0, VOCABULARY)
        with pytest.raises(TrainingStopped, match=r"most probable are not 40 of the policy's"):
            TeacherServer(url).scores([step], [len(step.completion_ids)], 40, VOCABULARY)
    monkeypatch.setattr(teacher_server, "_PATIENCE", 0.05)
    with pytest.raises(TrainingStopped, match=r"no answer within 0\.05 s"):
        TeacherServer(url).scores([step], [len(step.completion_ids)], 0, VOCABULARY)


def test_only_temperature_1_can_be_served_and_a_server_may_move() -> None:
    def taught(url: str, *more: str) -> Any:
        model = json.dumps({"url": url, "model": "m"})
        return recipe("algorithm.distillation.teacher=big", f"models.big={model}", *more)

    with pytest.raises(ConfigError, match=r"rollout\.temperature is 0\.7, but a vLLM server scores prompts only at 1"):
        check_settings(taught("http://a", "rollout.temperature=0.7"))
    check_changes(changes(taught("http://a"), taught("http://b")))
    learner = make_learner(tiny(), AlgorithmConfig(distillation=DistillationConfig(teacher="T")))
    with pytest.raises(ConfigError, match=r"was sampled at 0\.8; sample at 1, or give the teacher as a path"):
        learner.teacher_scores(flatten(forked_groups()))


def test_the_key_of_a_served_teacher_is_sent_and_only_training_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"url": "http://a", "model": "m", "api_key_env": "TREADLE_TEST_KEY"}
    config = recipe("algorithm.distillation.teacher=big", f"models.big={json.dumps(model)}")
    check_playing(config)
    with pytest.raises(ConfigError, match=r"models\.big\.api_key_env: .* 'TREADLE_TEST_KEY' is not set"):
        check_config(config)
    (tmp_path / "lesson.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}'
    )
    lesson = WarmStartConfig(demonstrations=str(tmp_path / "lesson.jsonl"))
    with pytest.raises(ConfigError, match=r"models\.big\.api_key_env: .* 'TREADLE_TEST_KEY' is not set"):
        learn_demonstrations(config.model_copy(update={"warm_start": lesson}), tmp_path / "warm", Quiet())
    monkeypatch.setenv("TREADLE_TEST_KEY", "secret")
    check_config(config)
    script = Scripted(tiny())
    with serving(answering(script)) as url:
        server = TeacherServer(url, model="m", api_key_env="TREADLE_TEST_KEY")
        server.check(AutoTokenizer.from_pretrained(str(TOKENIZER)), 127, 0)
    assert script.keys == {"Bearer secret"}


def test_a_run_learns_from_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering(Scripted(tiny(seed=5, vocab_size=800)))) as url:  # more than the policy's 726
        section = json.dumps({"teacher": "big", "form": "reverse_top_k", "top_k": 4, "rewards": 0.0})
        model = f"models.big={json.dumps({'url': url, 'model': 'm'})}"
        start(
            tmp_path / "run",
            model,
            f"algorithm.distillation={section}",
            "orchestration.updates=2",
            "data.held_out=null",
        )
    check_finished(tmp_path / "run")
    assert all(np.isfinite(row["teacher_kl"]) for row in updates(tmp_path / "run"))
