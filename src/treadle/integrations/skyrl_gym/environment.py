"""`SkyrlGym`: any environment of skyrl_gym, played by Treadle.

    skyrl_gym          here
    make, init         reset     a task's extras become SkyRL's `extras`: the other columns of its row
    step               step
    get_metrics        finish    also if a limit ended the attempt
    close              close

All calls of an attempt run on its own thread, each within `rollout.environment_timeout`.

The library executes the model's SQL on writable connections, in its tool and in its grader, and turns an unanswered
search into a text for the model. `guard_tools` replaces both in the library, for every environment that uses them: SQL
runs in the sandbox, and failures end the attempt, bypassing the library's own `except Exception`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import isclass, signature
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, get_args

import skyrl_gym
import skyrl_gym.envs.sql.env
import skyrl_gym.envs.sql.utils
import skyrl_gym.tools.search
import skyrl_gym.tools.sql
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from skyrl_gym.envs.registration import EnvSpec, load_env_creator

from treadle.core import registry
from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task, as_messages
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.envs.sql.environment import BAD_FORMAT, INVALID, grade, observation, run_query
from treadle.envs.sql.sandbox import Database, Query
from treadle.envs.tasks import check_positive
from treadle.retrieval.client import RetrievalClient

SEARCH_PATIENCE = 45.0
"""Seconds of retries while a retrieval server is down."""


class Escaping(BaseException):
    """Carries an error past `except Exception`, up to `raising_failures`."""


@contextmanager
def raising_failures() -> Iterator[None]:
    """Reraise escaped errors of the library as the original error."""
    try:
        yield
    except Escaping as escaping:
        raise escaping.args[0] from None


@contextmanager
def _escaping() -> Iterator[None]:
    try:
        yield
    except (TrajectoryFailure, ConfigError) as error:
        raise Escaping(error) from error


def sql(self: Any, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
    """Return the model's view of its query's result, run in the sandbox."""
    if sql is None:
        return observation(INVALID, turns_left)["content"]
    database = Database(Path(self.db_path, db_id, f"{db_id}.sqlite"))
    with _escaping():
        shown, _ = run_query(Query(database, sql, timeout))
    return observation(shown, turns_left)["content"]


def calculate_reward_single(completion: str, reference: str, db_file: str, timeout: float = 30) -> float:
    """Return the library's reward of an attempt's text; both queries run in the sandbox."""
    valid, _, solution, _ = skyrl_gym.envs.sql.utils.verify_format_and_extract(completion)
    if not valid:
        return BAD_FORMAT
    with _escaping():
        return grade(Query(Database(Path(db_file)), solution, timeout), reference)


def compute_score_single(completion: str, reference: str, db_file: str) -> float:
    """Return the same as `calculate_reward_single`."""
    return calculate_reward_single(completion, reference, db_file)


def execute_sql_wrapper_single(db_file: str, sql: str, timeout: float, output_str: str) -> NoReturn:
    """Raise: no SQL is run outside the sandbox."""
    message = "the environment runs SQL outside the sandbox; grade with skyrl_gym's compute_score_single"
    raise Escaping(TrajectoryFailure(Cause.ENVIRONMENT, message))


def call_search_api(
    retrieval_service_url: str,
    query: str,
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = 30,
    log_requests: bool = True,
    session: object = None,
) -> tuple[dict[str, Any], None]:
    """Return the server's answer, in the library's form, and no error: without an answer the attempt fails."""
    with _escaping():
        contents = asyncio.run(_search(retrieval_service_url, query, topk, timeout))
    return {"result": [[{"document": {"contents": text}} for text in contents]]}, None


async def _search(url: str, query: str, topk: int, timeout: float) -> Sequence[str]:
    client = RetrievalClient(url, timeout, SEARCH_PATIENCE)
    try:
        return await client.search(query, topk)
    finally:
        await client.close()


def guard_tools() -> None:
    """Replace the library's functions by those above. Raises ConfigError if this version has others."""
    grader, group = skyrl_gym.envs.sql.utils, skyrl_gym.tools.sql.SQLCodeExecutorToolGroup
    for owner, ours in (
        (skyrl_gym.tools.search, call_search_api),
        (grader, execute_sql_wrapper_single),
        (grader, calculate_reward_single),
        (grader, compute_score_single),
        (skyrl_gym.envs.sql.env, compute_score_single),
        (group, sql),
    ):
        name = ours.__name__
        theirs = getattr(owner, name, None)
        theirs = getattr(theirs, "func", theirs)  # unwraps a tool
        if not callable(theirs) or list(signature(theirs).parameters) != list(signature(ours).parameters):
            raise ConfigError(
                f"this version of skyrl-gym has another {owner.__name__}.{name}, and its tools could not be confined; "
                "pip install 'treadle[skyrl-gym]' installs a supported one"
            )
        setattr(owner, name, skyrl_gym.tools.sql.tool(ours) if owner is group else ours)
    grader.sqlite3 = skyrl_gym.tools.sql.sqlite3 = None  # nothing else can open a database


