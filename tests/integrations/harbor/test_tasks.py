"""Tasks of Harbor's from directories and packed files, and what foreign archives may not do."""

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.harbor.trials import python_with_harbor
from treadle.cli.main import main
from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError
from treadle.data.config import sources_of
from treadle.integrations.harbor import tasks as packed
from treadle.integrations.harbor.config import HarborConfig
from treadle.integrations.harbor.tasks import harbor_sums, harbor_tasks, unpack
from treadle.plan.config import load_recipe
from treadle.plan.inputs import Inputs, configured_players
from treadle.plan.plan import make

SHIPPED = Path(str(files("treadle.recipes") / "harbor_tasks"))


def regular(archive: tarfile.TarFile, name: str, content: bytes = b"x", mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def packed_task(add: Callable[[tarfile.TarFile], object] = lambda archive: None, compression: str = "gz") -> bytes:
    """A task with what `add` adds to its archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        regular(archive, "task.toml")
        regular(archive, "./tests/test.sh", b"#!/bin/bash\n", 0o755)
        add(archive)
    return buffer.getvalue()


def parquet(path: Path, *rows: tuple[Any, Any]) -> Path:
    names, binaries = zip(*rows, strict=True) if rows else ((), ())
    pq.write_table(
        pa.table({"path": pa.array(names, pa.string()), "task_binary": pa.array(binaries, pa.binary())}), path
    )
    return path


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def test_shipped_tasks_are_found_with_their_instructions() -> None:
    tasks = list(harbor_tasks("train", str(SHIPPED)))
    assert [task.task_id for task in tasks] == ["greeting", "largest-file", "squares"]
    assert {task.player for task in tasks} == {("driver", "harbor")}
    assert "hello.txt" in tasks[0].prompt[0]["content"]
    [one] = harbor_tasks("train", str(SHIPPED / "greeting"))
    assert one.task_id == "greeting"


def test_what_is_no_directory_of_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        list(harbor_tasks("train", str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"a task is a directory with a task\.toml"):
        list(harbor_tasks("train", str(tmp_path)))


@pytest.mark.parametrize("compression", ["", "gz", "xz"])
def test_packed_tasks_become_directories(tmp_path: Path, compression: str) -> None:
    file = parquet(tmp_path / "a.parquet", ("one", packed_task(compression=compression)), ("more/two", packed_task()))
    assert unpack(file, tmp_path / "tasks") == 2
    assert everything(tmp_path / "tasks") == [
        f"{task}/{name}" for task in ("more/two", "one") for name in ("task.toml", "tests/test.sh")
    ]
    assert (tmp_path / "tasks" / "one" / "tests" / "test.sh").stat().st_mode & 0o777 == 0o755
    with pytest.raises(ConfigError, match="already exists"):
        unpack(file, tmp_path / "tasks")


def test_a_packed_file_is_unpacked_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    file = parquet(tmp_path / "a.parquet", ("one", packed_task()))
    [task] = harbor_tasks("train", str(file))
    assert task.task_id == "one" and Path(task.extras["path"], "task.toml").is_file()
    monkeypatch.setattr("treadle.integrations.harbor.tasks.unpack", None)  # not called again
    assert list(harbor_tasks("train", str(file))) == [task]


@pytest.mark.slow
def test_a_data_set_of_harbors_is_downloaded_by_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, repository = python_with_harbor(), tmp_path / "repository"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copytree(SHIPPED, repository)
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "tasks")):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    tasks = [
        {"name": name, "git_url": repository.as_uri(), "git_commit_id": commit, "path": name}
        for name in ("squares", "greeting")
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "tiny", "version": "1.0", "description": "", "tasks": tasks}]))
    found = list(harbor_tasks("train", "tiny@1.0", registry=str(registry), python=python))
    assert sorted(Path(task.extras["path"]).name for task in found) == ["greeting", "squares"]
    assert all((Path(task.extras["path"]) / "task.toml").is_file() and task.prompt for task in found)
    with pytest.raises(ConfigError, match=r"Harbor cannot download 'other@1\.0': .*other"):
        list(harbor_tasks("train", "other@1.0", registry=str(registry), python=python))


def link(kind: bytes, target: str) -> Callable[[tarfile.TarFile], None]:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, target
        archive.addfile(member)

    return add


@pytest.mark.parametrize(
    ("name", "binary", "message"),
    [
        ("../out", packed_task(), "leads out"),
        ("/tmp/out", packed_task(), "leads out"),
        ("a/../../out", packed_task(), "leads out"),
        ("", packed_task(), "or nowhere"),
        (None, packed_task(), "or nowhere"),
        ("one", packed_task(lambda archive: regular(archive, "../out")), "leads out"),
        ("one", packed_task(lambda archive: regular(archive, "/tmp/out")), "leads out"),
        ("one", packed_task(lambda archive: regular(archive, "tests/../../out")), "leads out"),
        ("one", packed_task(link(tarfile.SYMTYPE, "/etc/passwd")), "a link or a device"),
        ("one", packed_task(link(tarfile.LNKTYPE, "task.toml")), "a link or a device"),
        ("one", packed_task(link(tarfile.FIFOTYPE, "")), "a link or a device"),
        ("one", packed_task(lambda archive: regular(archive, "task.toml")), "cannot be unpacked"),  # twice
        ("one", b"no archive", "cannot be unpacked"),
        ("one", packed_task()[:50], "cannot be unpacked"),
        ("one", None, "must be a tar archive"),
    ],
    ids=lambda value: "archive" if isinstance(value, bytes) else None,  # their bytes have the time in them
)
def test_what_would_write_elsewhere_writes_nothing(tmp_path: Path, name: Any, binary: Any, message: str) -> None:
    file = parquet(tmp_path / "a.parquet", (name, binary))
    with pytest.raises(DataError, match=f"row 0: .*{message}"):
        unpack(file, tmp_path / "below" / "tasks")
    assert everything(tmp_path) == ["a.parquet"]


def test_an_archive_without_a_task_and_too_large_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        regular(archive, "readme.md")
    with pytest.raises(DataError, match=r"no task\.toml"):
        unpack(parquet(tmp_path / "a.parquet", ("one", buffer.getvalue())), tmp_path / "tasks")
    file = parquet(tmp_path / "b.parquet", ("one", packed_task()), ("one", packed_task()))
    with pytest.raises(DataError, match="row 1: the path 'one' occurs twice"):
        unpack(file, tmp_path / "tasks")
    monkeypatch.setattr(packed, "MOST_FILES", 1)
    with pytest.raises(DataError, match="more than 1 files"):
        unpack(file, tmp_path / "tasks")
    with pytest.raises(DataError, match="no rows"):
        unpack(parquet(tmp_path / "c.parquet"), tmp_path / "tasks")


@given(st.text(st.sampled_from("./\\a\0é~"), max_size=12))
def test_a_path_that_is_taken_stays_inside(path: str) -> None:
    try:
        inside = packed._inside(path, "row 0")
    except DataError:
        return
    root = Path("/a/root")
    assert (root / inside).resolve().is_relative_to(root) and (root / inside).resolve() != root


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "a.parquet", ("one", packed_task()))
    assert main(["data", "prepare", "harbor-tasks", str(file), str(tmp_path / "tasks")]) == 0
    assert "1 tasks in" in capsys.readouterr().out.replace("\n", " ")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    assert main(["data", "prepare", "harbor-tasks", str(tmp_path / "b.parquet"), str(tmp_path / "more")]) == 2
    assert "has no column 'path', only x" in capsys.readouterr().err.replace("\n", " ")


def test_recipes_have_the_published_values() -> None:
    for name, tasks, at_once in (("codecontests", 32, 512), ("codecontests-async", 16, 128)):
        recipe = load_recipe(name)
        harbor = build(HarborConfig, recipe.driver_options)
        assert recipe.model.path == "Qwen/Qwen3-8B"
        assert (recipe.training.tasks_per_update, recipe.training.group_size) == (tasks, 8)
        assert (harbor.concurrency, harbor.trials_per_second) == (at_once, 5.0)
        assert recipe.training.optimizer.learning_rate == 1e-6
        assert recipe.rollout.max_input_tokens + recipe.rollout.max_completion_tokens == 32_768
        assert recipe.algorithm.advantage_options == {"norm_by_std": False} and recipe.algorithm.kl is None
        assert recipe.algorithm.reduction == "token_mean"
        assert recipe.rewards.overlong == "drop" and recipe.evaluation.attempts == 2
        assert harbor.trial["agent"]["override_timeout_sec"] == 1200 and harbor.agent == "terminus-2"
        kwargs = harbor.trial["agent"]["kwargs"]
        assert (kwargs["max_turns"], kwargs["enable_summarize"]) == (32, False)
        plan = make(recipe, Inputs([], [], configured_players(recipe)))
        assert plan.engine.lock_step is False
    summaries = load_recipe("codecontests-summaries")
    kwargs = build(HarborConfig, summaries.driver_options).trial["agent"]["kwargs"]
    assert (kwargs["max_turns"], kwargs["enable_summarize"], kwargs["proactive_summarization_threshold"]) == (
        32,
        True,
        8000,
    )
    limits = summaries.rollout
    assert limits.max_input_tokens + limits.max_completion_tokens == 32_768
    assert limits.max_input_tokens > 32_768 - 8000 + 10_000 / 3  # an observation has 10,000 bytes at most
    synchronous, asynchronous = load_recipe("codecontests"), load_recipe("codecontests-async")
    assert synchronous.algorithm.correction.token_tis == 2.0
    assert asynchronous.algorithm.correction.geometric_mask == (0.99, 1.01)
    section = asynchronous.orchestration
    assert (section.max_staleness, section.max_concurrent_groups) == (4, 32)


def test_tasks_and_agent_are_named_on_the_command_line(tmp_path: Path) -> None:
    recipe = load_recipe("harbor", [f"data.train.options.path={tmp_path}", "driver_options.agent=terminus-2-stock"])
    assert [source.options for source in sources_of(recipe.data.train)] == [{"path": str(tmp_path)}]
    assert recipe.driver_options["agent"] == "terminus-2-stock"
    changed = load_recipe("harbor", ["driver_options.trial.agent.kwargs.max_turns=4"])
    assert changed.driver_options["trial"]["agent"]["kwargs"]["max_turns"] == 4
    with pytest.raises(ConfigError, match="driver_options: trial: 'task' is set by the run"):
        configured_players(load_recipe("harbor", ["driver_options.trial={task: {path: x}}"]))


def test_runs_that_begin_together_share_the_generated_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: [task.extras["path"] for task in harbor_sums("train", 40)], range(8)))
    assert all(paths == drawn[0] for paths in drawn)
    assert all(len(list(Path(path).rglob("*.*"))) == 3 for path in drawn[0])
    assert not [path for path in (tmp_path / "harbor").rglob("*") if path.name.startswith(".")]


def test_what_harbor_lacks_is_said_before_a_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "harbor-small", "driver_options.python=/nowhere/python", "--runs", str(tmp_path)]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "is not an interpreter" in said.err or "driver_options.environment 'local' needs" in said.err
    assert "warm start" not in said.out
    assert not any(tmp_path.iterdir())
