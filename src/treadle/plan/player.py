"""Who plays the tasks that name no player, as one value: a recipe's `environment`, `reward`, `agent` or `driver`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treadle.core import registry
from treadle.envs.tasks import check_environment, load_environment, load_reward, made_class
from treadle.rollout.agents.agent import load_agent
from treadle.rollout.drivers.driver import check_driver, load_driver

KINDS = ("environment", "reward", "agent", "driver")
OVERRIDES = "reward=module:function, agent=module:function, environment=module:Class, driver=module:Class"


@dataclass(frozen=True, slots=True)
class Player:
    """A player: `Player("driver", "harbor", {"concurrency": 4})`; no name: the tasks name their own.

    kind: key of a recipe. options: of its constructor. made: class or function of the name, from Python; None for a
    registered name or `module:attribute`.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    made: Any = None

    @property
    def of_task(self) -> tuple[str, str]:
        """Return kind and name as in `Task.player`: a reward function grades in an environment."""
        return "environment" if self.kind == "reward" else self.kind, self.name

    @property
    def is_registered(self) -> bool:
        """Return whether a recipe can name it: it was not made in Python."""
        return (
            self.kind == "reward" or ":" in self.name or not self.name or self.name in registry.names(f"{self.kind}s")
        )

    def load(self) -> Any:
        """Return an environment's factory, an agent, or a driver's factory. Raises ConfigError."""
        name, options, made = self.name, self.options, self.made
        if self.kind == "reward":
            return load_reward(name)
        if self.kind == "agent":
            return load_agent(name) if made is None else made
        if self.kind == "driver":
            return load_driver(name, options) if made is None else check_driver(made, name, options)
        if made is None:
            return load_environment(name, options)
        return partial(check_environment(made_class(made), name, options), **options) if options else made


def is_of_player(key: str) -> bool:
    """Return whether a key of a recipe names its player or the player's options."""
    return key.removesuffix("_options") in KINDS


def without_player(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a run's data without its player and the player's options, if the overrides name another kind."""
    kinds = {override.partition("=")[0].strip() for override in overrides}.intersection(KINDS)
    others = set(KINDS) - kinds if kinds else set()
    return {key: value for key, value in data.items() if key.removesuffix("_options") not in others}
