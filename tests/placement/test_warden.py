"""What a killed driver leaves is found by its mark, and ended, whatever it does meanwhile."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.until import wait_until
from treadle.placement.cluster import _SETTINGS
from treadle.placement.warden import VARIABLE, marked, warden

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="marks are read in /proc")


def test_a_process_that_renames_itself_as_rays_agents_do_keeps_the_mark() -> None:
    code = "import sys, ray._raylet as r; r.setproctitle('ray-dashboard-agent'); print(flush=True); sys.stdin.read()"
    mark = uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **_SETTINGS, VARIABLE: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdout.readline()
        assert [process.pid for process in marked(mark)] == [agent.pid]
        agent.stdin.close()


RUNNER = """
import os
os.setsid()
while True:
    open("runs", "w").close()
    if os.fork():
        os._exit(0)
"""


def test_a_daemon_that_is_always_another_process_ends(tmp_path: Path) -> None:
    mark = uuid4().hex
    with warden(mark):
        subprocess.Popen([sys.executable, "-c", RUNNER], cwd=tmp_path, env={**os.environ, VARIABLE: mark}).wait()
        wait_until((tmp_path / "runs").exists)
    (tmp_path / "runs").unlink()
    assert not marked(mark) and not (tmp_path / "runs").exists()
