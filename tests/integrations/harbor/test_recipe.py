"""The recipes of Harbor's trials: what is published, and what the command line says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.cli.main import main
from treadle.core.errors import ConfigError
from treadle.integrations.harbor.driver import HarborDriver
from treadle.integrations.harbor.small import harbor_sums
from treadle.orchestration.config import load_recipe


def test_recipes_have_the_published_values() -> None:
    for name, tasks, at_once in (("codecontests", 32, 512), ("codecontests-async", 16, 128)):
        recipe = load_recipe(name)
        assert recipe.harbor is not None and recipe.model.path == "Qwen/Qwen3-8B"
        assert (recipe.training.tasks_per_update, recipe.training.group_size) == (tasks, 8)
        assert (recipe.harbor.concurrency, recipe.harbor.trials_per_second) == (at_once, 5.0)
        assert recipe.training.optimizer.learning_rate == 1e-6
        assert recipe.rollout.max_input_tokens + recipe.rollout.max_completion_tokens == 32_768
        assert (recipe.algorithm.norm_by_std, recipe.algorithm.kl) == (False, None)
        assert recipe.algorithm.reduction == "token_mean"
        assert recipe.rewards.overlong == "drop" and recipe.evaluation.attempts == 2
        assert recipe.harbor.agent_timeout == 1200 and recipe.harbor.agent == "terminus-2"
        kwargs = recipe.harbor.trial["agent"]["kwargs"]
        assert (kwargs["max_turns"], kwargs["enable_summarize"]) == (32, False)
        assert recipe.engine_in_training(HarborDriver.may_wait).lock_step is False
    synchronous, asynchronous = load_recipe("codecontests"), load_recipe("codecontests-async")
    assert synchronous.algorithm.correction.token_tis == 2.0
    assert asynchronous.algorithm.correction.geometric_mask == (0.99, 1.01)
    section = asynchronous.orchestration
    assert (section.max_staleness, section.max_concurrent_groups) == (4, 32)


def test_tasks_and_agent_are_named_on_the_command_line(tmp_path: Path) -> None:
    recipe = load_recipe("harbor", [f"harbor.tasks={tmp_path}", "harbor.agent=terminus-2-stock"])
    assert recipe.data.train.source == "harbor_tasks" and recipe.data.train.options == {"path": str(tmp_path)}
    assert recipe.harbor is not None and recipe.harbor.agent == "terminus-2-stock"
    changed = load_recipe("harbor", ["harbor.trial.agent.kwargs.max_turns=4"])
    assert changed.harbor is not None and changed.harbor.trial["agent"]["kwargs"]["max_turns"] == 4
    with pytest.raises(ConfigError, match="'task' is set by the run"):
        load_recipe("harbor", ["harbor.trial={task: {path: x}}"])
    with pytest.raises(ConfigError, match=r"engine\.lock_step is true with harbor"):
        load_recipe("harbor", ["engine.lock_step=true"])
    with pytest.raises(ConfigError, match=r"harbor\.tasks and data\.train\.source \('harbor_sums'\) both say"):
        load_recipe("harbor-small", ["harbor.tasks=DIR"])


def test_runs_that_begin_together_share_the_generated_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: [task.extras["path"] for task in harbor_sums("train", 40)], range(8)))
    assert all(paths == drawn[0] for paths in drawn)
    assert all(len(list(Path(path).rglob("*.*"))) == 3 for path in drawn[0])
    assert not [path for path in (tmp_path / "harbor").rglob("*") if path.name.startswith(".")]


def test_what_harbor_lacks_is_said_before_a_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "harbor-small", "harbor.python=/nowhere/python", "--runs", str(tmp_path)]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "is no interpreter" in said.err or "harbor.environment 'local' needs" in said.err
    assert "warm start" not in said.out
    assert not any(tmp_path.iterdir())
