"""The code that a run works with is on record; on resume other code is one line that names files."""

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import treadle
from tests.runs import MODEL, SETTINGS, put_file
from tests.worlds import Quiet, tiny, user
from treadle.core.errors import DamageError
from treadle.core.types import Task
from treadle.envs.lookup import Lookup
from treadle.envs.tasks import SingleTurn
from treadle.record.code import record_code, renew_code
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory
from treadle.rollout.agents.command import Command
from treadle.rollout.attempt import Players

ENVIRONMENT = """
import treadle
from code_helper import WORTH

class Mine(treadle.Environment):
    def step(self, text):
        return treadle.EnvStep(reward=WORTH, done=True)

def reward(task, text):
    return WORTH

def agent(task, client):
    return WORTH
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's, that uses another one."""
    (tmp_path / "code_helper.py").write_text("WORTH = 1.0\n")
    (tmp_path / "code_mine.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("code_mine")
    for name in ("code_mine", "code_helper"):
        sys.modules.pop(name, None)


def begun(path: Path, players: Players) -> Callable[[Players], str | None]:
    """Begin a run; return what resumes it, as far as code is concerned."""
    with closing(RunDirectory.create(path, tiny())) as run:
        record_code(run, players)
        with closing(Ledger(run.ledger_file)) as ledger:
            ledger.note_files(run.written)

    def resumed(now: Players) -> str | None:
        run = RunDirectory.open(path)
        line = renew_code(run, now)
        with closing(Ledger(run.ledger_file)) as ledger:
            ledger.note_files(run.written)
        return line

    return resumed


def test_a_run_resumed_with_other_code_says_so_in_a_line(tmp_path: Path, mine: ModuleType) -> None:
    tasks = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(3)]

    def train(updates: int, **options: Any) -> list[str]:
        settings = {**SETTINGS, "orchestration.updates": updates}
        progress = Quiet()
        treadle.train(
            mine.Mine, tasks, model=MODEL, run=tmp_path / "run", settings=settings, progress=progress, **options
        )
        return [line for line in progress.lines if "code" in line]

    assert train(1) == []
    record = json.loads((tmp_path / "run" / "code-1.json").read_text())
    assert {"code_mine", "code_helper"} < record.keys() and not any(name.startswith("treadle") for name in record)
    assert record["code_mine"]["file"] == str(tmp_path / "code_mine.py")
    (tmp_path / "code_helper.py").write_text("WORTH = 2.0\n")
    assert train(2, resume=True) == [f"changed: the code in {tmp_path}/code_helper.py"]
    assert train(3, resume=True) == []
    assert sorted(file.name for file in (tmp_path / "run").glob("code-*")) == ["code-1.json", "code-2.json"]


def test_whatever_plays(tmp_path: Path, mine: ModuleType) -> None:
    kinds = {
        "class": Players({"a": mine.Mine}),
        "options": Players({"a": partial(mine.Mine, x=1)}),
        "reward": Players({"a": partial(SingleTurn, mine.reward)}),
        "factory": Players({"a": lambda: mine.Mine()}),
        "agent": Players(agents={"a": mine.agent}),
        "driver": Players(drivers={"a": mine.Mine}),
    }
    for kind, players in kinds.items():
        resumed = begun(tmp_path / kind, players)
        assert resumed(players) is None
        with (tmp_path / "code_mine.py").open("a") as file:
            file.write("# more\n")
        assert resumed(players) == f"changed: the code in {tmp_path}/code_mine.py"
        assert resumed(players) is None


def test_files_that_come_and_go(tmp_path: Path, mine: ModuleType) -> None:
    resumed = begun(tmp_path / "run", Players({"a": mine.Mine}))
    (tmp_path / "code_other.py").write_text(ENVIRONMENT)
    other = importlib.import_module("code_other")
    try:
        assert resumed(Players({"a": mine.Mine})) is None  # loaded, and plays nothing
        assert resumed(Players({"a": other.Mine})) == f"changed: the code in {tmp_path}/code_other.py (new)"
    finally:
        del sys.modules["code_other"]
    (tmp_path / "code_helper.py").unlink()
    for name in ("code_mine", "code_helper"):  # as in a new process that does not import them
        del sys.modules[name]
    assert resumed(Players({"a": Lookup})) == f"changed: the code in {tmp_path}/code_helper.py (gone)"


def test_programs(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    (tmp_path / "package").mkdir()
    for file in (script, tmp_path / "package" / "__main__.py", tmp_path / "loop.py", tmp_path / "settings.json"):
        file.write_text("1\n")
    (tmp_path / "weights.bin").write_bytes(b"\0\1")
    relative = Command([sys.executable, "-m", "package", "--settings", "settings.json", "weights.bin"], {}, tmp_path)
    commands = {"a": Command([sys.executable, str(script)]), "b": relative, "c": Command(["bash", "-c", "echo 1"])}
    players = Players(agents=commands)
    resumed = begun(tmp_path / "run", players)
    assert resumed(players) is None
    for file in (script, tmp_path / "package" / "__main__.py", tmp_path / "settings.json"):
        file.write_text("2\n")
        assert resumed(players) == f"changed: the code in {file}"
    assert resumed(Players(agents={"a": Command(["python", "-m", "loop"], {}, tmp_path)})) == (
        f"changed: the code in {tmp_path}/loop.py (new)"
    )


def test_code_without_a_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ModuleType("__main__")
    exec(textwrap.dedent(ENVIRONMENT).replace("from code_helper import WORTH", "WORTH = 1"), cell.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", cell)
    players = Players({"a": cell.Mine})
    resumed = begun(tmp_path / "run", players)
    assert resumed(players) is None
    assert "__main__" not in json.loads((tmp_path / "run" / "code-1.json").read_text())
    cell.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text(ENVIRONMENT)
    assert resumed(players) == f"changed: the code in {tmp_path}/script.py (new)"
    assert resumed(Players({"a": Lookup})) is None


def test_many_files_are_counted_and_a_damaged_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        module = ModuleType(f"code_many_{number}")
        module.__file__ = str(tmp_path / f"many_{number}.py")
        Path(module.__file__).write_text("1")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    resumed = begun(tmp_path / "run", Players({"a": Lookup}))
    for file in tmp_path.glob("many_*.py"):
        file.write_text("2")
    line = resumed(Players({"a": Lookup}))
    assert line is not None and line.endswith("many_4.py and 3 more") and line.count(".py") == 5
    (tmp_path / "run" / "code-2.json").write_text("{}")
    with pytest.raises(DamageError, match=r"code-2\.json is damaged"):
        resumed(Players({"a": Lookup}))


def test_a_run_without_a_record_goes_on(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path / "run", tiny())) as run:
        put_file(run.path, "data.json", b"{}")
        assert renew_code(run, Players({"a": Lookup})) is None
