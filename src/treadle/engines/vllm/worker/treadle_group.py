"""The group of processes in which weights are broadcast. Both sides use it, so that it imports torch alone.

    rank 0            the trainer, which has the weights
    rank 1 ...        the workers of all servers, one rank each

It is no default process group, and whatever else the processes do with `torch.distributed` goes on beside it.
"""

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore


class Group:
    """Connects all ranks.

    Constructing one waits for the others, `timeout` seconds at most for each step, as does `broadcast`. Both raise
    RuntimeError; the group of a broadcast that failed is of no further use.
    """

    def __init__(self, store: Store, rank: int, size: int, *, device: torch.device, address: str, timeout: float):
        self._store, self._wait = store, timedelta(seconds=timeout)
        store.set(f"device/{rank}", _identity(device))
        devices = [store.get(f"device/{other}").decode() for other in range(size)]
        apart = "cpu" not in devices and len(set(devices)) == size  # NCCL takes no two ranks on one GPU
        self.device = device if apart else torch.device("cpu")
        self._group = self._nccl(rank, size) if apart else self._gloo(rank, size, address)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects at first use

    def broadcast(self, packed: torch.Tensor) -> None:
        """Copy rank 0's bytes to all ranks. packed: uint8, of one size everywhere, on `device`."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([packed], options).wait(self._wait)

    def close(self) -> None:
        """Drop connections."""
        self._group.abort()

    def _gloo(self, rank: int, size: int, address: str) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # what the stubs call Options
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self._wait
        return ProcessGroupGloo(PrefixStore("gloo", self._store), rank, size, options)

    def _nccl(self, rank: int, size: int) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # torch for CPUs has none

        options = ProcessGroupNCCL.Options()
        options._timeout = self._wait
        # then a lost peer is an error of the broadcast; else a thread of torch's would end this process
        with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return ProcessGroupNCCL(PrefixStore("nccl", self._store), rank, size, options)


def listen(host: str, timeout: float) -> TCPStore:
    """Return a new store, for one group, on a free port of that address and of no other. Raises OSError."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=timeout)
    return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())


def join(host: str, port: int, rank: int, size: int, *, device: torch.device, timeout: float) -> Group:
    """Return the group whose store listens there, joined as this rank. Raises RuntimeError."""
    store = TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only asks which of this machine's addresses leads there
        address = probe.getsockname()[0]
    return Group(store, rank, size, device=device, address=address, timeout=timeout)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors as bytes, one after the other. tensors: of one type."""
    return torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)


def unpack(packed: torch.Tensor, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Return views of the tensors that `pack` was given."""
    parts = packed.view(dtype).split([math.prod(shape) for shape in shapes])
    return (part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))


def packed_bytes(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> int:
    """Return how many bytes `pack` makes of such tensors."""
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def _identity(device: torch.device) -> str:
    """Return the id of a GPU, the same in every process; `cpu` for anything else."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
