"""The recipe `judge-smollm2`, with a small model and its rules behind real HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from tests.cli.worlds import treadle
from tests.http_servers import serving
from tests.judge.servers import at
from tests.runs import MODEL
from treadle.core.rewards import Reward
from treadle.recipes.judged.rules import Handler
from treadle.recipes.judged.support import Support, tasks
from treadle.rollout.other_models import OPEN_MODELS


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Handler) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize(
    ("reply", "components"),
    [
        ("I am sorry that your {item} is no good. We will send another.", [0.3, 0.4, 0.3]),
        ("What now? " * 9, [0.0, 0.0, 0.27]),
        ("", [0.0, 0.0, 0.0]),
    ],
)
async def test_rules_judge_by_the_rubric(url: str, reply: str, components: list[float]) -> None:
    [task] = tasks("train", 1)
    support = Support()
    messages = await support.reset(task)
    before = OPEN_MODELS.set({"judge": at(url)})
    reward = (await support.step(reply.format(item=messages[-1]["content"].split()[1]))).reward
    OPEN_MODELS.reset(before)
    assert isinstance(reward, Reward)
    assert [reward.components[name] for name in ("sorry", "named", "brief")] == pytest.approx(components)


@pytest.mark.slow
def test_an_update_is_made_and_a_dry_run_needs_no_judge(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build = {**MODEL, "path": None, "build": {**MODEL["build"], "max_position_embeddings": 256}}
    recipe = ("train", "judge-smollm2", f"model={json.dumps(build)}", "data.held_out=null", "training.threads=1")
    done = treadle(*recipe, "--dry-run")
    assert done.status == 0 and "that I ordered" in done.out, done.out
    short = ["training.tasks_per_update=2", "training.group_size=2", "orchestration.updates=1"]
    done = treadle(*recipe, "--name", "short", *short, f"models.judge.url={url}")
    assert done.status == 0, done.err
    [row] = [json.loads(line) for line in (tmp_path / "runs/short/metrics.jsonl").read_text().splitlines()]
    assert (row["trajectories"], row["failed"], row["env/judge_calls"]) == (4, 0, 12)
