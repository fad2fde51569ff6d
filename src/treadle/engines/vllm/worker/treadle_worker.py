"""Loaded by vLLM's workers (`--worker-extension-cls treadle_worker.Extension`): receives new weights.

Runs in vLLM's virtual environment; imports nothing of Treadle. `worker` must be on its PYTHONPATH.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from treadle_group import Group, join, packed_bytes, unpack
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.models.interfaces import supports_multimodal

if not torch.cuda.is_available():
    # Requests AMX tiles from the kernel. Without them, bfloat16 attention of small models hits an illegal instruction.
    torch.cpu._init_amx()


@dataclass
class Init(WeightTransferInitInfo):
    """How weights will arrive.

    towers: whether they include those of towers.
    group: for broadcasts, {host, port, size, timeout, first}: its store, and the rank of this server's first worker;
    None for weights in files.
    """

    towers: bool = False
    group: dict[str, Any] | None = None


@dataclass
class Update(WeightTransferUpdateInfo):
    """Source of all weights, by their Hugging Face names: one of these two.

    path: a safetensors file. buckets: buckets about to be broadcast, {"dtype", "shapes": {name: shape}} each.
    """

    path: str | None = None
    buckets: list[dict[str, Any]] | None = None


class Engine(WeightTransferEngine[Init, Update]):
    """Loads a whole model from one file, or during a broadcast.

    Everything happens in `update_weights`, so that a bad file is refused before the model is touched.
    """

    init_info_cls = Init
    update_info_cls = Update
    _shapes: dict[str, Any] | None = None  # shapes of the last weights
    _towers = False
    _group: Group | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        """Prepare for a new trainer, which may use other names of weights, or for another group."""
        self.shutdown()
        self._shapes, self._towers = None, init_info.towers
        if init_info.group is not None:
            group, config = dict(init_info.group), self.parallel_config
            worker = config.data_parallel_index * config.world_size + config.rank
            self._group = join(rank=group.pop("first") + worker, device=self.device, **group)

    def start_weight_update(self) -> None:
        """No-op: `update_weights` first inspects the weights."""

    def finish_weight_update(self) -> None:
        """No-op: `update_weights` does everything."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights. The base class would synchronize an accelerator even without one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Load the weights. Raises ValueError, with the model untouched, if names or shapes have changed."""
        if update_info.path is None:
            self._receive_broadcast(update_info.buckets or [])
            return
        with safe_open(update_info.path, "pt") as file:  # refuses a truncated file
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            self._load(shapes, ((name, file.get_tensor(name)) for name in shapes))

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _receive_broadcast(self, buckets: list[dict[str, Any]]) -> None:
        if self._group is None:
            raise ValueError("this server has joined no group for broadcasts")
        weights = received(self._group, buckets)
        try:
            self._load({name: tuple(shape) for bucket in buckets for name, shape in bucket["shapes"].items()}, weights)
        finally:
            # Every rank must take part in a broadcast, even one that cannot use it.
            deque(weights, maxlen=0)

    def _load(self, shapes: dict[str, Any], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._shapes not in (None, shapes):
            raise ValueError("names or shapes of weights differ from the previous ones")
        part = self.model if self._towers else language_part(self.model)
        abandon_reload(part)
        published = {id(parameter) for parameter in part.parameters()}
        # Tied ones once, as long as they are tied.
        expected = {name for name, parameter in self.model.named_parameters() if id(parameter) in published}
        initialize_layerwise_reload(part)
        load_all(self.model, expected, weights)
        finalize_layerwise_reload(part, self.model_config)
        pack_again(part)
        self._shapes = shapes


def language_part(model: torch.nn.Module) -> torch.nn.Module:
    """Return the language model of one with towers, otherwise all."""
    return model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]


def received(group: Group, buckets: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by name as they arrive. Raises RuntimeError if the group fails."""
    for bucket in buckets:
        dtype, shapes = getattr(torch, bucket["dtype"]), list(bucket["shapes"].values())
        packed = torch.empty(packed_bytes(dtype, shapes), dtype=torch.uint8, device=group.device)
        group.broadcast(packed)
        yield from zip(bucket["shapes"], unpack(packed, dtype, shapes), strict=True)


def load_all(model: torch.nn.Module, expected: set[str], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load the weights. Raises ValueError if an expected parameter, or a part of one, is missing."""
    loaded = model.load_weights(weights)  # type: ignore[operator]
    missing = sorted(expected - loaded) if loaded is not None else []
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod):
            # Query, key and value are one layer here, and gate and up another.
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel < info.load_numel_total:
                missing.append(name)
    if missing:
        raise ValueError(f"{len(missing)} weights are missing or incomplete, for example {missing[0]}")


def abandon_reload(model: torch.nn.Module) -> None:
    """Undo a reload that failed halfway: its buffered weights would otherwise be mixed with the next ones."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def pack_again(model: torch.nn.Module) -> None:
    """Repack weights that vLLM 0.32 packs on the CPU at the first load, but silently not on a reload.

    Linear layers multiply by a packed copy, which is renewed only if the layer's own weight was loaded: not for the
    output layer of a model with tied embeddings. Weights of experts are packed in place. GPUs pack nothing.
    """
    # vLLM imports these modules only on the CPU, too.
    if next(model.parameters()).device.type != "cpu":
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        elif isinstance(layer, RoutedExperts) and layer.quant_method.moe_kernel is not None:
            experts = layer.quant_method.moe_kernel.fused_experts
            if isinstance(experts, CPUUnquantizedExperts):
                experts.process_weights_after_loading(layer)


class Extension:
    """Mixed into vLLM's worker class, so that vLLM imports this module."""


WeightTransferEngineFactory.register_engine("treadle", Engine)
