"""`TrainedModel`: an adapter over the shared base, with its accumulated gradient and its optimizer.

data -lay_out-> Layout* -Forward.trees-> PrefixTree* -Forward.backward-> gradients += ... -optim_step-> weights
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError, DataError
from treadle.core.files import Manifest
from treadle.core.types import Floats
from treadle.models.config import LoraConfig
from treadle.models.lora import add_adapters, check_adapter
from treadle.models.support import context_of
from treadle.models.weights import saved, trained
from treadle.packing.layout import Packing, Sharing
from treadle.tinker.data import AdamParams, Adapter, Datum, Outputs
from treadle.tinker.layout import Layout, lay_out
from treadle.tinker.losses import Loss, by_name
from treadle.training.checkpoint import (
    copy_weights,
    optimizer_tensors,
    read_part,
    restore_moments,
    write_adapter,
)
from treadle.training.forward import Forward
from treadle.training.objective import LossGradients, TokenScores
from treadle.training.ranks import OneRank

ALPHA = 32
"""Scale of all adapters, times their rank, as in "LoRA without regret": learning rates then suit any rank."""


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares the tensors of its base, and has its adapters for itself."""
    shared: dict[int, nn.Parameter] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    return copy.deepcopy(model, shared)


def adapted(base: PreTrainedModel, adapter: Adapter, seed: int) -> PreTrainedModel:
    """Return a new adapter over a base, which it shares. Raises DataError for one without layers, or a wrong rank."""
    if not (adapter.train_attn or adapter.train_mlp or adapter.train_unembed):
        raise DataError("a model with train_attn, train_mlp and train_unembed all false has nothing to train")
    if not 1 <= adapter.rank <= _HIGHEST_RANK:
        raise DataError(f"the rank of an adapter must be in [1, {_HIGHEST_RANK}], got {adapter.rank}")
    layers = {(True, True): "all-linear", (True, False): "attention", (False, True): "mlp", (False, False): ()}
    targets = layers[adapter.train_attn, adapter.train_mlp]
    model = shared_copy(base)
    try:
        config = LoraConfig(rank=adapter.rank, alpha=ALPHA, targets=targets)  # type: ignore[arg-type]
        add_adapters(model, config, seed, head=adapter.train_unembed)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return model


_HIGHEST_RANK = 512


