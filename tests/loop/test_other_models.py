"""Runs whose environment calls models beside the policy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.judge.servers import TOKENS, judging
from tests.runs import Interrupting, check_finished, query, recorded, resume, start, updates
from tests.worlds import Vowels, tiny, user
from treadle.cli.main import main
from treadle.core.config_diff import changes
from treadle.core.errors import ConfigError
from treadle.core.types import Message, ModelCall, Task
from treadle.envs.base import EnvStep, Model
from treadle.plan.config import RunConfig
from treadle.plan.other_models import check_models
from treadle.plan.validation import check_changes


class Asked(Vowels):
    """A model begins, and answers the first reply."""

    async def reset(self, task: Task) -> list[Message]:
        await super().reset(task)
        return [user(await self.models["user"].chat([user("go")], max_tokens=3))]

    async def step(self, text: str) -> EnvStep:
        step = await super().step(text)
        return step if step.done else step._replace(observations=[user(await self.models["user"].chat([user(text)]))])


class Scripted:
    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        return "say a" if messages[0]["content"] == "go" else "more"


class Unrecorded(Asked):
    """Meets the same, without a model."""

    models: Mapping[str, Model] = {"user": Scripted()}


ASKED = "environment=tests.loop.test_other_models:Asked"


def calls(path: Path) -> dict[str, list[list[ModelCall]]]:
    return {name: [list(step.calls) for step in steps] for name, steps in recorded(path)}


def test_calls_are_on_record_and_change_nothing_that_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with judging(lambda m: "say a" if m[0]["content"] == "go" else "more") as server:
        asked = start(one, ASKED, f"models={json.dumps({'user': {'url': server.url, 'model': 'm'}})}")
    unrecorded = start(other, ASKED.replace(":Asked", ":Unrecorded"))
    assert asked["weights_sha256"] == unrecorded["weights_sha256"]
    check_finished(one)
    made = calls(one)
    assert {len(call.messages) for steps in made.values() for step in steps for call in step} == {1}
    assert all([len(step) for step in steps] == [2, 0] for steps in made.values())
    assert not any(call for steps in calls(other).values() for call in steps)
    same = zip(recorded(one), recorded(other), strict=True)
    assert all(a.full_ids.tolist() == b.full_ids.tolist() for (_, x), (_, y) in same for a, b in zip(x, y, strict=True))
    rows = query(one, "SELECT metrics FROM trajectories")
    paid = sum(json.loads(row["metrics"])["model_user_tokens"]["total"] for row in rows)
    assert paid == TOKENS * (server.answered - 1)  # but for the check before the first rollout
    assert updates(one)[0]["env/model_user_calls"] == 2 * 6
    assert main(["show", str(one), "g000000.0"]) == 0
    assert "user: 0 tokens read, 7 written" in capsys.readouterr().out


def test_a_server_may_move_and_its_model_may_not_change() -> None:
    def served(**changed: str) -> RunConfig:
        return tiny(f"models.user={json.dumps({'url': 'http://a/v1', 'model': 'm', **changed})}")

    check_changes(changes(served(), served(url="http://b/v1")))
    with pytest.raises(ConfigError, match=r"models\.user\.model is n, the run was started with m"):
        check_changes(changes(served(), served(model="n")))
    for name in ("policy", "a/b"):
        with pytest.raises(ConfigError, match="is not a valid name for a model"):
            tiny(f"models={json.dumps({name: {'url': 'http://a/v1', 'model': 'm'}})}")
    with pytest.raises(ConfigError, match=r"models\.critic\.path"):
        check_models(tiny("models.critic.path=/no/such/directory"))


REFERENCE, TEACHER = "algorithm.kl={coef: 0.1, model: big}", "algorithm.distillation.teacher=big"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([REFERENCE], r"models has none of that name; .* models\.reference\.path=big and .*model=reference"),
        ([TEACHER, "models.bigger.path=a"], r"there are bigger; .* models\.teacher\.path=big and .*teacher=teacher"),
        ([TEACHER, "models.big.policy=true"], r"models\.big is the policy in another role; leave .*teacher out"),
        ([REFERENCE, "models.big={url: 'http://a', model: m}"], r"models\.big is behind a url, .*; give a path"),
        ([TEACHER, "models.big={path: a, adapter: b}"], r"models\.big has an adapter; export it with --merge"),
        ([TEACHER, "models.big={path: a, options: {top_k: 3}}"], r"models\.big\.options are for models that reply"),
    ],
)
def test_what_cannot_score_is_no_reference_and_no_teacher(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*settings)


def test_what_scores_is_not_called() -> None:
    config = tiny(TEACHER, "models.big.path=a", "models.user.path=b")
    assert config.teacher is config.models["big"] and [*config.called_models] == ["user"]


@pytest.mark.slow
def test_a_model_of_this_process_repeats_bit_for_bit_also_after_a_resume(tmp_path: Path) -> None:
    start(tmp_path / "first", "orchestration.updates=2", "data.held_out=null")
    directory = tmp_path / "first" / "checkpoints" / "step-000002"
    settings = (ASKED, f"models={json.dumps({'user': {'path': str(directory), 'options': {'max_tokens': 6}}})}")
    whole = start(tmp_path / "whole", *settings)
    assert start(tmp_path / "cut", *settings, progress=Interrupting(which=4))["stopped_early"]
    resumed = resume(tmp_path / "cut")
    assert resumed["weights_sha256"] == whole["weights_sha256"]

    def said(path: Path) -> dict[str, Any]:
        of_runs = calls(path).items()
        return {name: [[(c.messages, c.reply, c.completion_tokens) for c in step] for step in s] for name, s in of_runs}

    one, other = said(tmp_path / "whole"), said(tmp_path / "cut")
    assert one.items() <= other.items()
    replies = [call[1]["content"] for steps in one.values() for step in steps for call in step]
    assert len(set(replies)) > len(replies) / 4