guard_tools()

_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})
_REWRITES = {
    "postprocessed_action": "a reply other than the sampled one, which could not be trained",
    "next_user_message": "a message for the next call only, but here each prompt extends the previous one",
}


class SkyrlGym(Environment):
    """Plays one attempt at a task of an environment registered with skyrl_gym. Its options:

    env: registered name, or `module:Class`; default: the task's extra `env_class`. config: its settings, as
    `environment.skyrl_gym.NAME` in SkyRL (`search_url`, `db_path`). max_turns: limit of every attempt, as SkyRL's
    `generator.max_turns`; default: the task's extra `max_turns`, or the environment's own.

    The task's ground truth is used unless its extras have `reward_spec` or `reward_model`. A reply must not be
    rewritten (`postprocessed_action`). If the environment continues without a message, the model reads an empty user
    message. The numbers of `get_metrics` are recorded as `env/skyrl_NAME`, means over attempts.
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

        Raises ConfigError or DataError for an unknown environment, and for settings it does not take.
        """
        name = task.extras.get("env_class")  # a column of SkyRL's data sets
        if self._spec is None and not isinstance(name, str):
            raise DataError(
                f"task {task.task_id} names no environment of skyrl_gym; set environment_options.env or its extra "
                "env_class"
            )
        spec = self._spec or find_spec(str(name))
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
        """Return the environment's answer. Raises TrajectoryFailure if a reply was rewritten, or a tool is down."""
        with raising_failures():
            output = self._played.step(text)
        _check_rewrites(output, text)
        observations = as_messages(output["observations"], "step")
        if not observations and not output["done"]:
            observations = (Message(role="user", content=""),)
        return EnvStep(observations, float(output["reward"]), bool(output["done"]))

    def finish(self, ended: Status) -> Finish:
        """Return the numbers in the attempt's `get_metrics`; other values are left out, as in SkyRL."""
        with raising_failures():
            reported: Mapping[Any, Any] = getattr(self._played, "get_metrics", dict)()
        numbers = {name: value for name, value in reported.items() if isinstance(value, Real)}
        return Finish(info={"skyrl_" + re.sub(r"\W", "_", str(name)): value for name, value in numbers.items()})

    def close(self) -> None:
        if self._played is not None:
            self._played.close()


def find_spec(name: str) -> EnvSpec:
    """Return skyrl_gym's specification of an environment. name: registered, or `module:Class`. Raises ConfigError."""
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
    """Return the settings as the environment's own settings class, checked; otherwise by name.

    Raises ConfigError for unknown settings, or values of the wrong type.
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
    """Return the dataclass in the annotation of the environment's `env_config`; None if there is none."""
    creator: Any = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    try:
        parameter = signature(creator, eval_str=True).parameters.get("env_config")
    except (NameError, TypeError, ValueError):
        # Its annotations cannot be resolved.
        return None
    hint = parameter.annotation if parameter else None
    return next((part for part in get_args(hint) or (hint,) if is_dataclass(part) and isclass(part)), None)


def _check_rewrites(said: Mapping[str, Any] | None, text: str) -> None:
    """Raise TrajectoryFailure for answers that cannot be recorded exactly."""
    for key, what in _REWRITES.items():
        if (rewritten := (said or {}).get(key)) is not None and rewritten != text:
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"the environment gave {key}, {what}: {rewritten!r:.200}")
