"""Large runs: 100,000 trajectories in the ledger, and a trajectory of 32,768 tokens in 40 steps.

`pytest tests/view/test_scale.py -s` prints what was measured. The bounds here are several times the viewer's own aims,
so that a busy machine does not fail them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import recorded_run
from tests.view.browser import WIDE, Viewer, serving
from tests.view.worlds import log_update
from tests.worlds import make_group, make_step, tiny
from treadle.core.files import WrittenFile
from treadle.core.types import Group, Status, Trajectory
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory

pytestmark = pytest.mark.slow

TRAJECTORIES, GROUP, STEPS = 100_000, 8, 4
SHARED, BUSY = 2.0, 4.0  # times its aim that a page may take here, in CPU seconds and by the clock


def large_ledger(path: Path) -> Path:
    """A run of 100,000 trajectories of four steps each, without tokens."""
    run = RunDirectory.create(path, tiny())
    run.close()
    steps = tuple(make_step(range(1, 30), range(1, 12)) for _ in range(STEPS))

    def attempt(index: int, number: int) -> Trajectory:
        reward = float((index + number) % 3 == 0)
        return Trajectory(f"g{index:06d}.{number}", f"t{index}", number, steps, reward, Status.DONE)

    def group(index: int) -> Group:
        return make_group(index, *(attempt(index, number) for number in range(GROUP)))

    with closing(Ledger(run.ledger_file)) as ledger:
        for start in range(0, TRAJECTORIES // GROUP, 500):
            ledger.record([group(start + n) for n in range(500)], "train", 0, WrittenFile(f"{start}.parquet", "0" * 64))
    for update in range(1, 400):
        log_update(run, update)
    return path


def long_trajectory(path: Path) -> Path:
    """A run with one trajectory that grows to 32,768 tokens in 40 steps, two of which break with the one before."""
    draw = np.random.default_rng(0)
    history, steps = draw.integers(3, 700, 1000).tolist(), []
    for number in range(40):
        if number in (15, 30):
            history[500] += 1
        reply = draw.integers(3, 700, 200).tolist()
        steps.append(make_step(history, reply))
        history = [*history, *reply, *draw.integers(3, 700, (32_768 - 1000) // 40 - 200).tolist()]
    return recorded_run(path, tiny(), Trajectory("g000000.0", "t0", 0, tuple(steps), 1.0, Status.DONE)).path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_ledger(tmp_path_factory.mktemp("large") / "large")


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


_ASK = """
import json, sys, time
from pathlib import Path
from starlette.testclient import TestClient
from treadle.view.app import make_app
client, took = TestClient(make_app([Path(sys.argv[1])])), {}
for path in sys.argv[2:]:
    started = time.process_time()
    answer = client.get("/api/" + path)
    took[path] = time.process_time() - started
    assert answer.status_code == 200, answer.text
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
took["memory"] = int(status["VmHWM"].split()[0]) / 1024  # ru_maxrss would count the process that started this one
print(json.dumps(took))
"""


def ask(run: Path, *paths: str) -> dict[str, float]:
    """Path -> CPU seconds of a server of its own, whatever else the machine does, and its `memory` in MiB."""
    done = subprocess.run([sys.executable, "-c", _ASK, str(run), *paths], capture_output=True, text=True, check=True)
    took: dict[str, float] = json.loads(done.stdout)
    print("\n" + "\n".join(f"{path:70} {figure:8.3f}" for path, figure in took.items()))
    return took


def test_a_hundred_thousand_trajectories(large: Path) -> None:
    key = "runs/large"
    filters = [f"{key}/groups?{query}" for query in (
        "limit=100", "preset=mixed", "preset=failed", "preset=dropped", "preset=zero_advantage", "preset=unsolved",
        "search=t1234", "sort=reward", "sort=tokens&offset=6000", "sort=component&component=format",
        "split=train&update=1",
    )]  # fmt: skip
    took = ask(large, "runs", key, f"{key}/metrics", *filters, f"{key}/groups/g006000", f"{key}/counts")
    assert max(took["runs"], took[key], took[f"{key}/metrics"]) < SHARED * 1.0
    assert max(took[path] for path in filters) < SHARED * 0.3
    assert took["memory"] < 300


def test_a_long_trajectory_is_read_and_scrolled(browser: Any, tmp_path: Path) -> None:
    run = long_trajectory(tmp_path / "long")
    took = ask(run, "runs/long/trajectories/g000000.0")
    assert took["memory"] < 300
    with serving([run]) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/", ".run")
        shown = seconds(lambda: viewer.open("#/run/long/trajectory/g000000.0", ".t.s"))
        colour = seconds(lambda: page.click(".chip:has-text('log-prob')"))
        blank = page.evaluate("""async () => {
            let blank = 0;
            for (let y = 0; y < document.body.scrollHeight; y += 5000) {
                scrollTo(0, y);
                await new Promise(requestAnimationFrame);
                const found = document.elementFromPoint(800, 400);
                if (!found || !found.closest(".step")) blank += 1;
            }
            return blank;
        }""")
        tokens = page.evaluate("document.querySelectorAll('.t').length")
        print(f"shown after {shown:.2f} s, coloured after {colour:.2f} s; {tokens} tokens made at the end")
        assert blank == 0
        viewer.until("document.querySelectorAll('.t').length < 20000")  # once the browser has caught up
        assert shown < BUSY * 1.5 and viewer.complaints == []
        viewer.close()
