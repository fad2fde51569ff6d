"""Treadle trains multi-turn LLM agents with reinforcement learning, step by step.

Importing it is light: the public names below load their modules when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.api.public import evaluate, export, load_run, resume, sft, train
    from treadle.core.errors import ConfigError, InfrastructureError, TreadleError
    from treadle.core.metrics import Metric
    from treadle.core.rewards import Reward
    from treadle.core.types import Form, Group, Message, SamplingParams, Step, Task, Trajectory
    from treadle.envs.base import Environment, EnvStep, Finish, Reply
    from treadle.envs.tools import ToolEnvironment
    from treadle.report.callback import Callback
    from treadle.rollout.agents.agent import Recovered

__version__ = "0.1.0"

_HOME = {
    "Callback": "treadle.report.callback",
    "ConfigError": "treadle.core.errors",
    "EnvStep": "treadle.envs.base",
    "Environment": "treadle.envs.base",
    "Finish": "treadle.envs.base",
    "Form": "treadle.core.types",
    "Group": "treadle.core.types",
    "InfrastructureError": "treadle.core.errors",
    "Message": "treadle.core.types",
    "Metric": "treadle.core.metrics",
    "Recovered": "treadle.rollout.agents.agent",
    "Reply": "treadle.envs.base",
    "Reward": "treadle.core.rewards",
    "SamplingParams": "treadle.core.types",
    "Step": "treadle.core.types",
    "Task": "treadle.core.types",
    "ToolEnvironment": "treadle.envs.tools",
    "Trajectory": "treadle.core.types",
    "TreadleError": "treadle.core.errors",
    **dict.fromkeys(("evaluate", "export", "load_run", "resume", "sft", "train"), "treadle.api.public"),
}

__all__ = [
    "Callback",
    "ConfigError",
    "EnvStep",
    "Environment",
    "Finish",
    "Form",
    "Group",
    "InfrastructureError",
    "Message",
    "Metric",
    "Recovered",
    "Reply",
    "Reward",
    "SamplingParams",
    "Step",
    "Task",
    "ToolEnvironment",
    "Trajectory",
    "TreadleError",
    "__version__",
    "evaluate",
    "export",
    "load_run",
    "resume",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
