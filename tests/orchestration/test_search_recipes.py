"""The published recipes of Search-R1: what they say, and that they read the published files."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("httpx")

from tests.orchestration.runs import check_finished, query
from tests.worlds import Quiet
from treadle.core.types import Status
from treadle.envs.search.environment import Search
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.setup.validation import check_settings
from treadle.orchestration.train import train_run

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
    inputs = load_inputs(config)
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


def test_the_settings_are_skyrls() -> None:
    for config in map(load_recipe, (SYNC, ASYNC)):
        assert config.model.path == "Qwen/Qwen2.5-3B-Instruct"
        optimizer, rollout = config.training.optimizer, config.rollout
        assert (optimizer.learning_rate, optimizer.warmup, optimizer.max_grad_norm) == (1e-6, 94, 0.5)
        assert config.algorithm.kl is not None
        assert (config.algorithm.kl.coef, config.algorithm.kl.estimator, config.algorithm.advantage) == (
            1e-3,
            "k3",
            "grpo",
        )
        assert (config.training.group_size, rollout.max_steps, rollout.temperature) == (5, 4, 1.0)
        assert (rollout.max_completion_tokens, rollout.max_input_tokens) == (500, 4096)
        assert rollout.stop == ("</search>", "</answer>") and config.evaluation.temperature == 0
        assert config.environment_options["topk"] == 3 and config.environment_options["max_turns"] == 4
        assert rollout.environment_timeout > config.environment_options["patience"]
    sync, asynchronous = load_recipe(SYNC), load_recipe(ASYNC)
    assert (sync.groups_per_batch, sync.training.tasks_per_update, sync.orchestration.max_staleness) == (512, 256, 0)
    assert sync.algorithm.correction.token_tis == 2.0
    assert (asynchronous.groups_per_batch, asynchronous.orchestration.max_staleness) == (256, 8)
    assert asynchronous.orchestration.max_concurrent_groups == 1152
    assert asynchronous.algorithm.policy_loss == "importance_sampling"
    assert asynchronous.algorithm.correction.geometric_mask == (0.99, 1.01)


def test_search_small_trains_with_one_and_two_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
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
