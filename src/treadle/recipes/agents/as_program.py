"""The same agent as a program of its own: any language would do, this one is `program.py` beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from treadle.rollout.agents.command import Command

solve = Command([sys.executable, str(Path(__file__).with_name("program.py"))])
