"""The published recipes of Search-R1, and a run whose retrieval server is killed and started again."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("httpx")
pytest.importorskip("bm25s")

from tests.runs import check_finished, query
from tests.worlds import Quiet
from treadle.api.train import train_run
from treadle.core.types import Status
from treadle.envs.search.environment import Search
from treadle.plan.config import RunConfig, load_recipe
from treadle.plan.inputs import load_data, load_inputs
from treadle.plan.validation import check_settings

SYNC, ASYNC = "search-r1", "search-r1-async"
PROMPT = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Question: who wrote Faust?"}]


def published(path: Path, truth: str, prompt: list[dict[str, str]]) -> Path:
    """A file as SkyRL (`reward_spec`) or Search-R1 (`reward_model`) writes it."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "searchR1_nq",
            "prompt": prompt,
            "ability": "fact-reasoning",
            "env_class": "search",
            truth: {"ground_truth": {"target": ["Goethe", "J. W. von Goethe"]}, "style": "rule"},
            "extra_info": {"index": number, "split": path.stem, "tools_kwargs": {"search": {"question": "?"}}},
            "metadata": None,
        }
        for number in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def recipe(name: str, folder: Path, *overrides: str) -> RunConfig:
    sources = [f"data.train.source={folder}/train.parquet", f"data.held_out.source={folder}/validation.parquet"]
    return load_recipe(name, [*sources, *overrides])


@pytest.mark.parametrize("name", [SYNC, ASYNC])
@pytest.mark.parametrize(
    ("truth", "prompt", "overrides"),
    [
        ("reward_spec", PROMPT, ()),
        ("reward_model", PROMPT[1:], ("data.columns.ground_truth=reward_model.ground_truth.target",)),
        ("reward_model", PROMPT[1:], ("data.columns.ground_truth=reward_model.ground_truth",)),
    ],
)
def test_the_published_files_are_read_as_they_are(
    tmp_path: Path, name: str, truth: str, prompt: list[dict[str, str]], overrides: tuple[str, ...]
) -> None:
    for split in ("train", "validation"):
        published(tmp_path / f"{split}.parquet", truth, prompt)
    config = recipe(name, tmp_path, *overrides)
    check_settings(config)
    inputs = load_data(config)
    assert (len(inputs.train), len(inputs.held_out)) == (3, 3)
    task = inputs.train[0]
    assert [dict(message) for message in task.prompt] == prompt
    assert (task.environment, task.extras) == ("search", {"data_source": "searchR1_nq"})

    async def reward() -> Any:
        environment = inputs.players.environments["search"]()
        assert isinstance(environment, Search)
        await environment.reset(task)
        assert (await environment.step("<answer>the j w von Goethe</answer>")).done
        return (await environment.finish(Status.DONE)).reward

    assert asyncio.run(reward()) == 1.0


def test_search_small_trains_with_one_and_two_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    small = [
        "warm_start.steps=2",
        "warm_start.max_loss=99",
        "warm_start.batch_size=4",
        "training.tasks_per_update=2",
        "training.group_size=2",
    ]
    small += ["orchestration.updates=1", "data.held_out.options.count=4", "evaluation.greedy_too=false"]
    config = load_recipe("search-small", [*small, "training.threads=1"])
    train_run(config, load_inputs(config), tmp_path / "run", Quiet())
    check_finished(tmp_path / "run")
    assert query(tmp_path / "run", "SELECT count(*) AS n FROM trajectories WHERE status = 'failed'") == [{"n": 0}]
