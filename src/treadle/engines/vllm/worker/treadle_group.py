"""The process group for broadcasting weights. Used on both sides, so it imports only torch.

    rank 0            the trainer, which has the weights
    rank 1 ...        the workers of all servers, one rank each

It is separate from the default process group of `torch.distributed`, and does not interfere with it.
"""

import math
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore


class Group:
    """All ranks, connected. The constructor waits for the others.

    timeout: limit of each step of that, and of each broadcast, in seconds. Raises RuntimeError.
    """

    def __init__(self, store: Store, rank: int, size: int, *, device: torch.device, address: str, timeout: float):
        self._store, self._wait = store, timedelta(seconds=timeout)
        store.set(f"device/{rank}", _identity(device))
        devices = [store.get(f"device/{other}").decode() for other in range(size)]
        # NCCL does not allow two ranks on one GPU.
        apart = "cpu" not in devices and len(set(devices)) == size
        self.device = device if apart else torch.device("cpu")
        self._group = self._nccl(rank, size) if apart else self._gloo(rank, size, address)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects at first use

    def broadcast(self, packed: torch.Tensor) -> None:
        """Copy rank 0's bytes to all ranks. packed: uint8, of equal size everywhere, on `device`.

        Raises RuntimeError; the group is then unusable.
        """
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([packed], options).wait(self._wait)

    def close(self) -> None:
        self._group.abort()

    def _gloo(self, rank: int, size: int, address: str) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # named Options in the stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self._wait
        return ProcessGroupGloo(PrefixStore("gloo", self._store), rank, size, options)

    def _nccl(self, rank: int, size: int) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # missing in torch for CPUs

        options = ProcessGroupNCCL.Options()
        options._timeout = self._wait
        # Makes a lost peer an error of the broadcast; otherwise one of torch's threads would end this process.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        try:
            return ProcessGroupNCCL(PrefixStore("nccl", self._store), rank, size, options)
        finally:
            del os.environ["TORCH_NCCL_BLOCKING_WAIT"]


def listen(host: str, timeout: float) -> TCPStore:
    """Return a new store, for one group, on a free port of only that address. Raises OSError."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=timeout)
    return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())


def join(host: str, port: int, rank: int, size: int, *, device: torch.device, timeout: float) -> Group:
    """Join the group with its store at that address. Raises RuntimeError."""
    store = TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: only finds this machine's address on the route.
        probe.connect((host, port))
        address = probe.getsockname()[0]
    return Group(store, rank, size, device=device, address=address, timeout=timeout)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype into bytes."""
    return torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)


def unpack(packed: torch.Tensor, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Undo `pack`, without copying."""
    parts = packed.view(dtype).split([math.prod(shape) for shape in shapes])
    return (part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))


def packed_bytes(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> int:
    """Return the size of `pack`'s result for such tensors."""
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def _identity(device: torch.device) -> str:
    """Return the id of a GPU, the same in every process; `cpu` for anything else."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
