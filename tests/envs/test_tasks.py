from types import ModuleType
from typing import Any

import pytest

from treadle.core.errors import ConfigError
from treadle.envs.arithmetic import Arithmetic
from treadle.envs.base import Environment, EnvStep
from treadle.envs.lookup import Lookup
from treadle.envs.tasks import load_environment, load_reward


def test_an_environment_is_loaded_as_its_class() -> None:
    assert load_environment("treadle.envs.arithmetic:Arithmetic") is Arithmetic
    assert isinstance(load_environment("lookup")(), Lookup)


async def async_step(self: Any, text: str) -> EnvStep:
    return EnvStep(done=True)


PLAIN = {"step": lambda self, text: None, "close": lambda self: None, "reset": lambda self, task: ()}


@pytest.mark.parametrize(
    ("bases", "body", "message"),
    [
        ((Environment,), {}, r"step is missing; write 'def step\(self, text\)', async or not"),
        ((), {"step": async_step}, r"reset is missing; write 'def reset\(self, task\)', async or not"),
        (
            (Environment,),
            {"step": async_step, "close": 3},
            r"close is missing; write 'def close\(self\)', async or not",
        ),
        (
            (Environment,),
            {"step": async_step, "__init__": lambda self, url: None},
            "missing a required argument: 'url'; its options are url, given: none",
        ),
    ],
)
def test_an_environment_that_cannot_run_is_refused_at_once(
    mine: ModuleType, bases: tuple[type, ...], body: dict[str, Any], message: str
) -> None:
    mine.Mine = type("Mine", bases, body)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"{mine.__name__}:Mine.*{message}"):
        load_environment(f"{mine.__name__}:Mine")


@pytest.mark.parametrize(
    ("bases", "body"), [((Environment,), {"step": PLAIN["step"]}), ((), {**PLAIN, "step": async_step})]
)
def test_methods_may_be_plain_and_need_not_be_inherited(
    mine: ModuleType, bases: tuple[type, ...], body: dict[str, Any]
) -> None:
    mine.Mine = type("Mine", bases, body)  # type: ignore[attr-defined]
    assert load_environment(f"{mine.__name__}:Mine") is mine.Mine


def test_an_environment_must_be_a_class(mine: ModuleType) -> None:
    mine.make = lambda: Arithmetic()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="is of type function, it must be a class"):
        load_environment(f"{mine.__name__}:make")


def of_trl(prompts: Any, completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            of_trl,
            r"reward: '.*': \(prompts, completions, \*\*kwargs\) is TRL's signature; .*as in\n    def reward\(task",
        ),
        (of_verl, r"\(data_source, solution_str, ground_truth, extra_info=None\) is verl's signature"),
    ],
)
def test_a_reward_function_of_another_library_is_refused_by_its_signature(
    function: Any, message: str, mine: ModuleType
) -> None:
    mine.reward = function  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=message):
        load_reward(f"{mine.__name__}:reward")
