"""What others add with options of their own: an engine, a loss, an advantage, and the recipe's environment."""

import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle
from tests.runs import MODEL, SETTINGS, check_finished, query, start
from tests.worlds import plain_renderer, tiny, user
from treadle.algorithms.estimators import Advantage, Signals
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.core.config import Config
from treadle.core.engine import Engine
from treadle.core.errors import ConfigError
from treadle.core.metrics import Metric
from treadle.core.trainer import WeightSync
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.loop.engines import EngineSpec, open_torch
from treadle.packing.flat import Doubles, FlatBatch
from treadle.plan.inputs import configured_players, load_inputs, make_inputs
from treadle.plan.start import check_first_prompts
from treadle.plan.validation import check_config

HERE = "tests.api.test_extensions"


class PullConfig(Config):
    """Options of the loss `pull`."""

    strength: float = 1.0


def pull(logp: torch.Tensor, tokens: Tokens, options: PullConfig) -> torch.Tensor:
    """Pull each log-probability towards the old one plus the advantage."""
    return options.strength * (logp - tokens.logp_old - tokens.advantage) ** 2


PULL = PolicyLoss(pull, options_type=PullConfig)


class ConstantConfig(Config):
    """Options of the advantage `constant`."""

    value: float


def constant(batch: FlatBatch, signals: Signals, options: ConstantConfig) -> Doubles:
    """Every token has the same advantage."""
    return np.full(len(batch), options.value)


CONSTANT = Advantage(constant, by_group=False, options_type=ConstantConfig)

OPENED: list[dict[str, Any]] = []


async def open_counted(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Treadle's own engine; the options are noted."""
    OPENED.append(dict(spec.config.options))
    return await open_torch(spec)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package with these entry points were installed."""
    own = {
        "treadle.policy_losses": {"pull": "PULL"},
        "treadle.advantages": {"constant": "CONSTANT"},
        "treadle.engines": {"counted": "open_counted"},
    }
    real = importlib.metadata.entry_points

    def entry_points(group: str, path: object) -> EntryPoints:
        added = [EntryPoint(name, f"{HERE}:{attribute}", group) for name, attribute in own.get(group, {}).items()]
        return EntryPoints([*real(group=group), *added])

    monkeypatch.setattr("treadle.core.registry._entry_points", entry_points)


OPTIONS = (
    "engine.kind=counted",
    "engine.options={places: 3}",
    "algorithm.policy_loss=pull",
    "algorithm.policy_loss_options={strength: 0.5}",
    "algorithm.advantage=constant",
    "algorithm.advantage_options={value: 0.25}",
)


@pytest.mark.usefixtures("installed")
def test_a_run_trains_with_what_another_package_registers(tmp_path: Path) -> None:
    OPENED.clear()
    start(tmp_path / "run", *OPTIONS, "orchestration.updates=2", "engine.lock_step=true")
    check_finished(tmp_path / "run")
    assert OPENED == [{"places": 3}]
    advantages = query(tmp_path / "run", "SELECT DISTINCT advantage FROM trajectories WHERE advantage IS NOT NULL")
    assert advantages == [{"advantage": 0.25}]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("algorithm.policy_loss_options={strenght: 1}", r"policy_loss_options: unknown key 'strenght'.*'strength'"),
        ("algorithm.policy_loss_options={strength: strong}", "policy_loss_options: strength: got 'strong'"),
        ("algorithm.advantage_options={}", "advantage_options: missing key 'value'"),
        ("engine.kind=counter", "engine.kind: 'counter' is not registered; did you mean 'counted'"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(tiny(*OPTIONS, option))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algorithm.policy_loss_options={a: 1}"], "policy_loss_options: unknown key 'a'; known here: eps_low"),
        (["algorithm.advantage_options={a: 1}"], "advantage_options: unknown key 'a'; known here: norm_by_std"),
        (["engine.options={a: 1}"], "engine.options is set, but 'torch' has no options"),
    ],
)
def test_options_that_nobody_reads_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(tiny(*options))


class Paying(Environment):
    """Pays for any reply what it was made with."""

    metrics = (Metric("paid", "step", "mean", "points", "what was paid"),)

    def __init__(self, worth: float, *, bonus: float = 0.0) -> None:
        self.pay = worth + bonus

    async def reset(self, task: Task) -> Sequence[Message]:
        return [user("say something")]

    async def step(self, text: str) -> EnvStep:
        return EnvStep(reward=self.pay, done=True, info={"paid": self.pay})


PAYING = (f"environment={HERE}:Paying", "environment_options={worth: 0.5, bonus: 0.25}")


def test_metrics_of_an_environment_with_options_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paying, "metrics", ("paid",))
    with pytest.raises(ConfigError, match=r"Paying': metrics must be a tuple of treadle\.Metric"):
        load_inputs(tiny(*PAYING))


@pytest.mark.parametrize("options", ["{worth: 1, extra: 2}", "{bonus: 1}", "{}"])
def test_options_that_it_does_not_take_are_refused_at_the_start(options: str) -> None:
    with pytest.raises(ConfigError, match="Paying") as refused:
        load_inputs(tiny(PAYING[0], f"environment_options={options}"))
    if options != "{}":
        assert "environment_options of " in str(refused.value)
        assert "its options are worth, bonus, given: " in str(refused.value)


def test_from_python(tmp_path: Path) -> None:
    """Also for a class that has no name to be found by."""

    class Local(Paying):
        def __init__(self, worth: float = 0.0) -> None:
            super().__init__(worth)

    settings = {**SETTINGS, "environment_options.worth": 0.5, "orchestration.updates": 1}
    treadle.train(Local, [{"prompt": "?"}], model=MODEL, run=tmp_path / "run", settings=settings)
    assert query(tmp_path / "run", "SELECT DISTINCT reward FROM trajectories") == [{"reward": 0.5}]
    wrong = {**settings, "environment_options": {"wealth": 1}}
    del wrong["environment_options.worth"]
    with pytest.raises(ConfigError, match="its options are worth, given: wealth"):
        treadle.train(Local, [{"prompt": "?"}], model=MODEL, run="x", settings=wrong)


# What cannot work is one sentence that names the option


def prompts(*overrides: str) -> None:
    config = tiny("data.train.source=arithmetic", *overrides)
    tasks = [Task(f"t{i}", (user("?"),), config.environment, "chess") for i in range(3)]
    inputs = make_inputs(tasks, [], configured_players(config))
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
