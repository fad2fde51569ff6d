"""skyrl_gym's environments, played here and by the library's own loop beside, on the same scripted replies."""

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("skyrl_gym")
pytest.importorskip("httpx")
pytest.importorskip("pandas")

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv

from tests.envs import gsm8k_cases, search_cases, sql_cases
from tests.http_servers import answering, serving
from tests.runs import query, start
from tests.until import CEILING
from tests.worlds import END, PLAIN, plain_ids, plain_renderer, play, tiny, user
from treadle.core import registry
from treadle.core.errors import Cause, ConfigError, DataError
from treadle.core.types import Status, Task, Trajectory
from treadle.data.published import skyrl_gym_rows
from treadle.envs.sql import sandbox
from treadle.integrations.skyrl_gym.environment import SkyrlGym, guard_tools
from treadle.plan.inputs import load_inputs
from treadle.plan.start import check_first_prompts
from treadle.testing import FakeEngine

HERE = "tests.integrations.test_skyrl_gym"
in_one_process = pytest.mark.xdist_group("skyrl_gym")  # they share one of the library's
Script = dict[str, Any]


def script(env: str, replies: Sequence[str], truth: Any, max_turns: int = 1, **more: Any) -> Script:
    specs = {"reward_spec": {"ground_truth": truth}, "reward_model": {"ground_truth": truth}, "extra_info": {}}
    config = more.pop("config", {})
    return {"env": env, "config": config, "extras": specs | more, "max_turns": max_turns, "replies": list(replies)}


