"""Every code block of the documentation runs as it stands, or a comment before it says why not.

    <!-- not run: REASON -->        one of REASONS, before a block

The blocks of a page run in order, in one empty directory. One that opens with a comment `# NAME.EXT` is that file.
Blocks without a language are output. Of recipes, and of calls of `treadle.train`, `PLAYS` has who plays whose tasks.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sqlite3
import sys
import tomllib
from collections import Counter, defaultdict
from contextlib import suppress
from functools import reduce
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.test_docs import PAGES, run
from tests.worlds import user
from treadle.api import public as api
from treadle.api.evaluate import Subject
from treadle.data.config import SourceConfig, sources_of
from treadle.plan import inputs
from treadle.plan.config import RunConfig, load_recipe
from treadle.plan.inputs import IN_MEMORY, Inputs, Split, load_data
from treadle.record import address
from treadle.record.run_directory import RunDirectory

REASONS = {
    "minutes",  # of training, or of installation
    "network",  # a download, or a service
    "GPU",
    "cluster",  # Ray or several machines
    "server",  # runs until it is stopped, or needs one
    "containers",
    "part",  # of a program; the text around it has the rest
    "others' code",  # as it was before it came here
    "repository",  # in a checkout, where `make` tests it
}


class Block(NamedTuple):
    reason: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# ([\w./-]+\.\w+)\b", self.text)
        return named[1] if named else None


def code(page: Path) -> list[Block]:
    found = re.findall(
        r"^(?:<!-- not run: (.+) -->\n+)?^ *```(\w+)\n(?s:(.*?))^ *```", page.read_text("utf-8"), re.MULTILINE
    )
    return [Block(*each) for each in found]


def test_what_is_not_run_is_a_minority_and_has_a_reason() -> None:
    counts = Counter[bool]()
    for page in PAGES:
        for block in code(page):
            counts[bool(block.reason)] += 1
            assert block.reason in {"", *REASONS}, f"{page.name}: {block.reason}"
            assert block.language in ("bash", "python", "yaml", "json", "toml"), f"{page.name}: {block.language}"
    assert counts[False] > counts[True], counts


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for block in code(page):
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        if not block.reason:
            execute(block, tmp_path)


def execute(block: Block, directory: Path) -> None:
    match block.language:
        case "bash":
            run(["bash", "-ec", block.text], directory)
        case "python":
            run([sys.executable, "-c", block.text], directory)
        case "json":
            for line in block.text.splitlines() if block.text.startswith("{") else [block.text]:
                json.loads(line)
        case "toml":
            tomllib.loads(block.text)


# Who plays: what a page names, and nothing else, plays the tasks that it names


class Plays(NamedTuple):
    """who: kind and name of what plays all tasks. train, held_out: sources of the tasks, or how many from Python.

    over: the recipe that a part is laid over: one that ships, or the page's own.
    """

    who: str
    train: str
    held_out: str = ""
    over: str = ""


DEMO = ("environment lookup", "lookup", "lookup")
PLAYS: dict[str, Plays] = {
    "agents.md agent.yaml": Plays("agent my_agents:solve", "my_tasks.jsonl"),
    "agents.md train_shop.py": Plays("agent solve", "436 tasks", "64 tasks"),
    "agents.md treadle.train(solve, tasks, ...)": Plays("agent solve", "10 tasks"),
    "agents.md treadle.train(Greeter, tasks, ...)": Plays("driver Greeter", "10 tasks"),
    "algorithms.md forked.yaml": Plays(*DEMO),
    "algorithms.md rloo.yaml": Plays(*DEMO),
    "algorithms.md squared.yaml": Plays(*DEMO),
    "algorithms.md median.yaml": Plays(*DEMO),
    "async.md yaml 1": Plays(*DEMO, over="demo"),
    "data.md python 1": Plays("environment reward", "train.parquet"),
    "data.md recipe.yaml": Plays("reward my_rewards:reward", "train.parquet", "test.parquet"),
    "data.md yaml 2": Plays("reward my_rewards:reward", "math.jsonl", "math.jsonl", over="recipe.yaml"),
    "data.md yaml 3": Plays("reward my_rewards:reward", "train.parquet", "test.parquet", over="recipe.yaml"),
    "data.md yaml 4": Plays(
        "reward my_rewards:reward", "gsm8k.parquet and hard.jsonl", "test.parquet", over="recipe.yaml"
    ),
    "engines.md yaml 1": Plays(*DEMO, over="demo"),
    "engines.md yaml 2": Plays(*DEMO, over="demo"),
    "environments.md guess.yaml": Plays("environment my_world:Guess", "my_tasks.jsonl"),
    "environments.md python 1": Plays("environment Shop", "436 tasks", "64 tasks"),
    "environments.md train_orders.py": Plays("environment Orders", "936 tasks", "64 tasks"),
    "from-trl.md python 1": Plays("environment reward", "train.jsonl"),
    "gateway.md yaml 1": Plays(*DEMO, over="demo"),
    "gsm8k.md gsm8k.yaml": Plays("reward gsm8k", "gsm8k_questions", "gsm8k_questions"),
    "gsm8k.md multi_turn.yaml": Plays("environment gsm8k_multi_turn", "gsm8k_questions"),
    "gsm8k.md python 1": Plays("environment reward", "data/gsm8k/train.jsonl"),
    "harbor.md yaml 1": Plays("driver harbor", "harbor_tasks", "harbor_tasks"),
    "harbor.md yaml 2": Plays("driver harbor", "harbor_tasks", over="harbor"),
    "images.md seeing.yaml": Plays(*DEMO),
    "integrations.md yaml 1": Plays("environment skyrl_gym", "gsm8k_questions"),
    "integrations.md yaml 2": Plays("environment reasoning_gym", "reasoning_gym", "reasoning_gym"),
    "integrations.md yaml 3": Plays("driver verifiers", "verifiers", "verifiers"),
    "integrations.md yaml 4": Plays("driver openenv", "tasks.jsonl"),
    "judges.md yaml 1": Plays(*DEMO, over="demo"),
    "long-episodes.md yaml 1": Plays("environment notes", "notes", "notes", over="notes-small"),
    "lora.md adapters.yaml": Plays(*DEMO),
    "models.md yaml 1": Plays(*DEMO, over="demo"),
    "one-gpu.md card.yaml": Plays("environment phone_book", "phone_book", "phone_book"),
    "other-models.md yaml 1": Plays(*DEMO, over="demo"),
    "packing.md yaml 1": Plays(*DEMO, over="demo"),
    "quickstart.md python 1": Plays("environment Larger", "67 tasks", "23 tasks"),
    "quickstart.md python 2": Plays("environment reward", "67 tasks", "23 tasks"),
    "quickstart.md larger.yaml": Plays("environment my_world:Larger", "train.jsonl", "held_out.jsonl"),
    "quickstart.md larger-dr.yaml": Plays("environment my_world:Larger", "train.jsonl", "held_out.jsonl"),
    "rendering.md chat.yaml": Plays(*DEMO, over="demo"),
    "runs.md sums.yaml": Plays("environment arithmetic", "arithmetic", "arithmetic"),
    "runs.md python 1": Plays("environment arithmetic", "arithmetic", "arithmetic"),
    "search.md search.yaml": Plays("environment search", "questions.parquet"),
    "starts.md yaml 1": Plays(*DEMO, over="demo"),
    "starts.md yaml 2": Plays(*DEMO, over="demo"),
    "teachers.md yaml 1": Plays(*DEMO),
    "teachers.md yaml 2": Plays(*DEMO),
    "text-to-sql.md sql.yaml": Plays("environment text_to_sql", "skyrl_sql", "sql_questions"),
    "tracking.md yaml 1": Plays(*DEMO, over="demo"),
    "vllm.md yaml 1": Plays(*DEMO, over="demo"),
}

MOVED = {"data.md": ("my_rewards.py", "reward"), "quickstart.md": ("my_world.py", "Larger")}
"""Page -> a file that its text has the reader write, and what of the page's first Python is put there."""
INLINE = re.compile(r"`(treadle\.train\((\w+),\s+tasks,\s+\.\.\.\))")
CALLED = re.compile(r"\btreadle\.(?:train|resume|evaluate)\(")


