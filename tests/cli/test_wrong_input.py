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

from tests.cli.conftest import make_place
from tests.cli.worlds import ROOT, record

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
    "algorithm.policy_loss=ppo": ("algorithm.policy_loss: 'ppo' is not registered; did you mean 'ppo_clip'?",),
    "updates=5": ("updates=5: unknown key 'updates'", "did you mean 'orchestration.updates'?"),
    "training.group_size=four": ("training.group_size=four: got 'four', expected a valid integer",),
    "training.packing=tre": ("training.packing=tre: got 'tre', expected 'step', 'chain' or 'tree'",),
    "seed=1 training.updates_per_batch=3": ("training.updates_per_batch=3: orchestration.updates is 4", "try 6"),
    "--updates 5": ("unrecognized arguments: --updates 5 (settings are written key.path=value",),
    # names
    "algorithm.policy_loss=typo": ("algorithm.policy_loss: 'typo' is not registered", "ppo_clip", "'module:attribute'"),
    "algorithm.advantage=os:path": ("algorithm.advantage: 'os:path' is of type module; make it an `Advantage`",),
    "callbacks=[trackio]": ("callbacks: 'trackio' is not installed; pip install 'treadle[trackio]'",),
    "rollout.reply_parser=herms": ("rollout.reply_parser: 'herms' is not registered; did you mean 'hermes'?",),
    "environment=my_wrldd:Nope": ("environments: 'my_wrldd:Nope': cannot import 'my_wrldd'",),
    "environment=treadle.envs.lookup:Lookup": (
        "environment 'treadle.envs.lookup:Lookup' would play nothing: the tasks of data.train name what plays them, "
        "environment 'arithmetic', which wins",
    ),
    "environment=nope data.train.source=train.jsonl": ("environments: 'nope' is not registered",),
    # combinations
    "training.group_size=1": ("training.group_size is 1", "raise it to 2 or more"),
    "rollout.max_input_tokens=600": ("600 + max_completion_tokens 8 = 608", "set rollout.max_input_tokens=120 and"),
    "engine.kind=vllm engine.options.python=/nowhere": ("'/nowhere' is not an interpreter; set engine.options.python",),
    # models
    "model.build=null model.path=/nowhere": ("model.path: no directory '/nowhere'; give the directory of",),
    "model.build=null model.path=. model.tokenizer=null": ("model.path: no config.json in '.'; give the directory",),
    "model.build=null model.path=~/m": ("model.path: no directory '~/m'; ~ is not expanded here",),
    "model.build=null model.path=smollm2": ("model.path: 'smollm2' is not in the cache yet; run: treadle models get",),
    "model.build=null model.path=away.gguf": ("model.path: no file 'away.gguf'; give the directory of",),
    "model.build=null model.path=model model.tokenizer=null": ("model.path: no tokenizer.json", "set model.tokenizer"),
    "model.chat_template=/nowhere.jinja": ("model.chat_template: no file '/nowhere.jinja'",),
    # data
    "data.train.source=no.jsonl": ("data.train.source: cannot read no.jsonl: No such file", "relative to"),
    "data.train.source=train.jsonl data.train.options.count=3": (
        "takes no options, got count; remove them (data.train.options={})",
    ),
    "data.train.source=train.json": ("data.train.source: 'train.json' is not a .jsonl", "convert it to one"),
    "data.train.source=empty.jsonl": ("empty.jsonl has no tasks",),
    "data.train.source=broken.jsonl": ("broken.jsonl:1: not JSON",),
    "data.train.options={cuont: 3}": ("data.train.options of 'arithmetic'", "its options are count, seed"),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "export-traces RUN traces.csv": ("'traces.csv' does not end in .jsonl; rename it, or choose another --format",),
    "trian demo": ("invalid choice: 'trian'", "did you mean 'train'?"),
    "train demmo": ("no recipe 'demmo'; did you mean 'demo'?",),
    "train RUN": ("'RUN' is a run, not a recipe: continue it with --resume, or give its recipe, RUN/config.yaml",),
    "train tiiny.yaml": ("no file 'tiiny.yaml' (it is relative to", "; did you mean 'tiny.yaml'?"),
    "train mine.yaml": ("no file 'mine.yaml' (it is relative to",),
    "train broken.yaml": ("broken.yaml:1: ",),
    "sft --out new": ("name one recipe to learn, or --from a run",),
    "sft demo tiny.yaml --out new": ("name one recipe to learn, or --from a run (got demo and tiny.yaml)",),
    "sft demo --out new --select reward>1": ("--select chooses among recorded trajectories; add --from",),
    "sft demo --out new --from nowhere": ("'nowhere' is neither a run nor a .jsonl, .parquet, .json file",),
    "sft --out new --from nowhere": ("'nowhere' is neither a run nor a .jsonl, .parquet, .json file",),
    "train tiny.yaml placement.kind=slurm": ("placement.kind: 'slurm' is not registered; registered: embedded, ray",),
    "sft --out new --from RUN --select reward>>1": ("--select: cannot read 'reward>>1'; write",),
    "train": ("the following arguments are required: RECIPE\n",),
    "sft tiny.yaml --out model": ("--out 'model' exists already; choose another directory",),
    "sft tiny.yaml --out new warm_start=null": ("has no warm_start section", "add one"),
    "eval demo": ("'demo' is a recipe: add --model DIR",),
    "eval tiny.yaml --model /nowhere": ("--model: no directory '/nowhere'",),
    "eval tiny.yaml --model model model.tokenizer=null model.path=x": ("the model is the run's; name another",),
    "eval tiny.yaml --model model data.held_out=null": ("has no held-out tasks; add data.held_out.source=",),
    "eval tiny.yaml --model model --dump tiny.yaml/a": ("--dump: cannot write 'tiny.yaml/a': Not a directory; name",),
    "train RUN@40 --resume": ("a run continues from its latest checkpoint; to go back to this one: treadle train RUN",),
    "serve model": ("MODEL: no tokenizer.json in 'model'",),
    "serve servd": ("MODEL: no directory 'servd'; did you mean 'served'? give the directory",),
    "train tiny.yaml model.build=null model.path=./modle": ("no directory './modle'; did you mean 'model'? give",),
    "train tiny.yaml model.build=null model.path=smolm2": ("no directory 'smolm2'; did you mean 'smollm2'? give",),
    "serve served --port 65536": ("--port 65536: ports are 0 to 65535",),
    "serve served --port BUSY": ("--port BUSY is in use; choose another, or --port 0 for any free one",),
    "serve served --advertised-url box:80": ("treadle serve: advertised_url: 'box:80' is not a base URL;",),
    "train tiny.yaml rollout.gateway.port=BUSY": ("rollout.gateway.port=BUSY is in use; choose another, or",),
    "serve served --host 203.0.113.1": ("--host 203.0.113.1: cannot listen there: ",),
    "serve served --temperature -1": ("--temperature -1.0: must be",),
    "serve served --max-tokens 0": ("--max-tokens 0: must be at least 1",),
    "serve served engine.batch=0": ("engine.batch=0: got 0, expected greater than or equal to 1",),
    "sft tiny.yaml --out new warm_start.options={} warm_start.demonstrations=empty.jsonl": ("has no demonstrations",),
    "plot nowhere --output curves.jpg": ("--output 'curves.jpg' must end in one of .png, .pdf, .svg",),
    "plot nowhere --output missing/a.png": ("--output 'missing/a.png': no directory 'missing'; create it first",),
    "data check nope": ("data.train.source: 'nope' is not registered",),
    "data check no.parquet": ("cannot read no.parquet: No such file",),
    "data check demo data.train.options.count=x": ("count must be a whole number",),
    "data check train.jsonl data.train.weight=3": ("train: name and weight are for a list of several sources",),
    "new env my-env": ("'my-env' is not a Python package name",),
    "new env class": ("'class' is not a Python package name",),
    "new env json": ("'json' would hide an installed module",),
    "models get smolm2": ("unknown model 'smolm2'; there are smollm2, ORG/NAME of the hub, GGUF files",),
}
OF_RUNS: dict[str, tuple[str, ...]] = {
    "train tiny.yaml --runs . --name RUN": ("already in use; it has no checkpoint to resume: delete it, or choose",),
    "train tiny.yaml --resume": ("no unfinished run of 'tiny' under 'runs' to resume; start one without --resume",),
    "train tiny.yaml --runs . --resume --name no": ("'no' is not a run directory: there is nothing of that name in",),
    "eval /nowhere": ("'/nowhere' is not a run directory: there is nothing of that name in /",),
    "eval RUM@best": ("'RUM' is not a run directory: there is nothing of that name; did you mean 'RUN'?",),
    "train runs/none --resume": ("'runs/none' is not a run directory: there is nothing of that name in",),
    "serve served --record RUN": (
        "'RUN' is already in use; it has no checkpoint to resume: delete it, or choose another",
    ),
    "show broken.jsonl": ("'broken.jsonl' is a file, not a run directory; treadle sft --from and treadle.load_run",),
    "serve RUN": ("run 'RUN' has no checkpoint yet",),
    "train tiny.yaml model.build=null model.path=RUN": ("run 'RUN' has no checkpoint yet",),
    "eval RUN": ("run 'RUN' has no checkpoint yet",),
    "show RUN g9.9": ("no trajectory 'g9.9' in RUN; it has for example g000000.1",),
}
OFFLINE: dict[str, tuple[str, ...]] = {
    "train tiny.yaml model.build=null model.path=Qwen/Qwen3-0.6B": (
        "model.path: no directory and no cached model 'Qwen/Qwen3-0.6B', and",
        "with HF_HUB_OFFLINE",
        "run `treadle models get Qwen/Qwen3-0.6B` where the hub can be reached",
    ),
    "models get Qwen/Qwen3-0.6B": ("treadle models get: no directory and no cached model 'Qwen/Qwen3-0.6B', and",),
}
CASES = [
    *((f"train tiny.yaml {words}", 2, said) for words, said in TRAIN.items()),
    *((words, 2, said) for words, said in OTHERS.items()),
    *((words, 1, said) for words, said in {**OF_RUNS, **OFFLINE}.items()),
]


def fill(folder: Path) -> None:
    make_place(folder, folder)
    record(folder / "RUN")
    for name in ("model", "served"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "served" / "tokenizer.json").write_text("{}")
    (folder / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}]}\n')
    (folder / "broken.jsonl").write_text("Hi\n")
    (folder / "empty.jsonl").touch()
    (folder / "train.json").write_text("[]")
    (folder / "broken.yaml").write_text("a: [")


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
        assert err.startswith("error: ") and (err.count("\n") == 1 or " def " in err), err  # or with an example


def test_torch_was_never_loaded(results: dict[str, Any]) -> None:
    assert [words for words, (_, _, heavy) in results.items() if heavy] == []
