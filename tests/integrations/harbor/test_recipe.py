"""The recipes of Harbor's trials: what is published, and what the command line says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.cli.main import main
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.data.config import sources_of
from treadle.integrations.harbor.config import HarborConfig
from treadle.integrations.harbor.driver import HarborDriver
from treadle.integrations.harbor.tasks import harbor_sums
from treadle.orchestration.config import load_recipe
from treadle.orchestration.setup.inputs import configured_drivers


def test_recipes_have_the_published_values() -> None:
    for name, tasks, at_once in (("codecontests", 32, 512), ("codecontests-async", 16, 128)):
        recipe = load_recipe(name)
        harbor = build(HarborConfig, recipe.driver_options)
        assert recipe.model.path == "Qwen/Qwen3-8B"
        assert (recipe.training.tasks_per_update, recipe.training.group_size) == (tasks, 8)
        assert (harbor.concurrency, harbor.trials_per_second) == (at_once, 5.0)
        assert recipe.training.optimizer.learning_rate == 1e-6
        assert recipe.rollout.max_input_tokens + recipe.rollout.max_completion_tokens == 32_768
        assert recipe.algorithm.advantage_options == {"norm_by_std": False} and recipe.algorithm.kl is None
        assert recipe.algorithm.reduction == "token_mean"
        assert recipe.rewards.overlong == "drop" and recipe.evaluation.attempts == 2
        assert harbor.trial["agent"]["override_timeout_sec"] == 1200 and harbor.agent == "terminus-2"
        kwargs = harbor.trial["agent"]["kwargs"]
        assert (kwargs["max_turns"], kwargs["enable_summarize"]) == (32, False)
        assert recipe.engine_in_training(HarborDriver.may_wait).lock_step is False
    synchronous, asynchronous = load_recipe("codecontests"), load_recipe("codecontests-async")
    assert synchronous.algorithm.correction.token_tis == 2.0
    assert asynchronous.algorithm.correction.geometric_mask == (0.99, 1.01)
    section = asynchronous.orchestration
    assert (section.max_staleness, section.max_concurrent_groups) == (4, 32)


def test_tasks_and_agent_are_named_on_the_command_line(tmp_path: Path) -> None:
    recipe = load_recipe("harbor", [f"data.train.options.path={tmp_path}", "driver_options.agent=terminus-2-stock"])
    assert [source.options for source in sources_of(recipe.data.train)] == [{"path": str(tmp_path)}]
    assert recipe.driver_options["agent"] == "terminus-2-stock"
    changed = load_recipe("harbor", ["driver_options.trial.agent.kwargs.max_turns=4"])
    assert changed.driver_options["trial"]["agent"]["kwargs"]["max_turns"] == 4
    with pytest.raises(ConfigError, match="driver_options: trial: 'task' is set by the run"):
        configured_drivers(load_recipe("harbor", ["driver_options.trial={task: {path: x}}"]))


def test_runs_that_begin_together_share_the_generated_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: [task.extras["path"] for task in harbor_sums("train", 40)], range(8)))
    assert all(paths == drawn[0] for paths in drawn)
    assert all(len(list(Path(path).rglob("*.*"))) == 3 for path in drawn[0])
    assert not [path for path in (tmp_path / "harbor").rglob("*") if path.name.startswith(".")]


def test_what_harbor_lacks_is_said_before_a_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "harbor-small", "driver_options.python=/nowhere/python", "--runs", str(tmp_path)]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "is not an interpreter" in said.err or "driver_options.environment 'local' needs" in said.err
    assert "warm start" not in said.out
    assert not any(tmp_path.iterdir())
