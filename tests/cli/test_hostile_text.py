"""Names, prompts, replies and messages that try to steer the terminal: every command shows them escaped."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.cli.worlds import TINY, Done, finish, ids, start_treadle, treadle
from tests.runs import recorded_run
from tests.worlds import END, chatml, make_step, tiny, user
from treadle.core.errors import Cause
from treadle.core.types import Failure, Message, Status, Task, Trajectory
from treadle.envs import arithmetic
from treadle.envs.arithmetic import Arithmetic
from treadle.envs.base import EnvStep
from treadle.record.ledger_reader import LedgerReader

pytestmark = pytest.mark.xdist_group("cli_hostile_text")  # what its tests share is made once

EVIL = "\x1b[2J\x1b]52;c;cm0gLXJm\x07\r\x08\x9b31m\x7f\u202efdp.\u2066"
ON_ONE_LINE = f"{EVIL}\nupdate 9/9  reward 1.000"  # would forge a line
EVIL_NAME = f"run{EVIL}"
UNDECODABLE = f"{EVIL}{os.fsdecode(bytes([255]))}"
STEERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def tasks(split: str, count: int) -> list[Task]:
    """Sums in an environment that fails now and then, with ids, prompts, answers and table keys like these."""
    own = f"{__name__}:Hostile"
    return [
        replace(
            task,
            task_id=f"{task.task_id}{ON_ONE_LINE}",
            environment=own,
            ground_truth=f"{task.ground_truth}{ON_ONE_LINE}",
            prompt=[*task.prompt, user(EVIL)],
            extras={**task.extras, "kind": f"{task.extras['a'] % 2}{ON_ONE_LINE}"},
        )
        for task in arithmetic.tasks(split, count)
    ]


class Hostile(Arithmetic):
    async def reset(self, task: Task) -> Sequence[Message]:
        own = replace(task, ground_truth=task.ground_truth.removesuffix(ON_ONE_LINE))
        opening: Sequence[Message] = await super().reset(own)
        return opening

    async def step(self, text: str) -> EnvStep:
        if int(self.task.ground_truth) % 4 == 1:
            raise ZeroDivisionError(ON_ONE_LINE)
        return await super().step(text)


@dataclass(frozen=True)
class Trained:
    folder: Path
    run: Path
    done: Done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("hostile") / f"folder{EVIL}"
    folder.mkdir()
    recipe = TINY.replace("about: sums of", f"about: {json.dumps(EVIL)} # of").replace("table_by: a", "table_by: kind")
    (folder / "tiny.yaml").write_text(recipe)
    sources = [f"data.{split}.source={__name__}:tasks" for split in ("train", "held_out")]
    words = ['environment=""', "failures.max_failed_fraction=1.0", "orchestration.updates=2"]
    done = treadle("train", folder / "tiny.yaml", "--runs", folder, "--name", EVIL_NAME, *sources, *words)
    yield Trained(folder, folder / EVIL_NAME, done)


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the model wrote them, one trajectory failed and one is warned of."""
    opening = ids(chatml([user(ON_ONE_LINE)]))
    said = [*ids(ON_ONE_LINE), END]
    goes_on = [*opening, *said, *ids(chatml([user(EVIL)]))]
    breaks = [*opening, *ids(EVIL[3:]), *goes_on]
    steps = tuple(make_step(prompt, said) for prompt in (opening, goes_on, breaks))
    failure = Failure(Cause.ENVIRONMENT, ON_ONE_LINE)
    made = [
        Trajectory("g000000.0", "t0", 0, steps, 1.0, Status.DONE, warning=ON_ONE_LINE),
        Trajectory("g000000.1", "t0", 1, steps, None, Status.FAILED, failure=failure),
    ]
    return recorded_run(tmp_path_factory.mktemp("replies") / EVIL_NAME, tiny(), *made).path


def check(done: Done, status: int = 0) -> str:
    """What it printed: with nothing that steers, and without the forged line."""
    assert done.status == status, done.err
    for printed in (done.out, done.err):
        assert STEERS.findall(printed) == []
        assert not any(line.startswith("update 9/9") for line in printed.splitlines())
        printed.encode()
    return done.out


def test_training(trained: Trained) -> None:
    out = check(trained.done)
    assert r"run directory: " in out and r"\x1b[2J\x1b]52;c;cm0gLXJm\x07\r\x08\x9b31m\x7f\u202efdp.\u2066" in out


