"""`SkyrlGym`: any environment of skyrl_gym, played by Treadle.

    skyrl_gym          here
    make, init         reset     a task's extras are what SkyRL gives as `extras`: the other columns of its row
    step               step
    get_metrics        finish    also where a limit ended the attempt
    close              close

All calls of an attempt are made on a thread of its own, each within `rollout.environment_timeout`. `tools` replaces
what the library runs and asks for the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import isclass, signature
from numbers import Real
from types import MappingProxyType
from typing import Any, get_args

import skyrl_gym
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from skyrl_gym.envs.registration import EnvSpec, load_env_creator

from treadle.core import registry
from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task, as_messages
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.envs.tasks import check_positive
from treadle.integrations.skyrl_gym.tools import SEARCH_PATIENCE, guard_tools, raising_failures

guard_tools()

ENV_CLASS = "env_class"
"""The extra that names a task's environment, as the column of SkyRL's data sets does."""

_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})
_REWRITES = {
    "postprocessed_action": "a reply other than the one that was sampled, which could not be trained as such",
    "next_user_message": "a message for the next call only, and here each prompt carries on the one before",
}


class SkyrlGym(Environment):
    """Plays one attempt at a task of an environment that is registered with skyrl_gym. Its options:

    env: the name under which it is registered, or `module:Class`; default: the task's extra `env_class`. config: its
    settings, as `environment.skyrl_gym.NAME` in SkyRL (`search_url`, `db_path`). max_turns: of every attempt, as
    SkyRL's `generator.max_turns`; default: what the task's extras say (`max_turns`), or the environment itself.

    The ground truth is the task's, where its extras have no `reward_spec` or `reward_model` of their own. A reply must
    not be rewritten (`postprocessed_action`). Where the environment says nothing although it goes on, the model reads
    an empty message of the user. The numbers of `get_metrics` are recorded as `env/skyrl_NAME`, means over attempts.
    """

    metrics = (Metric("skyrl_*", "trajectory", "mean", help="a number of the environment's get_metrics"),)

    def __init__(self, env: str = "", config: Mapping[str, Any] = _NO_CONFIG, max_turns: int | None = None) -> None:
        if max_turns is not None:
            check_positive("max_turns", max_turns, whole=True)
        if not isinstance(config, Mapping):
            raise ConfigError(f"config must hold settings by name, got {config!r:.100}; write {{db_path: data/sql}}")
        self._config, self._max_turns = config, max_turns
        self._spec = find_spec(env) if env else None
        if self._spec is not None and hasattr(make_config(self._spec, config), "search_url"):
            self.longest_wait = SEARCH_PATIENCE
        self._played: Any = None

    def reset(self, task: Task) -> Sequence[Message]:
        """Make the environment and return its first messages.

        Raises ConfigError or DataError for an environment that does not exist, and for settings it does not take.
        """
        spec = self._spec or find_spec(_env_class(task))
        truth = {} if task.ground_truth is None else {"ground_truth": task.ground_truth}
        extras = {"reward_spec": truth, "reward_model": truth, "extra_info": {}, **task.extras}
        if self._max_turns is not None:
            extras["max_turns"] = self._max_turns
        with raising_failures():
            self._played = skyrl_gym.make(spec, env_config=make_config(spec, self._config), extras=extras)
            prompt, said = self._played.init([dict(message) for message in task.prompt])
        _check_rewrites(said, "")
        self.required_steps = getattr(self._played, "max_turns", None) or 0
        return as_messages(prompt, "init")

    def step(self, text: str) -> EnvStep:
        """Return the environment's answer. Raises TrajectoryFailure: a reply was rewritten, or a tool is out."""
        with raising_failures():
            output = self._played.step(text)
        _check_rewrites(output, text)
        observations = as_messages(output["observations"], "step")
        if not observations and not output["done"]:
            observations = (Message(role="user", content=""),)
        return EnvStep(observations, float(output["reward"]), bool(output["done"]))

    def finish(self, ended: Status) -> Finish:
        """Return the numbers of the attempt's `get_metrics`; what is none is left out, as SkyRL does."""
        with raising_failures():
            reported: Mapping[Any, Any] = getattr(self._played, "get_metrics", dict)()
        numbers = {name: value for name, value in reported.items() if isinstance(value, Real)}
        return Finish(info={"skyrl_" + re.sub(r"\W", "_", str(name)): value for name, value in numbers.items()})

    def close(self) -> None:
        if self._played is not None:
            self._played.close()


def find_spec(name: str) -> EnvSpec:
    """Return what skyrl_gym makes an environment from. name: registered, or `module:Class`. Raises ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"env is {name!r:.100}; it must be the name of an environment of skyrl_gym")
    if ":" in name:
        return EnvSpec(id=name, entry_point=registry.resolve("environments", name, "env"))
    if name not in skyrl_gym.registry:
        near = get_close_matches(name, skyrl_gym.registry, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"env {name!r} is not registered with skyrl_gym; {hint}registered: {', '.join(skyrl_gym.registry)}; or "
            "write 'module:Class'"
        )
    return skyrl_gym.registry[name]


def make_config(spec: EnvSpec, settings: Mapping[str, Any]) -> Any:
    """Return the settings in the class that the environment declares for them, checked; else by name.

    Raises ConfigError for settings that this class does not have, or not of this type.
    """
    declared = _config_class(spec)
    if declared is None:
        return OmegaConf.create(dict(settings))
    names = [field.name for field in fields(declared)]
    if unknown := [name for name in settings if name not in names]:
        raise ConfigError(f"config of env {spec.id!r}: unknown key {unknown[0]!r}; it takes {', '.join(names)}")
    try:
        return TypeAdapter(declared).validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"config of env {spec.id!r}: {name} is {first['input']!r:.100}: {first['msg']}") from error


def _config_class(spec: EnvSpec) -> type | None:
    """Return the dataclass that the environment's `env_config` may be of; None if it names none."""
    creator: Any = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    try:
        parameter = signature(creator, eval_str=True).parameters.get("env_config")
    except (NameError, TypeError, ValueError):  # what it takes cannot be read
        return None
    hint = parameter.annotation if parameter else None
    return next((part for part in get_args(hint) or (hint,) if is_dataclass(part) and isclass(part)), None)


def _env_class(task: Task) -> str:
    name = task.extras.get(ENV_CLASS)
    if not isinstance(name, str):
        raise DataError(
            f"task {task.task_id} names no environment of skyrl_gym; set environment_options.env or its extra env_class"
        )
    return name


def _check_rewrites(said: Mapping[str, Any] | None, text: str) -> None:
    """Raise TrajectoryFailure for what cannot be recorded exactly."""
    for key, what in _REWRITES.items():
        if (rewritten := (said or {}).get(key)) is not None and rewritten != text:
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"the environment gave {key}, {what}: {rewritten!r:.200}")
