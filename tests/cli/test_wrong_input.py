"""What a new user gets wrong: one error that names the value and the remedy, before torch is loaded.

All commands of the table run in one process, which reports whether any of them loaded torch.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import broken
from tests.cli.conftest import make_place
from tests.cli.worlds import ROOT

pytestmark = pytest.mark.xdist_group("cli_wrong_input")  # what its tests share is made once

RUN_ALL = """
import contextlib, io, json, sys
from treadle.cli.main import main
results = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as leaving:
            status = leaving.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    results.append([status, err.getvalue(), heavy])
print(json.dumps(results))
"""

# Words of the command -> what the error says: the value, and what to do about it. Status 2, but for what is of a run.
TRAIN: dict[str, tuple[str, ...]] = {
    # overrides
    "training.optimizer.lr=1": (
        "unknown key 'training.optimizer.lr'; did you mean 'training.optimizer.learning_rate'",
    ),
    "training.num_generations=4": ("did you mean 'training.group_size'?",),
    "algorithm.policy_loss=ppo": ("algorithm.policy_loss: 'ppo' is not registered; did you mean 'ppo_clip'?",),
    "algorithm.loss=typo": ("algorithm.loss=typo: unknown key", "did you mean 'algorithm.policy_loss'?"),
    "updates=5": ("updates=5: unknown key 'updates'", "exists as 'orchestration.updates'"),
    "training.group_size=four": ("training.group_size=four: got 'four', expected a valid integer",),
    "training.group_size": ("override 'training.group_size' must look like key.path=value",),
    "training.packing=tre": ("training.packing=tre: got 'tre', expected 'step', 'chain' or 'tree'",),
    "seed=1 training.updates_per_batch=3": ("training.updates_per_batch=3: orchestration.updates is 4", "try 6"),
    "seed={1: 2}": ("override 'seed={1: 2}': key 1 is not a string",),
    "--updates 5": ("unrecognized arguments: --updates 5 (settings are written key.path=value",),
    # names
    "algorithm.policy_loss=typo": ("algorithm.policy_loss: 'typo' is not registered", "ppo_clip", "'module:attribute'"),
    "algorithm.policy_loss=os:path": ("algorithm.policy_loss: 'os:path' is of type module; make it a `PolicyLoss`",),
    "algorithm.advantage=grppo": ("algorithm.advantage: 'grppo' is not registered; did you mean 'grpo'?",),
    "algorithm.advantage=os:path": ("algorithm.advantage: 'os:path' is of type module; make it an `Advantage`",),
    "callbacks=[typo]": ("callbacks: 'typo' is not registered", "tensorboard"),
    "callbacks=[trackio]": ("callbacks: 'trackio' is not installed; pip install 'treadle[trackio]'",),
    "callbacks=[{name: os:path}]": ("callbacks: 'os:path'", "is not a callable object"),
    "rewards.shaping=typo": ("rewards.shaping: 'typo' is not registered; nothing is; write 'module:attribute'",),
    "rollout.reply_parser=herms": ("rollout.reply_parser: 'herms' is not registered; did you mean 'hermes'?",),
    "rollout.reply_parser=os:path": ("rollout.reply_parser: 'os:path' is of type module, it must be a function",),
    "environment=nope data.train.source=train.jsonl data.train.options={}": ("environments: 'nope' is not registered",),
    "warm_start.demonstrations=sums": ("warm_start.demonstrations: 'sums' is not registered", "arithmetic"),
    # combinations
    "training.group_size=1": ("training.group_size is 1", "raise it to 2 or more"),
    "algorithm.policy_loss_options.scope=step": (
        "algorithm.policy_loss_options: unknown key 'scope'; known here: eps_low",
    ),
    "rollout.max_input_tokens=600": ("600 + max_completion_tokens 8 = 608", "context of 128; lower one of them"),
    "engine.kind=vllm engine.options.python=/nowhere": ("'/nowhere' is not an interpreter; set engine.options.python",),
    # models
    "model.path=/nowhere": ("model.path=/nowhere: model: give exactly one of model.path and model.build",),
    "model.build=null model.path=/nowhere": ("model.path: no directory '/nowhere'; give the directory of",),
    "model.build=null model.path=. model.tokenizer=null": ("model.path: no config.json in '.'; give the directory",),
    "model.build=null model.path=RUN": ("model.path: 'RUN' is a run; take one of its checkpoints",),
    "model.build=null model.path=~/m": ("model.path: no directory '~/m'; ~ is not expanded here",),
    "model.build=null model.path=smolm2": ("model.path: no directory 'smolm2'", "ORG/NAME or one of smollm2"),
    "model.build=null model.path=smollm2": ("model.path: 'smollm2' is not in the cache yet; run: treadle models get",),
    "model.build=null model.path=here.gguf": ("model.path: 'here.gguf' is not in the cache yet; run: treadle models",),
    "model.build=null model.path=away.gguf": ("model.path: no file 'away.gguf'; give the directory of",),
    "model.build=null model.path=far/away.gguf": ("model.path: no file 'far/away.gguf'",),
    "model.tokenizer=smollm2": ("model.tokenizer: 'smollm2' is not in the cache yet; run: treadle models get smollm2",),
    "model.tokenizer=qwen": ("model.tokenizer: no tokenizer.json in 'qwen'; give a directory that has one, or 'demo'",),
    "model.build=null model.path=model model.tokenizer=null": ("model.path: no tokenizer.json", "set model.tokenizer"),
    "model.chat_template=/nowhere.jinja": ("model.chat_template: no file '/nowhere.jinja'",),
    "algorithm.kl={coef: 0.1, model: /nowhere}": ("algorithm.kl.model: no directory '/nowhere'",),
    # data
    "data.train.source=no.jsonl": ("data.train.source: cannot read no.jsonl: No such file", "relative to"),
    "data.held_out.source=no.jsonl": ("data.held_out.source: cannot read no.jsonl: No such file",),
    "data.train.source=train.jsonl": ("takes no options, got count; remove them (data.train.options={})",),
    "data.train.source=train.json": ("data.train.source: 'train.json' is not a .jsonl", "convert it to one"),
    "data.train.source=broken.jsonl data.train.options={}": ("broken.jsonl:1: not JSON",),
    "data.train.source=text.jsonl data.train.options={}": (
        'text.jsonl:1: prompt must be text or a JSON array of messages, got 3; write [{"role"',
    ),
    "data.train.source=arithmetics": (
        "data.train.source: 'arithmetics' is not registered; did you mean 'arithmetic'?",
    ),
    "data.train.options={cuont: 3}": (
        "data.train.options of 'arithmetic'",
        "its options are count, seed",
    ),
    "warm_start.demonstrations=no.jsonl": ("warm_start.demonstrations: no file 'no.jsonl'",),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "train demmo": ("no recipe 'demmo'; did you mean 'demo'?",),
    "train RUN": ("'RUN' is a run, not a recipe: continue it with --resume, or give its recipe, RUN/config.yaml",),
    "train mine.yaml": ("no file 'mine.yaml' (it is relative to",),
    "train broken.yaml": ("broken.yaml:1: ",),
    "train list.yaml": ("list.yaml: expected a mapping of keys to values, found a list",),
    "train": ("the following arguments are required: RECIPE\n",),
    "sft tiny.yaml --out model": ("--out 'model' exists already; choose another directory",),
    "sft tiny.yaml --out new warm_start=null": ("has no warm_start section", "add one"),
    "sft tiny.yaml --out new model.tokenizer=qwen": ("model.tokenizer: no tokenizer.json in 'qwen'",),
    "eval demo": ("'demo' is a recipe: add --model DIR",),
    "eval tiny.yaml --model /nowhere": ("--model: no directory '/nowhere'",),
    "eval tiny.yaml --model model --checkpoint best": ("give --checkpoint or --model, not both",),
    "eval tiny.yaml --model model model.tokenizer=null model.path=x": ("is chosen with --checkpoint or --model",),
    "eval tiny.yaml --model model data.held_out=null": ("has no held-out tasks; add data.held_out.source=",),
    "eval tiny.yaml --model model data.held_out.source=no.jsonl": ("data.held_out.source: cannot read no.jsonl",),
    "eval tiny.yaml --model model rollout.reply_parser=typo": ("rollout.reply_parser: 'typo' is not registered",),
    "eval tiny.yaml --model model --dump no/where": ("--dump: cannot write 'no/where': No such file or directory",),
    "export RUN model": ("'model' exists already; choose another directory",),
    "serve /nowhere": ("MODEL_DIR: no directory '/nowhere'; give the directory of a Hugging Face causal LM",),
    "serve RUN": ("MODEL_DIR: 'RUN' is a run; take one of its checkpoints",),
    "serve model": ("MODEL_DIR: no tokenizer.json in 'model'",),
    "serve served --port 65536": ("--port 65536: ports are 0 to 65535",),
    "serve served --port BUSY": ("--port BUSY is in use; choose another, or --port 0 for any free one",),
    "serve served --advertised-url box:80": ("treadle serve: advertised_url: 'box:80' is not a base URL;",),
    "train tiny.yaml rollout.gateway.port=BUSY": ("rollout.gateway.port=BUSY is in use; choose another, or",),
    "serve served --host 203.0.113.1": ("--host 203.0.113.1: cannot listen there: ",),
    "serve served --temperature -1": ("--temperature -1.0: must be",),
    "serve served --max-tokens 0": ("--max-tokens 0: must be at least 1",),
    "serve served --parser typo": ("--parser: 'typo' is not registered; registered: glm",),
    "serve served --chat-template no.jinja": ("--chat-template: no file 'no.jinja'",),
    "serve served --record train.jsonl": ("--record train.jsonl: not a directory",),
    "serve served kind=vllm": ("kind=vllm: unknown key 'kind'", "exists as 'engine.kind'"),
    "serve served engine.batch=0": ("engine.batch=0: got 0, expected greater than or equal to 1",),
    "serve served rollout.max_steps=3": ("rollout.max_steps=3: unknown key 'rollout'", "known here: engine"),
    "serve smollm2": ("MODEL_DIR: 'smollm2' is not in the cache yet; run: treadle models get smollm2",),
    "models get smolm2": ("unknown model 'smolm2'; there are smollm2, ORG/NAME of the hub, GGUF files",),
    "models get away.gguf": ("no file 'away.gguf'",),
    "recipes show demmo": ("no recipe 'demmo'; did you mean 'demo'?",),
    "recipes show demo sed=1": ("sed=1: unknown key 'sed'; did you mean 'seed'?",),
}
OF_RUNS: dict[str, tuple[str, ...]] = {
    "train tiny.yaml --runs . --name RUN": ("already in use; continue it with --resume or choose another --name",),
    "train tiny.yaml --resume": ("no unfinished run of 'tiny' under 'runs' to resume; start one without --resume",),
    "train tiny.yaml --runs . --resume --name no": ("'no' is not a run directory: it has no config.yaml",),
    "train tiny.yaml --runs . --resume --name RUN": ("run 'RUN' has no checkpoint yet",),
    "eval /nowhere": ("'/nowhere' is not a run directory: it has no config.yaml",),
    "eval RUN": ("run 'RUN' has no checkpoint yet",),
    "export /nowhere new": ("'/nowhere' is not a run directory: it has no config.yaml",),
    "report /nowhere": ("'/nowhere' is not a run directory: it has no config.yaml",),
    "show /nowhere g000000.0": ("'/nowhere' is not a run directory: it has no config.yaml",),
    "show RUN g9.9": ("no trajectory 'g9.9' in RUN; it has for example g000000.1",),
}
OFFLINE: dict[str, tuple[str, ...]] = {
    "train tiny.yaml model.build=null model.path=Qwen/Qwen3-0.6B": (
        "model.path: 'Qwen/Qwen3-0.6B' is not in the cache",
        "HF_HUB_OFFLINE is set",
        "run `treadle models get Qwen/Qwen3-0.6B` where it can be reached",
    ),
    "serve Qwen/Qwen3-0.6B": ("MODEL_DIR: 'Qwen/Qwen3-0.6B' is not in the cache",),
    "eval tiny.yaml --model Qwen/Qwen3-0.6B": ("--model: 'Qwen/Qwen3-0.6B' is not in the cache",),
    "models get Qwen/Qwen3-0.6B": ("treadle models get: 'Qwen/Qwen3-0.6B' is not in the cache",),
}
CASES = [
    *((f"train tiny.yaml {words}", 2, said) for words, said in TRAIN.items()),
    *((words, 2, said) for words, said in OTHERS.items()),
    *((words, 1, said) for words, said in {**OF_RUNS, **OFFLINE}.items()),
]


def fill(folder: Path) -> None:
    """A recipe, a recorded run, models without weights, and files that are not what they should be."""
    make_place(folder, folder)
    broken.record(folder / "RUN")
    for name in ("model", "served"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "served" / "tokenizer.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}]}\n')
    (folder / "text.jsonl").write_text('{"prompt": 3}\n')
    (folder / "broken.jsonl").write_text("Hi\n")
    (folder / "train.json").write_text("[]")
    (folder / "broken.yaml").write_text("a: [")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "here.gguf").write_text("GGUF")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Words -> [status, standard error, what heavy libraries were loaded until then]."""
    folder = tmp_path_factory.mktemp("wrong")
    fill(folder)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        commands = [_words(words.replace("BUSY", port)) for words, _, _ in CASES]
        done = subprocess.run(
            [sys.executable, "-c", RUN_ALL],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1", "TREADLE_CACHE": str(folder / "cache")},
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    found = [[status, err.replace(port, "BUSY"), heavy] for status, err, heavy in json.loads(done.stdout)]
    return dict(zip((words for words, _, _ in CASES), found, strict=True))


def _words(line: str) -> list[str]:
    """Split at blanks, but not within braces."""
    words: list[str] = []
    for word in line.split(" "):
        whole = not words or words[-1].count("{") == words[-1].count("}")
        words = [*words, word] if whole else [*words[:-1], f"{words[-1]} {word}"]
    return words


@pytest.mark.parametrize(("words", "status", "said"), CASES, ids=[words for words, _, _ in CASES])
def test_it_is_told_with_its_remedy(words: str, status: int, said: tuple[str, ...], results: dict[str, Any]) -> None:
    got, err, _ = results[words]
    assert [part for part in said if part not in err] == [], err
    assert got == status
    assert "Traceback" not in err
    if not err.startswith("usage: "):
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_torch_was_never_loaded(results: dict[str, Any]) -> None:
    assert [words for words, (_, _, heavy) in results.items() if heavy] == []