def players(page: Path) -> dict[str, Block]:
    """What names players on a page, in order: each YAML, and each Python that trains or evaluates.

    A call in the text, `treadle.train(solve, tasks, ...)`, is made a program around it.
    """
    blocks, named, counts = code(page), dict[str, Block](), Counter[str]()
    for block in blocks:
        if block.language == "yaml" or (block.language == "python" and CALLED.search(block.text)):
            counts[block.language] += 1
            named[f"{page.name} {block.file or f'{block.language} {counts[block.language]}'}"] = block
    for call, name in INLINE.findall(page.read_text("utf-8")):
        file = next(b.file for b in blocks if b.file and re.search(rf"^(?:class|async def|def) {name}\b", b.text, re.M))
        lines = ["import treadle", f"from {Path(file).stem} import {name}"]
        lines.append(f"treadle.train({name}, [{{'prompt': f'{{n}}?'}} for n in range(10)], model='m', run='runs/n')")
        named[f"{page.name} {' '.join(call.split())}"] = Block("", "python", "\n".join(lines))
    return named


ALL = {key: page for page in PAGES for key in players(page)}


class Seen(NamedTuple):
    """What would begin to sample."""

    config: RunConfig
    inputs: Inputs


class Stopped(Exception):
    """In the place of an evaluation."""


