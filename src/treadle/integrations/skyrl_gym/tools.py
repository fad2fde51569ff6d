"""What skyrl_gym runs and asks for the model, by Treadle's means: SQL in the sandbox, searches through the client.

The library executes the model's SQL on connections that may write, in its tool and in its grader, and makes a text for
the model of a search that is not answered. `guard_tools` replaces both in the library, for every environment that uses
them. What fails is no observation: it ends the attempt, past the library's own `except Exception`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import skyrl_gym.envs.sql.env
import skyrl_gym.envs.sql.utils
import skyrl_gym.tools.search
import skyrl_gym.tools.sql

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.envs.sql.environment import BAD_FORMAT, INVALID, grade, observation, run_query
from treadle.envs.sql.sandbox import Database, Query
from treadle.retrieval.client import RetrievalClient

SEARCH_PATIENCE = 45.0
"""Seconds for which a retrieval server that is out is asked again."""


class Escaping(BaseException):
    """Carries an error past code that catches every `Exception`, up to `raising_failures`."""

    def __init__(self, error: TrajectoryFailure | ConfigError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def raising_failures() -> Iterator[None]:
    """Raise what escapes from the library as the error that it is."""
    try:
        yield
    except Escaping as escaping:
        raise escaping.error from None


@contextmanager
def _escaping() -> Iterator[None]:
    try:
        yield
    except (TrajectoryFailure, ConfigError) as error:
        raise Escaping(error) from error


def sql(self: Any, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
    """Return what the model reads of its query, run in the sandbox."""
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
    """Return what `calculate_reward_single` does."""
    return calculate_reward_single(completion, reference, db_file)


def execute_sql_wrapper_single(db_file: str, sql: str, timeout: float, output_str: str) -> NoReturn:
    """Raise: no SQL is run outside of the sandbox."""
    message = "the environment runs SQL outside of the sandbox; grade with skyrl_gym's compute_score_single"
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
    """Put the functions above in the place of the library's. Raises ConfigError for a version that has others."""
    grader, environment = skyrl_gym.envs.sql.utils, skyrl_gym.envs.sql.env
    _replace(skyrl_gym.tools.search, call_search_api)
    _replace(grader, execute_sql_wrapper_single)
    _replace(grader, calculate_reward_single)
    _replace(grader, compute_score_single)
    _replace(environment, compute_score_single)
    group = skyrl_gym.tools.sql.SQLCodeExecutorToolGroup
    _check_same_call("SQLCodeExecutorToolGroup.sql", group.sql.func, sql)
    group.sql = skyrl_gym.tools.sql.tool(sql)
    for module in (grader, skyrl_gym.tools.sql):
        module.sqlite3 = None  # nothing is left that opens a database


def _replace(module: ModuleType, function: Callable[..., Any]) -> None:
    _check_same_call(f"{module.__name__}.{function.__name__}", getattr(module, function.__name__, None), function)
    setattr(module, function.__name__, function)


def _check_same_call(name: str, theirs: Any, ours: Callable[..., Any]) -> None:
    """Raise ConfigError unless the library's function is there, and is called as the one that replaces it."""
    if not callable(theirs) or list(inspect.signature(theirs).parameters) != list(inspect.signature(ours).parameters):
        raise ConfigError(
            f"this version of skyrl-gym has another {name}, and its tools could not be confined; "
            "pip install 'treadle[skyrl-gym]' installs one that is known"
        )
