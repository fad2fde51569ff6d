"""`ShardedRanks`: a model over several processes by FSDP2, each with a part of every parameter.

    layer 1 ... layer L      each gathers its parameters before computing, forward and backward, and reduces gradients
    Scorer (root)            the rest: embedding, final norm, head, value head, a tower that is trained

Gradients are summed, never divided by the number of ranks, because token weights already refer to the whole batch. On a
two-dimensional mesh, shards are spread over the second dimension, and copies of them over the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError, TreadleError
from treadle.models.loading import compute_buffers
from treadle.models.support import decoder_of
from treadle.training.forward import Forward
from treadle.training.objective import SCORES, TokenScores
from treadle.training.ranks import Item, OneRank, Ranks, ReadWeights, Result
from treadle.training.scorer import Scorer

_PROBE = np.arange(1, 21, dtype=np.int32)  # ids to score a model on, before and after sharding
_TOLERANCE, _HALF = 1e-3, 0.5  # tolerances of their log-probabilities, in float32 and in bfloat16


def join(store: Store, rank: int, size: int, replicas: int, device: str, limit: float) -> Ranks:
    """Meet the other ranks in a shared store, and return this process's connection to them.

    replicas: copies of the model, each sharded over size / replicas ranks. device: `cpu`, or `cuda` for this process's
    GPU, number `rank` of the visible ones. limit: timeout of one collective, in seconds.
    """
    if size == 1:
        return OneRank()
    timeout = timedelta(seconds=limit)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if replicas == 1:
        return ShardedRanks(init_device_mesh(device, (size,)))
    mesh = init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    # Subgroups of ranks have their own timeout.
    for dimension in range(mesh.ndim):
        _set_pg_timeout(timeout, mesh.get_group(dimension))
    return ShardedRanks(mesh)


class ShardedRanks:
    """Joins the processes of a device mesh, after `torch.distributed` was initialized: a `Ranks`.

    A parameter unused by all ranks has a zero gradient here, but none in a single process.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.rank, self.size = mesh.get_rank(), mesh.size()

    def shard(self, forward: Forward, half: bool = False, read: ReadWeights | None = None) -> None:
        """Shard the model's parameters; see `Ranks`. Copy or compare whole parameters before this.

        With `read`, no rank ever has a whole model to compare the shards' log-probabilities with.
        """
        # Only the first rank could probe it.
        forward.scorer.why_not_shared = self.every(lambda: forward.scorer.why_not_shared)[0]
        ids = _PROBE % forward.model.config.get_text_config().vocab_size
        wanted = forward.exact_logprobs(ids) if self.rank == 0 and read is None else None
        self._shard(forward.scorer, half)
        if read is not None:
            read(forward.model)
        actual = forward.exact_logprobs(ids)

        def check() -> None:
            if wanted is not None and not (gap := np.abs(actual - wanted).max()) <= (_HALF if half else _TOLERANCE):
                raise ConfigError(
                    f"{type(forward.model).__name__} has other log-probabilities spread over {self.size} ranks than in "
                    f"one process (they differ by {gap:.1e}); set placement.learner.ranks to 1"
                )

        self.every(check)

    def _shard(self, scorer: Scorer, half: bool) -> None:
        """Wrap the scorer, and fill it with the first rank's values, one parameter at a time."""
        parameters = scorer.named_parameters() if self.rank == 0 else iter(())
        values = {name: parameter.detach() for name, parameter in parameters if not parameter.is_meta}
        names = self.every(lambda: list(values))[0]
        missing = self.rank > 0 or any(tensor.is_meta for tensor in chain(scorer.parameters(), scorer.buffers()))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for module in (*_units(scorer.model), scorer):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Otherwise ranks with tokens for other experts would reduce buffers of other sizes.
                if self.size > 1:
                    module.set_reduce_scatter_unused_params(True)
        if missing:
            scorer.to_empty(device=self._mesh.device_type)
            compute_buffers(scorer.model)
        with torch.no_grad():
            for name, shard in scorer.named_parameters():
                if name not in names:
                    continue
                value = values.pop(name) if self.rank == 0 else torch.empty(shard.shape, dtype=shard.dtype)
                assert isinstance(shard, DTensor)
                shard.copy_(distribute_tensor(value, shard.device_mesh, shard.placements))
            for buffer in scorer.buffers():
                dist.broadcast(buffer, src=0)

    def gather(self, parts: Sequence[TokenScores], like: Tensor) -> TokenScores:
        """Return the scores of all N tokens: each rank writes its own into zeros, so that their sum has no rounding."""
        # Each rank has a part of every slot, so all find the same ones missing.
        summed = {} if parts else {name: torch.zeros_like(like) for name in SCORES[:3]}
        for name in SCORES:
            tensors = [getattr(part, name) for part in parts]
            if any(tensor is None for tensor in tensors) or not parts:
                continue
            width, dtype = tensors[0].shape[1:], torch.int64 if name == "top_ids" else like.dtype
            summed[name] = torch.zeros(len(like), *width, dtype=dtype, device=like.device)
            for part, tensor in zip(parts, tensors, strict=True):
                summed[name][torch.from_numpy(part.flat).to(like.device)] = tensor.to(dtype)
            dist.all_reduce(summed[name])
        return TokenScores(torch.arange(len(like)).numpy(), **summed)

    def add(self, number: float) -> float:
        """Return the sum of the ranks' numbers, in float64."""
        total = torch.tensor(number, dtype=torch.float64, device=self._mesh.device_type)
        dist.all_reduce(total)
        return total.item()

    def every(self, work: Callable[[], Result]) -> list[Result]:
        """Return the result of `work` on each rank; see `Ranks`."""
        outcome: tuple[Result | None, TreadleError | None]
        try:
            outcome = work(), None
        except TreadleError as error:
            outcome = None, error
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        if errors := [error for _, error in outcomes if error is not None]:
            raise errors[0]
        return [value for value, _ in outcomes]

    def first(self, take: Callable[[Iterator[Item]], Result], items: Iterator[Item]) -> Result:
        """Have only the first rank process the items; see `Ranks`."""
        result: Any = None

        def work() -> None:
            nonlocal result
            try:
                result = take(items) if self.rank == 0 else None
            finally:
                # Exhausts the items, as the other ranks do.
                deque(items, maxlen=0)

        self.every(work)
        return result  # type: ignore[no-any-return]


def _units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the separately gathered modules: layers, and an embedding not tied to the head; the rest is one unit.

    Each is called once per pass on every rank; the head is called per chunk of rows, a tower per image, and ranks
    differ in their number.
    """
    yield from _layers(decoder_of(model), set(model._no_split_modules or ()))
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        yield embedding


def _layers(module: nn.Module, kinds: set[str]) -> Iterator[nn.Module]:
    """Yield the decoder's layers: the outermost modules of classes that transformers marks as not to be split."""
    for child in module.children():
        if type(child).__name__ in kinds:
            yield child
        else:
            yield from _layers(child, kinds)
