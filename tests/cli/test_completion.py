"""Scripts that complete the command line."""

import subprocess

import pytest

from tests.cli.worlds import treadle
from treadle.plan.config import recipe_names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "smollm2-tools"], {"smollm2-tools", "smollm2-tools-lora"}),
        (["train", "demo", "--dry"], {"--dry-run"}),
        (["train", "demo", "training.lora.r"], {"training.lora.rank=", "training.lora.rank_stabilized="}),
        (["recipes", "sch"], {"schema"}),
        (["recipes", "show", ""], {*recipe_names()}),
        (["completion", "f"], {"fish"}),
    ],
)
def test_bash_completes_commands_options_recipes_and_keys(line: list[str], expected: set[str]) -> None:
    script = treadle("completion", "bash").out
    words = " ".join(f"'{word}'" for word in ["treadle", *line])
    call = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _treadle; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script + call], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert found >= expected
    if line[-1]:
        assert all(word.startswith(line[-1]) for word in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_commands_options_recipes_and_keys(shell: str) -> None:
    script = treadle("completion", shell).out
    for word in ("train", "dry-run", "smollm2-tools", "training.lora.rank="):
        assert word in script
