"""What the documentation tells a user to do is done here, and its figures are the measured ones."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from scripts import settings as settings_page
from tests.cli.worlds import treadle as command
from tests.worlds import END, plain_ids, play, user
from treadle.algorithms.advantages import returns
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, DistillationConfig, KlConfig
from treadle.algorithms.kl import ESTIMATORS
from treadle.algorithms.losses import Tokens
from treadle.algorithms.losses import by_name as policy_loss
from treadle.core.config import Config, build, paths
from treadle.core.errors import Cause
from treadle.core.metrics import Level
from treadle.core.outcomes import as_played
from treadle.core.registry import names
from treadle.loop.failures import FailuresConfig
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.plan.config import RunConfig, load_recipe, recipe_names
from treadle.plan.device import settled
from treadle.plan.memory import estimate_memory
from treadle.report.metrics import DECLARED
from treadle.testing import FakeEngine

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], directory: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TREADLE_CACHE": str(directory / "cache")}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quickstart_runs_as_it_stands_and_learns(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    first, look, *_ = blocks(page, "bash")
    example = blocks(page, "python")[0]
    code = [line for line in example.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(code) < 20  # "in under 20 lines"
    run(["bash", "-ec", first], tmp_path)
    before, after = run([sys.executable, "-c", example], tmp_path).splitlines()[-1].split(" -> ")
    assert float(after) > float(before) + 0.3
    assert "trained" in run(["bash", "-ec", look], tmp_path)


def test_the_quickstart_recipes_are_valid(tmp_path: Path) -> None:
    first, second = blocks(ROOT / "docs" / "quickstart.md", "yaml")
    (tmp_path / "larger.yaml").write_text(first)
    (tmp_path / "larger-dr.yaml").write_text(second)
    config = load_recipe(str(tmp_path / "larger-dr.yaml"))
    assert config.training.group_size == 16 and config != load_recipe(str(tmp_path / "larger.yaml"))
    [row] = blocks(ROOT / "docs" / "quickstart.md", "json")
    assert set(json.loads(row)) == {"task_id", "prompt", "ground_truth"}


def test_the_recipe_with_a_teacher_is_valid(tmp_path: Path) -> None:
    [text, *_] = blocks(ROOT / "docs" / "teachers.md", "yaml")
    (tmp_path / "taught.yaml").write_text(text)
    config, shipped = load_recipe(str(tmp_path / "taught.yaml")), load_recipe("distill-small")
    assert config.algorithm.distillation == shipped.algorithm.distillation


def test_the_page_on_algorithms_has_every_name_and_option_and_its_loss_trains() -> None:
    page = ROOT / "docs" / "algorithms.md"
    named = set(re.findall(r"`(?:algorithm\.)?([\w+]+)", page.read_text(encoding="utf-8")))
    losses = [policy_loss(name).options_type for name in names("policy_losses")]
    sections: list[type[Config]] = [AlgorithmConfig, *losses, CorrectionConfig, KlConfig, DistillationConfig]
    options = {name for section in sections for name in section.model_fields}
    assert {*names("advantages"), *names("policy_losses"), *ESTIMATORS, *options} - {"scope"} <= named
    assert set(get_args(AlgorithmConfig.model_fields["reduction"].annotation)) <= named
    found: dict[str, Any] = {}
    exec(blocks(page, "python")[0], found)
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones = torch.ones(2)
    tokens = Tokens(logp.detach(), logp.detach(), ones, ones > 0, ones.long(), ones.long())
    found["SQUARED"].per_token(logp, tokens, found["SquaredConfig"](strength=0.5)).sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [-1.0, -1.0]


QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}
"""Qwen2.5's hidden and intermediate size, layers, heads, key-value heads, and whether its embeddings are tied."""


