"""A model's directory is data: code that it brings is never run, and nobody is asked whether it should be."""

import ast
import asyncio
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.cli.conftest import Place
from tests.cli.worlds import treadle as command
from tests.forks import run
from treadle.core.errors import ConfigError
from treadle.core.files import MANIFEST
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import load_engine
from treadle.models.config import ModelConfig
from treadle.training.make import load_model, load_source

SIZES = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
CODE = """
from pathlib import Path
Path({marker!r}).write_text("run")
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config):
    model_type = "own"
class Model(Qwen3ForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast): ...
"""


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "plain"
    source = load_source(ModelConfig(tokenizer="demo", build=SIZES), seed=0)
    asyncio.run(source.export(path))
    (path / MANIFEST).unlink()  # others' models have none
    return path


class Bait:
    """A copy of it whose model, or tokenizer, is to be loaded by running Python."""

    def __init__(self, plain: Path, folder: Path, file: str) -> None:
        self.path, self.marker = folder / "bait", folder / "marker"
        shutil.copytree(plain, self.path)
        (self.path / "own.py").write_text(CODE.format(marker=str(self.marker)))
        if file == "config.json":
            auto_map: Any = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
            edit(self.path / file, model_type="own", auto_map=auto_map)
        else:
            (self.path / "config.json").unlink()  # that of a known model would say which tokenizer it has
            auto_map = {"AutoTokenizer": [None, "own.Tokenizer"]}
            edit(self.path / file, tokenizer_class="Own", auto_map=auto_map)
        self.file = file


@pytest.fixture
def bait(plain: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Bait:
    return Bait(plain, tmp_path, getattr(request, "param", "config.json"))


WAYS = {
    "train": ["train", "RECIPE", "model.build=null", "model.path=BAIT", "model.tokenizer=null", "warm_start=null"],
    "sft": ["sft", "RECIPE", "--out", "OUT", "model.build=null", "model.path=BAIT", "model.tokenizer=null"],
    "eval": ["eval", "RECIPE", "--model", "BAIT"],
    "serve": ["serve", "BAIT"],
    "tokenizer": ["train", "RECIPE", "model.tokenizer=BAIT"],
    "sft tokenizer": ["sft", "RECIPE", "--out", "OUT", "model.tokenizer=BAIT"],
    "reference": ["train", "RECIPE", "warm_start=null", "models.b.path=BAIT", "algorithm.kl={coef: 0.1, model: b}"],
    "teacher": ["train", "RECIPE", "warm_start=null", "models.b.path=BAIT", "algorithm.distillation.teacher=b"],
}


def words(way: str, bait: Bait, place: Place) -> list[str]:
    names = {"RECIPE": str(place.recipe), "BAIT": str(bait.path), "OUT": str(place.path / "out")}
    replaced = [names.get(word, word.replace("BAIT", str(bait.path))) for word in WAYS[way]]
    return [*replaced, *(["--runs", str(place.runs)] if replaced[0] == "train" else [])]


BAITS = [(way, "tokenizer_config.json" if "tokenizer" in way else "config.json") for way in WAYS]


@pytest.mark.parametrize(("way", "bait"), BAITS, indirect=["bait"])
def test_no_command_runs_it_or_asks(way: str, bait: Bait, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    yes = io.StringIO("y\n" * 100)
    monkeypatch.setattr(sys, "stdin", yes)
    done = command(*words(way, bait, place))
    assert not bait.marker.exists() and yes.tell() == 0
    assert done.status == 2
    [line] = done.err.splitlines()
    assert str(bait.path) in line and f"brings its own code (auto_map in {bait.file}), which is never run" in line
    assert ("AutoConfig.register" if bait.file == "config.json" else "remove auto_map") in line


@pytest.mark.slow
def test_yes_is_not_heard(bait: Bait, place: Place) -> None:
    code = f"import sys; from treadle.cli.main import main; sys.exit(main({words('train', bait, place)!r}))"
    done = run([sys.executable, "-c", code], "y\n" * 100)
    assert (done.returncode, done.stdout) == (2, "") and not bait.marker.exists()
    assert "brings its own code" in done.stderr.splitlines()[-1]


def test_what_a_user_pipes_in_answers_nobody(place: Place) -> None:
    code = "import sys; from treadle.cli.main import main; main(['recipes']); print(repr(sys.stdin.read()))"
    done = run([sys.executable, "-c", code], "y\n")
    assert done.stdout.splitlines()[-1] == "''"


def test_an_engine_of_its_own_process_does_not_run_it(bait: Bait, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    with pytest.raises(ConfigError, match="brings its own code"):
        load_engine(bait.path, TorchEngineOptions([]), threads=1, deterministic=True)
    assert not bait.marker.exists()


def test_a_model_that_transformers_has_needs_no_code(plain: Path, tmp_path: Path) -> None:
    """Many bring some that is not needed any more."""
    bait = Bait(plain, tmp_path, "config.json")
    edit(bait.path / "config.json", model_type="qwen3")
    load_model(ModelConfig(path=str(bait.path)), seed=0)
    assert not bait.marker.exists()


def test_everything_that_is_loaded_says_so() -> None:
    """Every call of `from_pretrained` is local, and without foreign code."""
    calls = []
    for file in sorted(Path(treadle.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                calls.append({keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
    assert len(calls) >= 4
    assert all((c.get("trust_remote_code"), c.get("local_files_only")) == ("False", "True") for c in calls), calls