OwnLoop = Callable[[Sequence[Script]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def own_loop() -> Iterator[OwnLoop]:
    """What the library's own loop gives, in a process without Treadle."""
    command = [sys.executable, str(Path(__file__).with_name("skyrl_own_loop.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def play(scripts: Sequence[Script]) -> list[dict[str, Any]]:
            asked.write(json.dumps(scripts) + "\n")
            asked.flush()
            return json.loads(answers.readline())  # type: ignore[no-any-return]

        yield play


def saying_in_turn(replies: Sequence[str]) -> FakeEngine:
    left = list(replies)
    return FakeEngine(lambda prompt, sampling: [*plain_ids(left.pop(0)), END])


def here(script: Script, **settings: Any) -> Trajectory:
    """The attempt played by Treadle, from reset to close."""
    make = partial(SkyrlGym, env=script["env"], config=script["config"], max_turns=script["max_turns"])
    task = Task("t", (user("?"),), "world", extras=script["extras"])
    limits = {"max_steps": max(script["max_turns"], 1), "max_input_tokens": 60_000, "max_completion_tokens": 4000}
    settings = {**limits, "environment_timeout": CEILING, **settings}
    [trajectory] = play(make, saying_in_turn(script["replies"]), task, **settings)
    return trajectory


def shown(trajectory: Trajectory) -> list[str]:
    """The user's last message in each prompt but the first."""
    prompts = [str(PLAIN.decode(step.prompt_ids)) for step in trajectory.steps[1:]]
    return [prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] for prompt in prompts]


def check(own_loop: OwnLoop, scripts: Sequence[Script]) -> list[dict[str, Any]]:
    """Play the scripts by both loops and compare; return what the library's gave."""
    published = own_loop(scripts)
    for each, own in zip(scripts, published, strict=True):
        trajectory = here(each)
        assert each["env"] != "search" or shown(trajectory) == [text for texts in own["shown"] for text in texts]
        assert trajectory.failure is None, trajectory.failure
        assert [step.reward for step in trajectory.steps] == own["rewards"], each
        assert trajectory.reward == pytest.approx(sum(own["rewards"]))
        assert trajectory.status is Status.DONE and own["done"]
        assert dict(trajectory.metrics) == {f"skyrl_{name}": value for name, value in own["metrics"].items()}
    return published


# --- the same rewards and metrics ----------------------------------------------------------------------------------


@in_one_process
def test_gsm8k(own_loop: OwnLoop) -> None:
    check(own_loop, [script("gsm8k", [case.text], case.golden) for case in gsm8k_cases.REPLIES.values()])


@in_one_process
def test_gsm8k_multi_turn(own_loop: OwnLoop) -> None:
    cases = gsm8k_cases.ATTEMPTS.values()
    published = check(own_loop, [script("gsm8k_multi_turn", case.replies, "72", case.max_turns) for case in cases])
    assert {"steps": 5} in [own["metrics"] for own in published]


@in_one_process
def test_aime(own_loop: OwnLoop) -> None:
    replies = ["Answer: 72", "so\nAnswer: $72$", "\\boxed{72}", "Answer: 73", "x", "", "Answer: 72 Answer: 1"]
    published = check(own_loop, [script("aime", [reply], "72") for reply in replies])
    assert {own["rewards"][0] for own in published} == {1.0, -1.0}


@in_one_process
def test_search(own_loop: OwnLoop, server: str) -> None:
    config = {"search_url": server, "topk": 3, "timeout": 5, "log_requests": False}
    cases = [case for case in search_cases.CASES.values() if case.protocol == "skyrl" and case.done]
    check(own_loop, [script("search", case.replies, {"target": case.golden}, 2, config=config) for case in cases])


@in_one_process
def test_text2sql(own_loop: OwnLoop, databases: Path) -> None:
    cases = [case.replies for case in sql_cases.CASES.values()]
    cases += [case.replies for case, _ in sql_cases.DEVIATIONS.values()]
    check(own_loop, [sql_script(databases, replies) for replies in cases])


def sql_script(databases: Path, replies: Sequence[str], gold: str = sql_cases.GOLD) -> Script:
    options = {"db_id": "city", "data": "spider", "config": {"db_path": str(databases)}}
    return script("text2sql", replies, gold, sql_cases.MAX_TURNS, **options)


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("databases")
    folder = root / "spider/database/city"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "city.sqlite")) as database:
        database.executescript(sql_cases.DATABASE)
        database.execute("INSERT INTO wide VALUES ('wide')")
        database.commit()
    return root


def passages(path: str, headers: Any, asked: Any) -> tuple[int, Any]:
    """What the table of scripted attempts says, to the library's requests and Treadle's."""
    found = [{"document": {"contents": text}} for text in search_cases.SHOWN[asked["query"]][: asked["topk"]]]
    return 200, {"result": [found]}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(answering(passages)) as url:
        yield f"{url}/retrieve"


# --- limits --------------------------------------------------------------------------------------------------------


def test_an_attempt_that_a_limit_ends_reports_its_metrics() -> None:
    replies = ["#### 1", "#### 2", "#### 3"]
    trajectory = here(script("gsm8k_multi_turn", replies, "72", 3), max_input_tokens=250)
    assert trajectory.status is Status.CONTEXT and len(trajectory.steps) == 2
    assert dict(trajectory.metrics) == {"skyrl_steps": 2}


OPTIONS = (
    "environment=skyrl_gym",
    "environment_options={env: gsm8k_multi_turn, max_turns: 3}",
    "data.held_out=null",
    f"data.train={{source: '{HERE}:questions'}}",
    "rollout.max_input_tokens=400",
    "model.build.max_position_embeddings=512",
)


def questions(split: str, count: int = 4) -> list[Task]:
    return [Task(f"{split}-{n}", (user(f"{n} + 1?"),), ground_truth=str(n + 1)) for n in range(count)]


def test_more_turns_than_steps_are_refused_at_the_start_and_told_by_an_attempt() -> None:
    config = tiny(*OPTIONS, "rollout.max_steps=2")
    with pytest.raises(ConfigError, match=r"needs 3 calls .* rollout.max_steps is 2; set rollout.max_steps=3"):
        check_first_prompts(load_inputs(config), plain_renderer(), config, 512, lambda line: None)
    trajectory = here(script("gsm8k_multi_turn", ["#### 1"], "72", 3), max_steps=2)
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENVIRONMENT
    assert "rollout.max_steps is 2" in trajectory.failure.message and not trajectory.steps


def test_a_run_trains_and_records_the_metrics(tmp_path: Path) -> None:
    start(tmp_path / "run", *OPTIONS, "orchestration.updates=1", "orchestration.checkpoint_every=1")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["env/skyrl_steps"] for row in rows if "env/skyrl_steps" in row] == [3.0]
    assert query(tmp_path / "run", "SELECT DISTINCT status FROM trajectories") == [{"status": "done"}]


# --- what an environment may do ------------------------------------------------------------------------------------


class Custom(BaseTextEnv):  # type: ignore[misc]  # no types shipped
    """Does what its extras say, in turn, and notes where it was called."""

    threads: ClassVar[set[str]] = set()
    let_go: ClassVar[threading.Event] = threading.Event()

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.outputs = list((extras or {})["outputs"])
        self.max_turns = len(self.outputs)

    def step(self, action: str) -> dict[str, Any]:
        Custom.threads.add(threading.current_thread().name)
        output = self.outputs.pop(0)
        if output.pop("held", False):
            Custom.let_go.wait(CEILING)
        return {"observations": [], "reward": 0.0, "done": False, "metadata": {}, **output}

    def get_metrics(self) -> dict[str, Any]:
        return {"left": len(self.outputs), "won": True, "of kind/a": 2, "name": "x"}


def custom(*outputs: dict[str, Any], replies: Sequence[str] = ("a", "b"), **settings: Any) -> Trajectory:
    each = script(f"{HERE}:Custom", replies, None, len(outputs), outputs=[*outputs])
    return here(each, **settings)


@pytest.mark.parametrize("key", ["postprocessed_action", "next_user_message"])
def test_what_cannot_be_recorded_exactly_is_refused(key: str) -> None:
    trajectory = custom({"done": True, key: "other"})
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENVIRONMENT
    assert f"the environment gave {key}, a" in trajectory.failure.message
    assert custom({"done": True, key: None}).reward == 0


def test_calls_are_made_on_the_attempts_thread_and_have_their_limit() -> None:
    trajectory = custom({"done": True, "held": True}, environment_timeout=0.2)
    Custom.let_go.set()
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.TIMEOUT
    assert all("world" in name for name in Custom.threads)


def test_registered_names_and_classes_and_rows_that_name_one() -> None:
    skyrl_gym.register("custom", f"{HERE}:Custom")
    try:
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"env": "custom"}, {}),
            ({"env": f"{HERE}:Custom"}, {}),
            ({}, {"env_class": "custom"}),
        ]
        for options, extras in cases:
            task = Task("t", (user("?"),), extras={"outputs": [{"done": True}], **extras})
            environment = SkyrlGym(**options)
            assert environment.reset(task) == (user("?"),) and environment.step("a").done
    finally:
        skyrl_gym.envs.deregister("custom")
    with pytest.raises(DataError, match=r"task t names no environment of skyrl_gym; set environment_options\.env or"):
        SkyrlGym().reset(Task("t", (user("?"),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "gsm8"}, "env 'gsm8' is not registered with skyrl_gym; did you mean 'gsm8k'"),
        ({"env": "gsm8k", "max_turns": 0}, "max_turns must be a whole number above 0, got 0"),
        ({"env": "gsm8k", "config": "x"}, "config must hold settings by name, got 'x'"),
        (
            {"env": "search", "config": {"url": "x"}},
            "unknown key 'url'; it takes log_requests, search_url, topk, timeout",
        ),
        (
            {"env": "search", "config": {"topk": "few"}},
            "config of env 'search': topk is 'few': Input should be a valid int",
        ),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkyrlGym(**options)
    config = tiny(*OPTIONS, "rollout.max_steps=3").model_copy(update={"environment_options": options})
    with pytest.raises(ConfigError, match=f"^environment_options of 'skyrl_gym': .*{message}"):
        check_first_prompts(load_inputs(config), plain_renderer(), config, 512, lambda line: None)


# --- its tools -----------------------------------------------------------------------------------------------------


def test_no_connection_of_the_library_sees_the_models_sql(
    databases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened in this process")

    monkeypatch.setattr(sqlite3, "connect", connect)
    asking, solving = sql_cases.asking, sql_cases.solving
    attach = f"ATTACH DATABASE '{tmp_path}/made.sqlite' AS made"
    trajectory = here(sql_script(databases, [asking(attach), asking("DELETE FROM city"), sql_cases.RIGHT]))
    assert [text.count("Error executing SQL: not authorized") for text in shown(trajectory)] == [1, 1]
    assert trajectory.reward == 1
    assert here(sql_script(databases, [solving(attach)])).reward == 0
    assert not list(tmp_path.iterdir())


def test_a_query_that_never_ends_is_ended(databases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    original = sandbox.Query
    monkeypatch.setattr(
        "treadle.integrations.skyrl_gym.environment.Query",
        lambda database, sql, seconds: original(database, sql, 0.2 if sql == endless else seconds),
    )
    trajectory = here(sql_script(databases, [sql_cases.asking(endless), sql_cases.solving(endless)]))
    assert "SQL Timeout:" in shown(trajectory)[0] and trajectory.reward == 0


def test_a_reference_query_that_fails_is_no_wrong_answer(databases: Path) -> None:
    trajectory = here(sql_script(databases, [sql_cases.RIGHT], gold="SELECT nothing FROM nowhere"))
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.VERIFIER


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/retrieve", "nowhere"])
def test_an_outage_fails_the_attempt_and_is_no_text(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.integrations.skyrl_gym.environment.SEARCH_PATIENCE", 0.2)
    config = {"search_url": url, "topk": 3, "timeout": 5, "log_requests": False}
    trajectory = here(script("search", ["<search>anna</search>"] * 2, {"target": ["a"]}, 2, config=config))
    assert trajectory.reward is None and trajectory.failure is not None and len(trajectory.steps) == 1
    is_down = url.startswith("http")
    assert trajectory.failure.cause is (Cause.INFRASTRUCTURE if is_down else Cause.ENVIRONMENT)
    assert ("the retrieval server at" in trajectory.failure.message) == is_down


def test_another_version_of_the_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_gym.tools.search.call_search_api", lambda url, queries: None)
    with pytest.raises(ConfigError, match=r"another skyrl_gym\.tools\.search\.call_search_api, and its tools could"):
        guard_tools()


# --- rows and the package -----------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"data_source": "gsm8k", "prompt": [user("1 + 1?")], "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}},
    {"data_source": "aime", "prompt": [user("?")], "env_class": "aime", "reward_model": {"ground_truth": "7"}},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_skyrl(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = {name for row in ROWS for name in row}
        parquet.write_table(arrow.Table.from_pylist([{name: row.get(name) for name in columns} for row in ROWS]), file)
    tasks = list(skyrl_gym_rows("train", str(file)))
    assert [task.ground_truth for task in tasks] == ["2", "7"]
    assert [task.environment for task in tasks] == ["skyrl_gym"] * 2
    assert [task.extras["env_class"] for task in tasks] == ["gsm8k", "aime"]
    for task, reply in zip(tasks, ["#### 2", "Answer: 7"], strict=True):
        environment = SkyrlGym()
        environment.reset(task)
        assert environment.step(reply).reward == 1


def test_the_absent_package_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl_gym" or "integrations.skyrl_gym" in name]:
        if not name.startswith("tests"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ConfigError, match=r"skyrl_gym.*; pip install 'treadle\[skyrl-gym\]'$"):
        registry.resolve("environments", "skyrl_gym")
