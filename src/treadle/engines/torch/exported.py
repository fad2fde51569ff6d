"""An engine of a model directory, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions


def load_engine(model: Path, options: TorchEngineOptions, threads: int, deterministic: bool) -> TorchEngine:
    """Return an engine of the model and tokenizer in a directory.

    threads: that this process computes with from now on. deterministic: by deterministic kernels only.
    Raises EngineError, and what loading raises.
    """
    hf_logging.disable_progress_bar()  # the log is no terminal
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    module = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return TorchEngine(module, options, decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
