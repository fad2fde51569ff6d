"""Fakes of Treadle's protocols, and an event loop in virtual time: for tests and simulations, including yours.

Nothing here needs torch, and no training code imports it.
"""

from treadle.testing.fakes import FakeAttempt, FakeEngine, FakeRunner, FakeTrainer
from treadle.testing.virtual_time import VirtualLoop

__all__ = ["FakeAttempt", "FakeEngine", "FakeRunner", "FakeTrainer", "VirtualLoop"]
