"""Rewards from a model: a `Judge` answers the questions of a rubric about what an agent did."""

from treadle.judge.judge import Judge
from treadle.judge.prompt import Criterion
from treadle.rollout.other_models import OtherModelConfig, UrlModel

__all__ = ["Criterion", "Judge", "OtherModelConfig", "UrlModel"]
