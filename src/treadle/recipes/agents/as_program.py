"""The same agent as a separate program in any language: `program.py` beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from treadle.rollout.agents.command import Command

solve = Command([sys.executable, str(Path(__file__).with_name("program.py"))])
