"""`python -m treadle.training.rank_worker FD`: one rank of `RankProcesses`, at the other end of a channel.

It answers calls in order, and ends when the channel closes.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from contextlib import closing
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from transformers.utils import logging as hf_logging

from treadle.core.child_process import end_with_parent, parent_has_ended
from treadle.core.memory import return_large_blocks_when_freed
from treadle.training.rank_calls import RankService
from treadle.training.rank_processes import RankSetup
from treadle.training.ranks import Ranks
from treadle.training.sharding import join

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def serve(channel: Connection, folders: list[str]) -> None:
    """Make the object that the first message describes, and answer calls of its methods until the channel closes.

    If the caller was killed, its folder is removed, which it does itself otherwise; folders: has it from then on.
    """
    hf_logging.disable_progress_bar()  # the output is no terminal
    setup: RankSetup = pickle.loads(channel.recv_bytes())
    folders.append(os.path.dirname(setup.store))

    def meet() -> Ranks:
        store = FileStore(setup.store, setup.size)
        return join(store, setup.rank, setup.size, setup.replicas, setup.device, setup.limit)

    with closing(RankService(setup.rank, pickle.dumps)) as service:
        channel.send_bytes(service.start(meet, setup.make))
        while True:
            try:
                message = channel.recv_bytes()
            except EOFError:
                break
            channel.send_bytes(service.call(message))
    if parent_has_ended():
        shutil.rmtree(folders[0], ignore_errors=True)
        os._exit(1)  # the store is gone, in which ranks say that they leave


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing outside this machine can reach it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    of_caller: list[str] = []
    end_with_parent(of_caller)
    return_large_blocks_when_freed()
    serve(Connection(int(sys.argv[1])), of_caller)
    if dist.is_initialized():
        dist.destroy_process_group()