@pytest.mark.parametrize("words", [["report"], ["report", "--json"], ["report", "--failures"], ["show"],
                                   ["show", "--json"], ["eval"], ["eval", "--json"]])  # fmt: skip
def test_commands_that_read_a_run(words: list[str], trained: Trained) -> None:
    out = check(treadle(words[0], trained.run, *words[1:]))
    if "--json" in words:
        assert json.loads(out)
    else:
        assert r"\x1b[2J" in out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_every_recorded_trajectory(options: list[str], trained: Trained, replies: Path) -> None:
    for run in (trained.run, replies):
        ledger = LedgerReader(run / "ledger.sqlite")
        names = [row["trajectory_id"] for row in ledger.query("SELECT trajectory_id FROM trajectories")]
        for name in names[:: max(1, len(names) // 8)]:
            assert "x1b" in check(treadle("show", run, name, *options)) or options


def test_replies(replies: Path) -> None:
    for words in (["report"], ["report", "--json"], ["show"], ["show", "--json"]):
        assert check(treadle(words[0], replies, *words[1:]))
    out = check(treadle("show", replies, "g000000.0"))
    assert r"  \x1b[2J\x1b]52;c;cm0gLXJm\x07\r\x08\x9b31m\x7f\u202efdp.\u2066" in out


def test_models(trained: Trained, tmp_path: Path) -> None:
    recipe, export, warm = trained.folder / "tiny.yaml", tmp_path / f"export{EVIL}", tmp_path / f"warm{EVIL}"
    assert r"\x1b[2J" in check(treadle("export", trained.run, export))
    assert r"\x1b[2J" in check(treadle("sft", recipe, "--out", warm, "warm_start.steps=2"))
    assert r"\x1b[2J" in check(treadle("eval", trained.run, "--model", export))


def test_recipes(trained: Trained) -> None:
    recipe = trained.folder / "tiny.yaml"
    assert r"\x1b[2J" in check(treadle("recipes", "show", recipe))
    shown = trained.folder / "again.yaml"
    shown.write_text(check(treadle("recipes", "show", recipe, "--yaml")))
    assert treadle("recipes", "show", shown, "--yaml").out == shown.read_text()


def test_a_stopped_run_and_its_resume(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.run, tmp_path / EVIL_NAME)
    (tmp_path / EVIL_NAME / "summary.json").unlink()
    assert "--resume" in check(treadle("report", tmp_path / EVIL_NAME))
    words = ["--runs", tmp_path, "--name", EVIL_NAME, "--resume", "orchestration.updates=3"]
    assert r"\x1b[2J" in check(treadle("train", trained.folder / "tiny.yaml", *words))


WRONG = [
    *(["report", UNDECODABLE], ["show", UNDECODABLE], ["serve", UNDECODABLE], ["eval", EVIL], ["train", EVIL]),
    *(["train", "demo", f"{EVIL}=1"], ["train", "demo", f"--{EVIL}"], ["train", "demo", f"seed={EVIL}"]),
    *(["show", "RUN", EVIL], ["export", f"RUN@{EVIL}", "/x"], [UNDECODABLE]),
    *(["recipes", "show", EVIL], ["sft", "demo", "--out", "/proc", EVIL]),
]


@pytest.mark.parametrize("words", WRONG)
def test_errors(words: list[str], trained: Trained) -> None:
    done = treadle(*(re.sub("^RUN", lambda _: str(trained.run), word) for word in words))
    assert done.status in (1, 2)
    check(done, done.status)


@pytest.mark.slow
def test_serving(trained: Trained, tmp_path: Path) -> None:
    check(treadle("export", trained.run, tmp_path / f"m{EVIL}"))
    process = start_treadle("serve", tmp_path / f"m{EVIL}", "--port", "0", "--record", tmp_path / f"{EVIL}.jsonl")
    assert process.stdout is not None
    head = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert r"\x1b[2J" in check(Done(done.status, head + done.out, done.err))


def test_on_a_terminal(trained: Trained, replies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for words in (["report", trained.run], ["show", replies, "g000000.0"], ["eval", trained.run], ["show", replies]):
        done = treadle(*words)
        colours = re.compile(r"\x1b\[[0-9;]*m")
        assert colours.search(done.out)
        check(Done(done.status, colours.sub("", done.out), ""))
        bars = re.sub(r"\x1b\[(\?25[lh]|[0-9;]*m|2K|1A)|\r", "", done.err)
        assert STEERS.findall(bars) == []
