"""Another package adds an engine, a loss and an advantage with options of their own, by name, without an edit here."""

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.orchestration.runs import check_finished, query, start
from tests.worlds import tiny
from treadle.algorithms.estimators import Advantage, Signals
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.core.config import Config
from treadle.core.engine import Engine
from treadle.core.errors import ConfigError
from treadle.core.trainer import WeightSync
from treadle.orchestration.setup.engines import EngineSpec, open_torch
from treadle.orchestration.setup.validation import check_config
from treadle.packing.flat import Doubles, FlatBatch

HERE = "tests.orchestration.test_extensions"


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
