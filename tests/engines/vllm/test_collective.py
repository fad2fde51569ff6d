"""Broadcasts of weights: the group they go through and how they are packed. Needs no vLLM."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import FixedWeights
from tests.until import CEILING
from treadle.engines.vllm.transfer import Packed, address_towards, cut
from treadle.engines.vllm.worker.treadle_group import Group, join, listen, pack, packed_bytes, unpack

HOST, CPU = "127.0.0.1", torch.device("cpu")


def in_threads(ranks: int, play: Callable[[Group, int], object]) -> list[object]:
    """What each rank of a new group makes of it."""
    store = listen(HOST, CEILING)

    def member(rank: int) -> object:
        if rank:
            return play(join(HOST, store.port, rank, ranks, device=CPU, timeout=CEILING), rank)
        return play(Group(store, 0, ranks, device=CPU, address=HOST, timeout=CEILING), 0)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(member, range(ranks)))


def sent(group: Group, rank: int) -> list[int]:
    packed = torch.full((4,), 7 if rank == 0 else 0, dtype=torch.uint8)
    group.broadcast(packed)
    return packed.tolist()


def test_everybody_gets_what_rank_0_has_beside_a_default_group(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert in_threads(4, sent) == [[7] * 4] * 4
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_no_default_group_is_made() -> None:
    assert in_threads(2, sent) == [[7] * 4] * 2
    assert not torch.distributed.is_initialized()


def test_whoever_does_not_come_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="wait timeout after 500ms"):
        Group(listen(HOST, 0.5), 0, 2, device=CPU, address=HOST, timeout=0.5)


def test_whoever_does_not_take_part_is_not_waited_for() -> None:
    over = threading.Event()

    def play(group: Group, rank: int) -> None:
        if rank == 0:
            group._wait = type(group._wait)(seconds=0.5)
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                group.broadcast(torch.zeros(50_000_000, dtype=torch.uint8))
            over.set()
        over.wait(CEILING)

    in_threads(2, play)


def test_the_store_is_reached_at_its_address_alone() -> None:
    store = listen(HOST, 10)
    socket.create_connection((HOST, store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5), st.sampled_from(["float", "bfloat16"])
)
def test_what_is_packed_comes_out_again(shapes: list[list[int]], kind: str) -> None:
    tensors = [torch.randn(tuple(shape)).to(getattr(torch, kind)) for shape in shapes]
    packed = pack(tensors)
    assert packed.numel() == packed_bytes(tensors[0].dtype, shapes)
    for tensor, out in zip(tensors, unpack(packed, tensors[0].dtype, shapes), strict=True):
        assert torch.equal(tensor, out) and tensor.shape == out.shape


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.int64]), st.integers(0, 12))))
def test_buckets_hold_one_type_and_no_more_than_allowed(given_sizes: list[tuple[torch.dtype, int]]) -> None:
    sizes = {f"w{number:03}": size for number, size in enumerate(given_sizes)}
    runs = cut(sizes, 10)
    assert [name for run in runs for name in run] == list(sizes)
    for run in runs:
        assert len({sizes[name][0] for name in run}) == 1
        assert len(run) == 1 or sum(sizes[name][1] for name in run) <= 10


def test_servers_here_are_reached_from_the_loopback_address() -> None:
    assert address_towards(["http://127.0.0.1:8000", "http://localhost:8001"]) == HOST


async def test_staged_weights_are_a_copy() -> None:
    weights = {"b": torch.ones(2, 3), "a": torch.tensor([5]), "c": torch.zeros(4, dtype=torch.bfloat16)}
    _, buckets = await FixedWeights(weights).stage(Packed(torch.float32))
    weights["b"].zero_()
    assert [bucket.message() for bucket in buckets] == [
        {"dtype": "int64", "shapes": {"a": (1,)}},
        {"dtype": "float32", "shapes": {"b": (2, 3), "c": (4,)}},
    ]
    assert buckets[1].packed.view(torch.float32).tolist() == [1.0] * 6 + [0.0] * 4
