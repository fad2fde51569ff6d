"""Rewards from a model: a `Judge` answers the questions of a rubric about what an agent did."""

from treadle.judge.judge import Judge, Limits
from treadle.judge.prompt import Criterion

__all__ = ["Criterion", "Judge", "Limits"]