def test_the_table_has_all_that_names_players() -> None:
    assert sorted(ALL) == sorted(PLAYS)


@pytest.mark.parametrize("key", PLAYS)
def test_who_plays_is_what_the_page_names(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, wanted = ALL[key], PLAYS[key]
    for library in ("skyrl_gym", "reasoning_gym"):
        if wanted.who.endswith(library):
            pytest.importorskip(library)
    for block in code(page):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    if page.name in MOVED:
        file, name = MOVED[page.name]
        (tmp_path / file).write_text(moved(page, name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("treadle.integrations.verifiers.driver.verifiers_program", lambda python: None)
    monkeypatch.setattr("treadle.integrations.verifiers.driver.call_once", verifiers_rows)
    block = players(page)[key]
    try:
        found = of_recipe(block, wanted.over) if block.language == "yaml" else of_calls(page, block, monkeypatch)
    finally:  # another page has others of these names
        for module in [name for name in sys.modules if (tmp_path / f"{name}.py").exists()]:
            del sys.modules[module]
    assert {whose(*seen, "train") for seen in found if seen.inputs.train} == {(wanted.who, wanted.train)}
    held_out = (wanted.who, wanted.held_out) if wanted.held_out else ("", "")
    assert {whose(*seen, "held_out") for seen in found} == {held_out}


def moved(page: Path, name: str) -> str:
    """The definition in the page's first Python, and what is imported there."""
    text = next(block.text for block in code(page) if block.language == "python")
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.Import) or getattr(n, "name", "") == name]
    return "\n".join(map(ast.unparse, nodes))


def whose(config: RunConfig, inputs: Inputs, split: Split) -> tuple[str, str]:
    """Who plays all tasks of a split, and where these are from."""
    tasks, section = (inputs.train, config.data.train) if split == "train" else (inputs.held_out, config.data.held_out)
    if section is None or not tasks:
        return "", ""
    [(kind, name)] = {task.player for task in tasks}
    kind = "reward" if name == config.reward else kind
    sources = [source.source for source in sources_of(section)]
    return f"{kind} {name}", f"{len(tasks)} tasks" if sources == [IN_MEMORY] else " and ".join(sources)


def of_recipe(block: Block, over: str) -> list[Seen]:
    path = Path(block.file or "part.yaml")
    path.write_text(f"extends: {over}\n{block.text}" if over else block.text, encoding="utf-8")
    config = load_recipe(str(path), ["callbacks=[]"])  # trackers would begin to write
    supply(config, block.text)
    config = config.model_copy(update={"models": {}})  # they play nothing, and need their files
    return [Seen(config, load_data(config))]


def of_calls(page: Path, block: Block, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Run the page's calls up to this one, each as far as its model would be loaded."""
    found: list[Seen] = []

    def run(config: RunConfig, loaded: Inputs, *_: Any, **__: Any) -> dict[str, Any]:
        found.append(Seen(config, loaded))
        return defaultdict(float)

    def evaluate(subject: Subject, loaded: Inputs, *_: Any) -> NoReturn:
        found.append(Seen(subject.config, loaded))
        raise Stopped

    checkpoint = SimpleNamespace(directory=Path("checkpoints/step-000010"))
    monkeypatch.setattr(address, "find_checkpoint", lambda run, name: checkpoint)
    for where in ("public", "evaluate"):
        monkeypatch.setattr(f"treadle.api.{where}.check_subject", lambda subject: None)
    for place in (api, inputs):
        monkeypatch.setattr(place, "check_config", supply)  # which wants the model
    monkeypatch.setattr(api, "train_run", run)
    monkeypatch.setattr(api, "evaluate_model", evaluate)
    if page.name == "runs.md":  # goes on with what it trained before
        RunDirectory.create(Path("runs/sums"), load_recipe("sums.yaml")).close()
    space: dict[str, Any] = {}
    for each in players(page).values():
        if each.language == "python":
            found.clear()
            with suppress(Stopped):
                exec(each.text, space)
        if each.text == block.text:
            return found
    raise AssertionError(block)


async def verifiers_rows(program: object, worker: object, order: dict[str, Any]) -> dict[str, Any]:
    rows = [{"row": n, "prompt": [user(f"{n}?")], "answer": "7", "digest": ""} for n in range(3)]
    return {"rows": rows}


def supply(config: RunConfig, text: str = "") -> None:
    """Write the files that the sources name, with rows as the comment behind one shows them."""
    shown = re.findall(r"source: [^}]*}.*# (\{.*\})$", text, re.MULTILINE)
    row = json.loads(shown[0]) if shown else None
    for section in (config.data.train, config.data.held_out):
        for source in () if section is None else sources_of(section):
            supply_source(source, config.data.columns if source.columns is None else source.columns, row)


def supply_source(source: SourceConfig, columns: dict[Any, Any] | None, row: dict[str, Any] | None) -> None:
    file = Path(source.options.get("file", source.source))
    rows = [row or row_with(columns or {}, f"{file.stem} {n}") for n in range(10)]
    match source.source:
        case "gsm8k_questions":
            rows = [{"question": f"{file.stem} {n}?", "answer": "It is 7. #### 7"} for n in range(3)]
        case "skyrl_sql":
            spec = {"ground_truth": "SELECT 1"}
            rows = [{"prompt": [user("?")], "db_id": "city", "data": "spider", "reward_spec": spec}]
        case "sql_questions":
            rows = [{"db_id": "city", "question": "?", "query": "SELECT 1"}]
        case "harbor_tasks":
            shipped, path = Path(str(files("treadle.recipes"))) / "harbor_tasks", Path(source.options["path"])
            shutil.copytree(shipped / ("squares" if "dev" in path.name else "greeting"), path / path.name)
    for folder in map(Path, filter(None, [source.options.get("databases")])):
        for place in (folder / "city", folder / "spider" / "database" / "city"):
            place.mkdir(parents=True, exist_ok=True)
            sqlite3.connect(place / "city.sqlite").close()
    if file.suffix in (".jsonl", ".json", ".parquet"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            lines = "\n".join(map(json.dumps, rows))
            file.write_text(lines if file.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")


def row_with(columns: dict[Any, Any], text: str) -> dict[str, Any]:
    """Return a row that has the parts of a task in these columns: `{"question": "gsm8k 3", "answer": "7"}`."""
    row: dict[str, Any] = {}
    values = {"prompt": text, "ground_truth": "7", "task_id": text}
    places = {columns.get(part, part): value for part, value in values.items()}
    extras = columns.get("extras", {})
    places |= dict.fromkeys(extras.values() if isinstance(extras, dict) else [f"{extras}.level"], "1")
    for path, value in places.items():
        *sections, leaf = path.split(".")
        reduce(lambda node, key: node.setdefault(key, {}), sections, row)[leaf] = value
    return row
