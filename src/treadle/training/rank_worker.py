"""`python -m treadle.training.rank_worker FD`: one rank of `RankProcesses`, at the other end of a channel.

It answers calls in order, and ends when the channel closes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import iscoroutine
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from transformers.utils import logging as hf_logging

from treadle.core.errors import RankError, TreadleError
from treadle.core.processes import end_with_parent, parent_has_ended, return_large_blocks_when_freed
from treadle.training.rank_processes import RankAnswer, RankCall, RankSetup
from treadle.training.sharding import join

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def serve(channel: Connection, folders: list[str]) -> None:
    """Make the object that the first message describes, and answer calls of its methods until the channel closes.

    If the caller was killed, its folder is removed, which it does itself otherwise; folders: has it from then on.
    """
    hf_logging.disable_progress_bar()  # the output is no terminal
    setup: RankSetup = channel.recv()
    folders.append(os.path.dirname(setup.store))
    served: Any = None

    def start() -> None:
        nonlocal served
        store = FileStore(setup.store, setup.size)
        served = setup.make(join(store, setup.rank, setup.size, setup.replicas, setup.device, setup.limit))

    with asyncio.Runner() as runner, suppress(EOFError, ConnectionError):  # the caller closed it, or was killed
        channel.send_bytes(_answer(setup.rank, start))
        while True:
            message = channel.recv_bytes()
            channel.send_bytes(_answer(setup.rank, partial(_call, served, message, runner)))
    if parent_has_ended():
        shutil.rmtree(folders[0], ignore_errors=True)
        os._exit(1)  # the store is gone, in which ranks say that they leave


def _call(served: Any, message: bytes, runner: asyncio.Runner) -> Any:
    call: RankCall = pickle.loads(message)
    torch.set_num_threads(call.threads)
    torch.use_deterministic_algorithms(call.deterministic)
    answer = getattr(served, call.name)(*call.arguments)
    return runner.run(answer) if iscoroutine(answer) else answer


def _answer(rank: int, work: Callable[[], Any]) -> bytes:
    """Return a pickled `RankAnswer`; what cannot be pickled is an error."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            value = work()
            return pickle.dumps(RankAnswer(value, warned=tuple((w.category, str(w.message)) for w in caught)))
        except TreadleError as error:
            return pickle.dumps(RankAnswer(error=error))
        except Exception as error:  # noqa: BLE001  # whatever it is ends this rank's work, and its caller must know
            text = "".join(traceback.format_exception(error))
            failure = RankError(f"rank {rank} failed with {type(error).__name__}: {error}\n{text}")
            return pickle.dumps(RankAnswer(error=failure))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing outside this machine can reach it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    folders_of_caller: list[str] = []
    end_with_parent(folders_of_caller)
    return_large_blocks_when_freed()
    serve(Connection(int(sys.argv[1])), folders_of_caller)
    if dist.is_initialized():
        dist.destroy_process_group()
