"""The names of published weights and adapters, against the name maps in the installed vLLM's classes."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import python_with_vllm
from tests.towers import TOWERS, is_of_language, tensors, write
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import published

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

# The classes need torchvision to be imported, so that their maps are read from their source.
MAP = """
import ast, json, pathlib, sys
import vllm
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.models.utils import WeightsMapper

FILES = {"qwen3_5": ["qwen3_vl", "qwen3_5"], "qwen3_vl": ["qwen3_vl"], "gemma3": ["gemma3_mm"],
         "gemma4": ["gemma4_mm"], "mistral3": ["mistral3"]}

def read(family):
    mapper = WeightsMapper()
    for name in FILES[family]:
        tree = ast.parse((pathlib.Path(vllm.__file__).parent / f"model_executor/models/{name}.py").read_text())
        [made] = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.endswith("ForConditionalGeneration")
                  and not "Moe" in c.name]
        [value] = [a.value for a in made.body if isinstance(a, ast.Assign) and a.targets[0].id == "hf_to_vllm_mapper"]
        for call in [n for n in ast.walk(value) if isinstance(n, ast.Call)]:
            assert call.func.id == "WeightsMapper"
            mapper |= WeightsMapper(**{k.arg: ast.literal_eval(k.value) for k in call.keywords})
    return mapper

asked = json.load(sys.stdin)
answer = {}
for family, names in asked.items():
    mapper = read(family)
    of_adapter = lambda name: parse_fine_tuned_lora_name(name, mapper)[0]
    answer[family] = {name: (of_adapter if ".lora_" in name else mapper.map_name)(name) for name in names}
json.dump(answer, sys.stdout)
"""


def test_vllm_finds_all_names_in_its_language_model(tmp_path: Path) -> None:
    asked: dict[str, list[str]] = {}
    for family in TOWERS:
        base = write(tmp_path / family, family)
        for lora in (None, LoraConfig(rank=2)):
            model = make_model(ModelConfig(path=str(base)), 0, 0, weights=False, lora=lora)
            asked.setdefault(family, []).extend(name for name, _ in published(model))
        asked[family] += tensors(base).keys()
    done = subprocess.run(
        [python_with_vllm(), "-c", MAP], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for family, mapped in json.loads(done.stdout[done.stdout.index("{") :]).items():
        assert mapped.keys() == set(asked[family])
        for name, theirs in mapped.items():
            inside = theirs.startswith(("language_model.model.", "language_model.lm_head"))
            assert inside == is_of_language(name), (family, name, theirs)
