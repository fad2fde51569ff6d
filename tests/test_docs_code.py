"""Every code block of the documentation runs as it stands, or a comment before it says why not.

    <!-- not run: REASON -->        one of REASONS, before a block

The blocks of a page run in order, in one empty directory. One that opens with a comment `# NAME.EXT` is that file.
Recipes that neither extend one nor name what plays are parts, laid over `demo`. Blocks without a language are output.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.test_docs import PAGES, run
from treadle.orchestration.config import load_recipe

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
        case "yaml":
            recipe = yaml.safe_load(block.text)
            path = directory / (block.file or "part.yaml")
            whole = recipe.keys() & {"extends", "environment", "reward", "driver", "agent"}
            path.write_text(block.text if whole else f"extends: demo\n{block.text}", encoding="utf-8")
            load_recipe(str(path))
        case "json":
            for line in block.text.splitlines() if block.text.startswith("{") else [block.text]:
                json.loads(line)
        case "toml":
            tomllib.loads(block.text)