class TrainedModel:
    """One created model: an adapter over the shared base, with its optimizer. Calls from any thread take turns.

    budget: largest number of tokens of a pass. tokenizer: directory of the files that are saved beside weights.
    Gradients of several calls of `forward` add up until `optim_step`.
    """

    def __init__(self, base: PreTrainedModel, adapter: Adapter, seed: int, budget: int, tokenizer: Path) -> None:
        self.adapter = adapter
        self.model = adapted(base, adapter, seed)
        self._tokenizer = tokenizer
        self._forward = Forward(self.model, budget)
        self._turn = Lock()
        self._parameters = [parameter for _, parameter in trained(self.model)]
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)

    def copy(self) -> PreTrainedModel:
        """Return the model with its current adapter, for itself, over the shared base."""
        with self._turn:
            return shared_copy(self.model)

    def forward(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float | str], *, backward: bool
    ) -> Outputs:
        """Compute a loss, a sum over all targets; with `backward`, add its gradient to those of earlier calls.

        Raises DataError, without changing gradients, for an unknown loss, data that do not fit it or the model, and a
        loss that is not finite.
        """
        function = by_name(loss)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        context = context_of(self.model.config)
        layouts = lay_out(data, loss, function, function.settled(loss, options), vocabulary, context)
        arrays: list[Floats] = [np.empty(0, np.float32)] * len(data)
        total = 0.0
        with self._turn:
            before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
            try:
                for layout in layouts:
                    logp, summed = self._compute(layout, function, backward)
                    total += summed
                    for number, array in layout.split(logp.cpu().numpy()):
                        arrays[number] = array
                if not math.isfinite(total):
                    raise DataError(f"loss {loss!r} is {total}; the gradient was not changed")
            except BaseException:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient
                raise
        return Outputs([{"logprobs": array} for array in arrays], {"loss:sum": total})

    def _compute(self, layout: Layout, loss: Loss, backward: bool) -> tuple[Tensor, float]:
        """Return log-probabilities [M] of a layout's targets, and the loss; with `backward`, add its gradient."""
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        temperature = torch.ones(layout.pairs, dtype=dtype, device=self.model.device)
        top = None if layout.top is None else torch.from_numpy(layout.top)
        inputs = layout.tensors(temperature)
        trees = self._forward.trees(layout.calls, Packing.TREE, Sharing.BATCH)
        logp = torch.empty(len(layout.pair), dtype=dtype, device=self.model.device)

        def fill(scores: TokenScores) -> Tensor:
            covered, values = layout.logp(scores)
            logp[covered] = values
            return covered

        def gradient(scores: TokenScores) -> LossGradients:
            covered = fill(scores)
            if slopes is not None:
                return layout.slopes(scores, slopes)
            part = {name: values[covered] for name, values in inputs.items()}
            slope = torch.zeros_like(logp)
            slope[covered] = loss.sums(logp[covered], part)[1]
            return layout.slopes(scores, slope)

        slopes: Tensor | None = None
        couples = loss.couples and len(trees) > 1
        if not backward or couples:
            for tree in trees:
                fill(self._forward.scores(tree, temperature, top=top))
        if couples:
            # Before the first gradient, because a target's loss may depend on targets in other trees.
            slopes = loss.sums(logp, inputs)[1]
        if backward:
            for tree in trees:
                self._forward.backward(tree, temperature, gradient, top=top)
        return logp, float(loss.sums(logp, inputs)[0])

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make an optimizer step with the accumulated gradient and clear it; return metrics.

        Without any gradient nothing changes. Raises DataError for wrong parameters, and, with the gradient cleared and
        the weights unchanged, for a gradient that is not finite.
        """
        _check(params)
        with self._turn:
            limit = params.grad_clip_norm if params.grad_clip_norm > 0 else math.inf
            norm = float(nn.utils.clip_grad_norm_(self._parameters, limit))
            if not math.isfinite(norm):
                self._optimizer.zero_grad(set_to_none=True)
                raise DataError(f"the gradient's norm is {norm}; it was cleared, and the weights were not changed")
            for group in self._optimizer.param_groups:
                group |= {
                    "lr": params.learning_rate,
                    "betas": (params.beta1, params.beta2),
                    "eps": params.eps,
                    "weight_decay": params.weight_decay,
                }
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm}

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients wait for an optimizer step."""
        with self._turn:
            return any(parameter.grad is not None for parameter in self._parameters)

    def save(self, directory: Path, optimizer: bool = True) -> None:
        """Write weights, and the optimizer, to a directory, complete or not at all; pending gradients are not saved.

        The directory is an adapter in peft's format, as of `treadle export`. An existing one is replaced. Raises
        CheckpointError.
        """
        with self._turn:
            moments = optimizer_tensors(self._optimizer, self.model) if optimizer else {}
            write_adapter(directory, self.model, self._tokenizer, moments)

    def load(self, directory: Path, optimizer: bool) -> None:
        """Continue from a directory that `save` wrote, with its optimizer or a new one; pending gradients are dropped.

        Raises CheckpointError for another adapter or base, DamageError for damaged files, RemovedError for none.
        """
        manifest, ranks = Manifest.load(directory), OneRank()
        check_adapter(self.model, manifest)
        weights = read_part(manifest, "adapter_model", ranks)
        moments = read_part(manifest, "optimizer", ranks) if optimizer else None
        with self._turn:
            copy_weights(saved(self.model), weights, str(directory))
            self._optimizer.zero_grad(set_to_none=True)
            self._optimizer.state.clear()
            if moments is not None:
                restore_moments(self._optimizer, self.model, moments)


def _check(params: AdamParams) -> None:
    wrong = [
        f"{name} {value}"
        for name, value, low, high in (
            ("learning_rate", params.learning_rate, 0.0, math.inf),
            ("beta1", params.beta1, 0.0, 1.0),
            ("beta2", params.beta2, 0.0, 1.0),
            ("eps", params.eps, 0.0, math.inf),
            ("weight_decay", params.weight_decay, 0.0, math.inf),
        )
        if not low <= value < high
    ]
    if wrong:
        raise DataError(f"{wrong[0]} is out of range: betas lie in [0, 1), all others are finite and at least 0")
