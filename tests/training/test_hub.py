"""Models by their names on the Hugging Face hub: one on this machine, and none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fake_hub import COMMIT, serving_hub

WANTED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
UNWANTED = ("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "README.md", "consolidated.safetensors")
LOOK_UP = """
import sys
from treadle.models.config import ModelConfig
from treadle.models.model_files import require_model, tokenizer_directory
name, what = sys.argv[1:]
if what == "model":
    print(require_model(name, "model.path"))
else:
    print(tokenizer_directory(ModelConfig(build={"model_type": "llama"}, tokenizer=name)))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@dataclass(frozen=True)
class Place:
    """An empty folder with a cache of its own, and a hub."""

    path: Path
    endpoint: str
    asked: list[str]

    def run(self, *words: str, online: bool = True) -> subprocess.CompletedProcess[str]:
        endpoint = self.endpoint if online else "http://127.0.0.1:1"
        ours = {"HF_HOME": str(self.path / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.path,
            env={**os.environ, **ours},
            capture_output=True,
            text=True,
            check=False,
        )

    def look_up(self, name: str, what: str = "model", online: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-c", LOOK_UP, name, what, online=online)

    def treadle(self, *words: str, online: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "treadle.cli.main", *words, online=online)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    served = tmp_path / "served"
    for name in (*WANTED, *UNWANTED):
        (served / name).parent.mkdir(parents=True, exist_ok=True)
        (served / name).write_text(f"content of {name}")
    with serving_hub("acme/tiny", served) as (endpoint, asked):
        yield Place(tmp_path, endpoint, asked)


def held(directory: str) -> set[str]:
    root = Path(directory.strip())
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_name_of_the_hub_is_downloaded_once_and_nothing_but_what_is_loaded(place: Place) -> None:
    first = place.look_up("acme/tiny")
    assert first.returncode == 0, first.stderr
    assert "Fetching 4 files" in first.stderr  # a download is never silent
    assert held(first.stdout) == set(WANTED)
    assert COMMIT in first.stdout
    place.asked.clear()
    for name in ("acme/tiny", f"acme/tiny@{COMMIT}"):
        again = place.look_up(name, online=False)
        assert (again.stdout, again.stderr) == (first.stdout, "")
    assert place.asked == []


INDEX = """{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"""


@pytest.mark.parametrize(
    ("cached", "what", "sharded"),
    [
        (("config.json", "tokenizer.json"), "model", False),
        (("config.json", "tokenizer.json"), "model", True),
        (("config.json",), "tokenizer", False),
    ],
)
def test_files_that_transformers_left_in_the_cache_are_no_whole_snapshot(
    place: Place, cached: tuple[str, ...], what: str, sharded: bool
) -> None:
    """As `AutoTokenizer` and `AutoConfig` leave them: files of their own, without the rest of the repository."""
    served = place.path / "served"
    if sharded:
        (served / "model.safetensors").unlink()
        (served / "model.safetensors.index.json").write_text(INDEX)
        for number in (1, 2):
            (served / f"model-{number}.safetensors").touch()
        cached = (*cached, "model.safetensors.index.json", "model-1.safetensors")
    in_cache = place.path / "hf" / "hub" / "models--acme--tiny"
    (in_cache / "refs").mkdir(parents=True)
    (in_cache / "refs" / "main").write_text(COMMIT)
    (in_cache / "snapshots" / COMMIT).mkdir(parents=True)
    for name in cached:
        shutil.copy(served / name, in_cache / "snapshots" / COMMIT)
    offline = place.look_up("acme/tiny", what, online=False)
    assert offline.returncode and "'acme/tiny' is only in part in the cache" in offline.stderr
    found = held(place.look_up("acme/tiny", what).stdout)
    weights = {"model-1.safetensors", "model-2.safetensors"} if sharded else {"model.safetensors"}
    assert "tokenizer.json" in found and (what == "tokenizer" or weights <= found)


def test_without_a_network_the_error_names_the_cache_and_the_key(place: Place) -> None:
    words = ("train", "demo", "model.build=null", "model.path=acme/tiny", "model.tokenizer=null", "warm_start=null")
    failed = place.treadle(*words, online=False)
    [line] = failed.stderr.splitlines()
    assert failed.returncode == 1
    assert line.startswith(f"error: model.path: 'acme/tiny' is not in the cache {place.path / 'hf' / 'hub'}")
    assert "treadle models get acme/tiny" in line and "and the hub cannot be reached" in line
    assert place.asked == []


def test_the_command_gets_it_and_a_name_that_the_hub_does_not_have_is_one_line(place: Place) -> None:
    got = place.treadle("models", "get", "acme/tiny")
    assert got.returncode == 0, got.stderr
    assert "train from it: treadle train RECIPE model.path=acme/tiny model.build=null" in got.stdout
    assert held(got.stdout.split("model directory: ")[1].splitlines()[0]) == set(WANTED)
    failed = place.treadle("models", "get", "acme/huge")
    [line] = failed.stderr.splitlines()
    assert failed.returncode == 2
    assert "'acme/huge' is neither a directory nor a model that the hub gives" in line
    assert "HF_TOKEN" in line
