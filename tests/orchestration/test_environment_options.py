"""`environment_options`: what the recipe's environment is made with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.orchestration.runs import query
from tests.worlds import plain_renderer, tiny, user
from treadle.core.errors import ConfigError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.orchestration.setup.inputs import check_first_prompts, configured_environments, load_inputs, make_inputs

HERE = "tests.orchestration.test_environment_options"


class Paying(Environment):
    """Pays for any reply what it was made with."""

    metrics = (Metric("paid", "step", "mean", "points", "what was paid"),)

    def __init__(self, worth: float, *, bonus: float = 0.0) -> None:
        self.pay = worth + bonus

    async def reset(self, task: Task) -> Sequence[Message]:
        return [user("say something")]

    async def step(self, text: str) -> EnvStep:
        return EnvStep(reward=self.pay, done=True, info={"paid": self.pay})


OPTIONS = (f"environment={HERE}:Paying", "environment_options={worth: 0.5, bonus: 0.25}")


def test_metrics_of_an_environment_with_options_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paying, "metrics", ("paid",))
    with pytest.raises(ConfigError, match=r"Paying': metrics must be a tuple of treadle\.Metric"):
        load_inputs(tiny(*OPTIONS))


@pytest.mark.parametrize("options", ["{worth: 1, extra: 2}", "{bonus: 1}", "{}"])
def test_options_that_it_does_not_take_are_refused_at_the_start(options: str) -> None:
    with pytest.raises(ConfigError, match="Paying") as refused:
        load_inputs(tiny(OPTIONS[0], f"environment_options={options}"))
    if options != "{}":
        assert "environment_options of " in str(refused.value)
        assert "its options are worth, bonus, given: " in str(refused.value)


def test_from_python(tmp_path: Path) -> None:
    """Also for a class that has no name to be found by."""

    class Local(Paying):
        def __init__(self, worth: float = 0.0) -> None:
            super().__init__(worth)

    settings: dict[str, Any] = {
        "environment_options.worth": 0.5,
        "orchestration.updates": 1,
        "training.tasks_per_update": 1,
        "training.group_size": 2,
        "rollout.max_input_tokens": 64,
        "rollout.max_completion_tokens": 5,
    }
    model = tiny().model.model_dump(exclude_none=True)
    treadle.train(Local, [{"prompt": "?"}], model=model, run=tmp_path / "run", settings=settings)
    assert query(tmp_path / "run", "SELECT DISTINCT reward FROM trajectories") == [{"reward": 0.5}]
    wrong = {**settings, "environment_options": {"wealth": 1}}
    del wrong["environment_options.worth"]
    with pytest.raises(ConfigError, match="its options are worth, given: wealth"):
        treadle.train(Local, [{"prompt": "?"}], model=model, run="x", settings=wrong)


# What cannot work is one sentence that names the option


def prompts(*overrides: str) -> None:
    config = tiny("data.train.source=arithmetic", *overrides)
    tasks = [Task(f"t{i}", (user("?"),), config.environment, "chess") for i in range(3)]
    inputs = make_inputs(tasks, [], configured_environments(config))
    check_first_prompts(inputs, plain_renderer(), config, 128, print)


class Refusing(Environment):
    """Made on the attempt's own thread, as its `step` is plain."""

    def __init__(self, size: int = 0) -> None:
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")

    def step(self, text: str) -> EnvStep:
        return EnvStep(done=True)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("search", "{topk: 0}", "environment_options of 'search': topk must be a whole number above 0, got 0"),
        (f"{HERE}:Refusing", "{size: 0}", f"environment_options of '{HERE}:Refusing': size must be at least 1, got 0"),
        (f"{HERE}:Refusing", "{}", f"environment '{HERE}:Refusing': size must be at least 1, got 0"),
    ],
)
def test_options_that_the_constructor_refuses_are_one_sentence(name: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prompts(f"environment={name}", f"environment_options={option}")
    assert str(refused.value) == message


def test_a_time_limit_within_which_an_outage_would_end_as_a_time_out_is_refused() -> None:
    pytest.importorskip("httpx")
    search = ("environment=search", "environment_options={patience: 45}")
    prompts(*search, "rollout.environment_timeout=46")
    with pytest.raises(
        ConfigError, match=r"rollout\.environment_timeout is 45 s, but environment 'search' itself waits up to"
    ):
        prompts(*search, "rollout.environment_timeout=45")
    prompts("environment=search_small", "rollout.environment_timeout=5")  # it asks no server