@pytest.mark.slow
def test_the_page_on_one_gpu_counts_as_a_dry_run_does(tmp_path: Path) -> None:
    page = ROOT / "docs" / "one-gpu.md"
    [text] = blocks(page, "yaml")
    (tmp_path / "card.yaml").write_text(text)
    for size, (hidden, intermediate, layers, heads, key_heads, tied) in QWEN.items():
        build = {"model_type": "qwen2", "vocab_size": 152_064 if size == "7B" else 151_936, "hidden_size": hidden}
        build |= {"intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads}
        build |= {"num_key_value_heads": key_heads, "tie_word_embeddings": tied}
        model = ModelConfig(build=build, tokenizer="demo")
        sums, parts = list[str](), list[dict[str, float]]()
        for lora in ((), ("training.lora.rank=16",)):
            config = settled(load_recipe(str(tmp_path / "card.yaml"), ["device=cuda", *lora]))
            shapes = make_model(model, 0, 0, weights=False, lora=config.training.lora)
            found = [part for part in estimate_memory(config, shapes, None) if part.on_gpu]
            sums.append(f"{sum(part.bytes for part in found) / 1e9:.1f}")
            parts.append({part.name: part.bytes / 1e9 for part in found})
        lines = page.read_text(encoding="utf-8").splitlines()
        assert f"| Qwen2.5-{size} | {' | '.join(sums)} |" in lines, sums
        if size == "1.5B":
            for name in parts[0]:
                cells = f"| {parts[0][name]:.1f} | {parts[1][name]:.1f} |"
                assert any(name in line and line.endswith(cells) for line in lines), (name, cells)


def table(rows: Iterable[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


LONG = ROOT / "docs" / "long-episodes.md"


@settings(max_examples=20)
@given(said=st.lists(st.sampled_from("abcdx"), min_size=1, max_size=12), limit=st.integers(1, 12))
def test_scores_of_states_leave_the_reward_as_it_is_and_are_a_baseline(said: list[str], limit: int) -> None:
    found: dict[str, Any] = {}
    exec(next(block for block in blocks(LONG, "python") if "class Facts" in block), found)
    task = treadle.Task("t", environment="world", prompt=[user("Go.")], ground_truth=["a", "b", "c", "d"])
    replies = iter([*said, *"x" * 12])
    engine = FakeEngine(lambda prompt, sampling: [*plain_ids(next(replies)), END])
    [trajectory] = play(found["Facts"], engine, task, max_steps=limit, max_input_tokens=10_000)
    known = [len(set(said[:n]) - {"x"}) / 4 for n in range(len(trajectory.steps) + 1)]
    components = as_played(trajectory).components
    assert trajectory.reward == components["answer"] == float(known[-1] == 1)
    assert components["progress"] == 0
    togo = returns(np.array([step.reward for step in trajectory.steps]), np.zeros(len(trajectory.steps), np.int64), 1.0)
    assert togo.tolist() == [trajectory.reward - value for value in known[:-1]]
    found = {"treadle": treadle, "judge": lambda task, trajectory: known[1:]}
    exec(next(block for block in blocks(LONG, "python") if "def progress" in block), found)
    assert found["progress"](task, trajectory) == [step.given.components["progress"] for step in trajectory.steps]


def test_the_page_on_metrics_lists_every_metric_as_declared() -> None:
    levels = get_args(Level)
    cells: list[tuple[str, ...]] = [("metric", "view", "level", "aggregation", "unit", "meaning"), ("---",) * 6]
    for m in sorted(DECLARED, key=lambda metric: levels.index(metric.level)):
        cells.append((f"`{m.name}`", m.view, m.level, m.aggregation, m.unit, m.help))
    assert table(cells) in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), (
        f"the table must be:\n{table(cells)}"
    )


def simulated_table(rows: list[dict[str, Any]]) -> str:
    head = "`max_staleness` | `stale_policy` | trajectories/s | times sync | of the bound | engine idle | learner idle"
    names = (*head.split(" | "), "staleness, mean / max", "steps dropped", "s trained / dropped")
    cells: list[tuple[str, ...]] = [names, ("---",) * len(names)]
    for row in rows:
        rates = (f"{row['trajectories/s']:.2f}", f"{row['times sync']:.1f}")
        shares = [f"{row[name]:.0%}" for name in ("of bound", "engine idle", "learner idle")]
        staleness = f"{row['staleness mean']:.1f} / {row['staleness max']}"
        dropped = row["s dropped"] if row["s dropped"] == "-" else f"{row['s dropped']:.0f}"
        counts = (staleness, f"{row['dropped']:.1%}", f"{row['s trained']:.0f} / {dropped}")
        cells.append((row["max_staleness"], row["stale_policy"], *rates, *shares, *counts))
    return table(cells)


def test_the_example_of_failure_policies_is_valid() -> None:
    [text] = blocks(ROOT / "docs" / "async.md", "yaml")
    failures = build(FailuresConfig, yaml.safe_load(text)["failures"])
    assert (failures.causes[Cause.ENGINE].retries, failures.causes[Cause.VERIFIER].grade) == (3, 0.0)


def test_the_page_on_asynchronous_training_has_the_measured_table() -> None:
    """And the measurement has what the page is about."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "asynchronous.json").read_text())["tables"][0]["rows"]
    page = (ROOT / "docs" / "async.md").read_text(encoding="utf-8")
    usual = [row for row in rows if row["stale_policy"] == "mask_steps"]
    text = simulated_table([rows[0], *usual])
    assert text in page, f"the table must be:\n{text}"
    assert any(row["times sync"] >= 2 and row["of bound"] >= 0.9 for row in usual)
    assert all(row["staleness max"] <= row["max_staleness"] for row in rows)


def test_the_page_on_scale_has_the_simulated_table_of_the_kv_budget() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "kv.json").read_text())["tables"][0]["rows"]
    lines = "".join(
        f"| {row['admission']} | {row['sampled tokens/s']:.0f} | {row['prompt tokens computed'] / 1e6:.1f} M | "
        f"{row['of these again']:.0%} | {row['cache use']:.0%} |\n"
        for row in rows
    )
    assert lines in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), f"the table must be:\n{lines}"


def test_the_page_on_scale_has_the_figures_of_a_run_on_paper() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    paper = json.loads((ROOT / "benchmarks" / "results" / "scale_on_paper.json").read_text(encoding="utf-8"))
    spent = paper["of a trajectory"]
    assert f"{spent['rollout']:.2f} GPU seconds of rollout and {spent['training']:.2f} of training" in page
    for row in paper["rows"]:
        sync, free = row["synchronous"], row["asynchronous"]
        line = (
            f"| {row['gpus']:,} ({row['learner']:,} + {row['engines']:,}) | {row['batch']:,} "
            f"| {row['update_seconds']:.1f} + {row['publication_seconds']:.0f} | {row['open_episodes']:,.0f} "
            f"| {sync['trajectories/s']:.1f}, {free['trajectories/s']:.1f} "
            f"| {sync['engine idle']:.0%}, {free['engine idle']:.0%} | {free['staleness mean']:.0f} "
            f"| {free['dropped']:.0%} | {row['driver_cores']:.2f} | {row['environments']:,.0f} |"
        )
        assert line in page


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(leads_to), f"{page.name} links to {target}#{anchor}"


def test_the_site_lists_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"'([\w-]+\.md)'", str(nav))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_twenty_settings_are_keys_with_these_defaults() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").partition("## Every key")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (\S+) \|", text, re.MULTILINE)
    assert len(rows) == 20
    for key, default in rows:
        *sections, leaf = key.split(".")
        config: Any = RunConfig
        for name in sections:
            config = config.model_fields[name].annotation
        value = config.model_fields[leaf].get_default(call_default_factory=True)
        assert (default if isinstance(value, str) else json.loads(default)) == value, key


def test_the_page_of_settings_has_every_key_that_show_prints() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page.written(page), "python scripts/settings.py"
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `?([^`|]*)", page, re.MULTILINE))
    headings = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    for recipe in recipe_names():
        lines = command("recipes", "show", recipe).out.splitlines()[:-2]
        for path in (line[2:].split(" ")[0] for line in lines if line):
            is_option = rows.get(path.rpartition(".")[0]) in ("{}", "null")  # which has a name of its own
            assert path in rows or path in headings or is_option, path


def test_the_page_of_the_api_has_every_public_name_and_registry() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(treadle\.[\w.]+)` \| [^`]", text, re.MULTILINE)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    assert {name for name in named if name.count(".") == 1} == {f"treadle.{n}" for n in treadle.__all__ if n[0] != "_"}
    groups = re.findall(r'^\[project.entry-points."(.*)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert [group for group in groups if f"| `{group}` | `" not in text] == []


def test_the_readmes_first_command_comes_early_and_its_table_is_the_measured_one() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(i for i, line in enumerate(lines, 1) if line.startswith("make demo")) <= 25
    result = json.loads((ROOT / "benchmarks" / "results" / "demo_seeds.json").read_text())
    rows = result["runs"]
    assert (result["variants"], [row["seed"] for row in rows]) == ({"default": []}, [0, 1, 2, 3, 4])
    assert {row["updates"] for row in rows} == {load_recipe("demo").orchestration.updates}
    assert min(row["held_out_tasks"] for row in rows) >= 512
    mean = sum(row["after"] for row in rows) / len(rows)
    assert max(row["before"] for row in rows) <= 0.35 and min(row["after"] for row in rows) >= 0.85 and mean >= 0.93
    text = "\n".join(lines)
    for row in rows:
        assert f"| {row['seed']} | {row['before']:.3f} | {row['after']:.3f} |" in text
    assert f"**{mean:.3f}**" in text


def test_contributing_names_files_and_functions_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|tests)/[\w/]+\.py):([\w.]+)`", page)
    assert len(named) > 15
    for file, name in named:
        found: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
        for part in name.split("."):
            inside = [node for node in found if part in _defined(node)]
            assert inside, f"{file} has no {name}"
            found = getattr(inside[0], "body", [])


def _defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def test_the_names_on_the_page_for_users_of_trl_exist() -> None:
    page = (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", page.partition("## Arguments")[2], re.MULTILINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TRL imports
        trl: Any = importlib.import_module("trl")
        theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    theirs |= inspect.signature(trl.GRPOTrainer).parameters.keys()
    named = [name for left, _ in rows for part in re.findall(r"`([^`]+)`", left) for name in [part.partition(":")[0]]]
    assert len(named) > 30
    assert set(named) - {"GRPOConfig"} <= theirs
    for block in blocks(ROOT / "docs" / "from-trl.md", "python"):
        assert len([line for line in block.splitlines() if line.strip() and not line.startswith("#")]) <= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_fields_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(
        r"^\| [^|]* \|", "|", page.read_text(encoding="utf-8"), flags=re.MULTILINE
    )  # others' names come first
    for key in re.findall(rf"`((?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_]+)+)[`:=]", text):
        assert key.endswith(FILES) or is_key(key), f"{page.name} names {key}, which is no key of a recipe"
    for record, field in re.findall(r"`(Step|Trajectory|Group|EnvStep)\.(\w+)", text):
        assert field in getattr(treadle, record).__annotations__, (
            f"{page.name} names {record}.{field}, which is no field"
        )
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        tests = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert name in {getattr(node, "name", "") for node in tests}, f"{page.name} names {file}::{name}"


FILES = (".json", ".log", ".py", ".safetensors", ".yaml")


def is_key(path: str) -> bool:
    """Whether a recipe may set it: a key of the configuration, or one inside of a free mapping."""
    known = set(paths(RunConfig))
    while path not in known and "." in path:
        path = path.rpartition(".")[0]
        if path in known:  # a leaf, or another section's keys are meant
            return not any(key.startswith(f"{path}.") for key in known)
    return path in known


SKYRL = ROOT / "docs" / "from-skyrl.md"


def cells(section: str) -> list[list[str]]:
    """The rows of the tables under a heading of the page for users of SkyRL, without those that begin a table."""
    text = SKYRL.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows][1:]


def test_metrics_on_the_page_for_users_of_skyrl_exist() -> None:
    declared = {metric.name for metric in DECLARED} | {"env/NAME"}
    named = [name for row in cells("Metrics") for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(named) > 25 and set(named) <= declared


def test_settings_on_the_page_for_users_of_skyrl_are_those_of_the_recipes() -> None:
    recipes = [load_recipe(name).model_dump(mode="json") for name in ("search-r1", "skyrl-sql", "gsm8k")]
    compared = 0
    for key, *values in cells("The published scripts"):
        for recipe, cell in zip(recipes, values, strict=True):
            found: Any = recipe
            for part in key.strip("`").split("."):
                found = None if found is None else found.get(part)
            assert (found or None) == (None if cell.startswith("none") else yaml.safe_load(cell.strip("`")) or None), (
                key
            )
            compared += 1
    assert compared == 3 * 16


def test_the_environments_on_the_page_for_users_of_skyrl_do_the_same() -> None:
    theirs, ours = blocks(SKYRL, "python")

    class BaseTextEnv:
        def __init__(self) -> None:
            self.turns, self.max_turns = 0, 1

    skyrl: dict[str, Any] = {"BaseTextEnv": BaseTextEnv, "BaseTextEnvStepOutput": dict}
    exec(theirs, skyrl)
    here: dict[str, Any] = {"treadle": treadle}
    exec(ours, here)
    task = treadle.Task("t", ({"role": "user", "content": "A number?"},), "guess", "7")
    for replies in (["7"], ["1", " 7 "], ["1", "2"]):
        environment = here["Guess"](max_turns=2)
        asyncio.run(environment.reset(task))
        published = skyrl["Guess"](None, {"reward_spec": {"ground_truth": "7"}, "max_turns": 2})
        outputs = [published.step(reply) for reply in replies]
        played = [
            [environment.step(reply)[:3] for reply in replies],
            [(output["observations"], output["reward"], output["done"]) for output in outputs],
        ]
        assert played[0] == played[1]
        assert played[0][-1][2]
