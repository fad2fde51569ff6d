"""`python -m treadle.training.rank_worker FD`: one rank of `RankProcesses`, at the other end of a channel.

It answers calls in order, and ends when the channel closes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from inspect import iscoroutine
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from transformers.utils import logging as hf_logging

from treadle.core.child_process import end_with_parent
from treadle.core.errors import RankError, TreadleError
from treadle.core.memory import return_large_blocks_when_freed
from treadle.training.rank_processes import RankAnswer, RankCall, RankSetup
from treadle.training.sharding import join

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def serve(channel: Connection) -> None:
    """Make the object that the first message describes, and answer calls of its methods until the channel closes."""
    hf_logging.disable_progress_bar()  # the output is no terminal
    setup: RankSetup = pickle.loads(channel.recv_bytes())
    with asyncio.Runner() as runner:
        served: list[Any] = []

        def make() -> None:
            store = FileStore(setup.store, setup.size)
            ranks = join(store, setup.rank, setup.size, setup.replicas, setup.device, setup.limit)
            served.append(setup.make(ranks))

        _answer(channel, setup.rank, make)
        while True:
            try:
                call: RankCall = pickle.loads(channel.recv_bytes())
            except EOFError:
                return

            def work(call: RankCall = call) -> Any:
                torch.set_num_threads(call.threads)
                torch.use_deterministic_algorithms(call.deterministic)
                found = getattr(served[0], call.name)(*call.arguments)
                return runner.run(found) if iscoroutine(found) else found

            _answer(channel, setup.rank, work)


def _answer(channel: Connection, rank: int, work: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as found:
        try:
            value = work()
            answer = RankAnswer(value, warned=tuple((each.category, str(each.message)) for each in found))
            message = pickle.dumps(answer)
        except TreadleError as error:
            message = pickle.dumps(RankAnswer(error=error))
        except Exception as error:  # noqa: BLE001  # whatever it is ends this rank's work, and its caller must know
            text = "".join(traceback.format_exception(error))
            failure = RankError(f"rank {rank} failed with {type(error).__name__}: {error}\n{text}")
            message = pickle.dumps(RankAnswer(error=failure))
    channel.send_bytes(message)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing outside this machine can reach it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    end_with_parent()
    return_large_blocks_when_freed()
    serve(Connection(int(sys.argv[1])))
    if dist.is_initialized():
        dist.destroy_process_group()
