"""`Scorer`: the root module of every forward pass, combining model, head and value head.

Shapes: T nodes of a micro-batch, P pairs of a tree, N completion tokens of an update, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import OWN
from treadle.core.support import Probabilities, Support
from treadle.models.passing import Passing
from treadle.models.states import stateful_layers
from treadle.models.support import decoder_of, mixing_layers, slides, why_not_packable
from treadle.models.vision import Tower
from treadle.models.weights import is_language_part
from treadle.packing.flat import Indices
from treadle.packing.layout import MicroBatch
from treadle.packing.segments import segments, together
from treadle.training.attention.interface import ATTENTION, Kernel, Past, Tree
from treadle.training.lm_head import Head, MostProbable, pair_logprobs
from treadle.training.walk import waiting, walking


class Pass:
    """The one argument of `Scorer.forward`: a micro-batch, with options of its computation.

    temperature [N]: of all pairs; its dtype is the result's. kernel: tree attention, for a model that shares prefixes.
    context, fresh: see `Tree`. half: in bfloat16. entropy_grad: whether the entropy carries a gradient. top: tokens to
    score beside the sampled ones, int64[N, k] of all pairs, or how to choose them. support: of all pairs.
    sampler: of all pairs, to take expectations under it.

    It is opaque to wrappers of modules, which traverse dataclasses, dicts and lists (see `Tree`).
    """

    __slots__ = (
        *("context", "entropy_grad", "fresh", "half", "kernel", "part", "sampler", "support", "temperature", "top"),
    )

    def __init__(
        self,
        part: MicroBatch,
        temperature: Tensor,
        kernel: Kernel | None,
        *,
        half: bool = False,
        entropy_grad: bool = False,
        context: Past | None = None,
        fresh: Past | None = None,
        top: Tensor | MostProbable | None = None,
        support: Support | None = None,
        sampler: Probabilities | None = None,
    ) -> None:
        self.top, self.support, self.sampler = top, support, sampler
        self.part, self.temperature, self.kernel = part, temperature, kernel
        self.half, self.entropy_grad, self.context, self.fresh = half, entropy_grad, context, fresh


class Scorer(nn.Module):
    """Scores the pairs of a micro-batch by a causal language model, and optionally by a value head.

    Everything is computed inside `forward`, so that this module's hooks, with which a wrapper gathers sharded
    parameters and reduces gradients, run before and after every use of a weight.
    value_head: from hidden states [P, d] to values [P, 1], in its own precision; a token's value is that state's in
    which it was sampled. vision: makes features of images; None: there are none.

    Invariant: constructing one does not change the model; it computes as configured by `ready` only inside that
    context. Raises ConfigError for a model without a separate decoder (`decoder_of`).
    """

    def __init__(
        self, model: PreTrainedModel, value_head: nn.Linear | None = None, vision: Tower | None = None
    ) -> None:
        super().__init__()
        if decoder_of(model) is model:
            raise ConfigError(
                f"{type(model).__name__} does not separate its decoder from its head; it cannot be trained"
            )
        self.model, self.value_head, self.vision = model, value_head, vision
        self.looked = False  # whether images were probed
        self.why_not_shared = why_not_packable(model.config)
        self._passing, self._stateful = Passing[Tree](), stateful_layers(model)
        self._head = Head.of(model)

    @property
    def shares(self) -> bool:
        """Return whether the model's layers can share prefixes; otherwise each sequence is a padded row."""
        return self.why_not_shared is None

    def own_logits(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return logits [T, V] of each row int64[1, T] as the whole, unmodified model computes them.

        Raises ConfigError for the language part of a model that cannot compute text without the rest.
        """
        with self.ready(attention="eager"):
            try:
                return [self.model(row, use_cache=False).logits[0] for row in rows]
            except (AttributeError, TypeError) as error:
                if not is_language_part(self.model):
                    raise
                raise ConfigError(
                    f"{type(self.model).__name__} cannot compute text with its language model alone ({error}); it "
                    "cannot be trained"
                ) from error

    @contextmanager
    def ready(self, gradient_checkpointing: bool = False, attention: str = ATTENTION) -> Iterator[None]:
        """Switch to this attention (a model that cannot share keeps its own) and to training mode inside the block.

        The backward pass belongs inside, because it may recompute layers.
        """
        model, training, decoder = self.model, self.model.training, decoder_of(self.model)
        implementation: str = decoder.config._attn_implementation
        if not training:
            model.train()
        if self.shares:
            decoder.set_attn_implementation(attention)
        if gradient_checkpointing:
            _checkpoint(model, enable=True)
        try:
            if self.shares and attention == ATTENTION:
                with self._passing.through(model), walking(self._stateful):
                    yield
            else:
                yield
        finally:
            if gradient_checkpointing:
                _checkpoint(model, enable=False)
            if self.shares:
                decoder.set_attn_implementation(implementation)
            if not training:
                model.eval()

    def forward(self, call: Pass) -> dict[str, Tensor]:
        """Return the fields of the pairs' `TokenScores`, by name."""
        part, device = call.part, self.model.device
        flat = torch.from_numpy(part.flat)
        top = call.top[flat].to(device) if isinstance(call.top, Tensor) else call.top
        # Autocast's cached copies would keep all weights that several ranks gather layer by layer; each is used once
        # per pass.
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=call.half, cache_enabled=False):
            hidden = self._hidden_rows(part) if call.kernel is None else self._hidden(call, call.kernel)
            sources = hidden.index_select(0, torch.from_numpy(part.source).to(device))
            scores = pair_logprobs(
                self._head,
                sources,
                torch.from_numpy(part.target_ids).long().to(device),
                call.temperature[flat].to(device),
                call.entropy_grad,
                top,
                None if call.support is None else call.support.take(part.flat),
                None if call.sampler is None else call.sampler.take(part.flat),
            )
        expected = [] if call.sampler is None else ["expected"]
        outputs = dict(zip(("logp", "entropy", *expected, "top", "top_ids"), scores, strict=False))
        if (head := self.value_head) is not None:
            outputs["value"] = head(sources.to(head.weight.dtype))[:, 0]
        # Not views: a wrapper's hooks could be lost on them.
        return {name: score.clone() for name, score in outputs.items()}

    def logits(self, part: MicroBatch, kernel: Kernel | None) -> Tensor:
        """Return logits [P, V], for comparison with the model's own while nothing wraps this module."""
        hidden = self._hidden_rows(part) if kernel is None else self._hidden(Pass(part, torch.ones(0), kernel), kernel)
        return self._head(hidden.index_select(0, torch.from_numpy(part.source).to(self.model.device)))

    def _hidden(self, call: Pass, kernel: Kernel) -> Tensor:
        """Return [T, d], computed with all nodes in one row."""
        part, device = call.part, self.model.device
        calls = together(segments(part), waiting(call.context)) if self._stateful else ()
        self._passing.current = tree = Tree(kernel, call.context, call.fresh, calls)
        positions = part.position_ids[None] if part.axes is None else part.axes[:, None]
        hidden: Tensor = decoder_of(self.model)(
            **self._inputs(part, part.token_ids[None]),
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=False,
        ).last_hidden_state
        self._check(tree)
        return hidden[0]

    def _inputs(self, part: MicroBatch, ids: NDArray[np.int32]) -> dict[str, Any]:
        """Return the decoder's arguments for ids int32[B, T]: the ids, or embeddings with features of images.

        Raises DataError for images without a tower.
        """
        device = self.model.device
        if part.table is None or not (ids >= OWN).any():
            return {"input_ids": torch.from_numpy(ids).long().to(device)}
        if self.vision is None:
            raise DataError(
                f"a step to train has images, and {type(self.model).__name__} sees none here: take a model with a "
                "vision tower as model.path; of one built by model.build, set training.vision=train"
            )
        return self.vision.inputs(self.model, ids, part.table)

    def _hidden_rows(self, part: MicroBatch) -> Tensor:
        """Return [T, d], computed with each sequence as a row, padded at the end, where causal layers need no mask."""
        if part.table is not None and self.vision is not None and self.vision.both_ways:
            raise ConfigError(
                f"{type(self.model).__name__} attends in both directions inside images, and its layers cannot share "
                f"prefixes ({self.why_not_shared}); it cannot be trained with images"
            )
        place, shape = rows(part)
        ids = np.zeros(math.prod(shape), np.int32)
        ids[place] = part.token_ids
        device, positions = self.model.device, dict[str, Tensor]()
        if part.axes is not None:
            axes = np.zeros((3, len(ids)), np.int64)
            axes[:, place] = part.axes
            positions["position_ids"] = torch.from_numpy(axes).view(3, *shape).to(device)
        hidden: Tensor = decoder_of(self.model)(
            **self._inputs(part, ids.reshape(shape)), **positions, use_cache=False
        ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, torch.from_numpy(place).to(device))

    def _check(self, tree: Tree) -> None:
        """Raise ConfigError for a layer that neither attended through the tree, with its window, nor walked it."""
        config, name = self.model.config.get_text_config(), type(self.model).__name__
        used, mixing = tree.walked | tree.attended.keys(), mixing_layers(config)
        if missing := len(mixing - used):
            raise ConfigError(
                f"{len(mixing) - missing} of {len(mixing)} layers of {name} attended through the prefix "
                "tree; the others would mix sequences"
            )
        for layer, window in tree.attended.items():
            if slides(config, layer) and window is None:
                raise ConfigError(
                    f"layer {layer} of {name} has a sliding window that it does not pass to its attention"
                )


def rows(part: MicroBatch) -> tuple[Indices, tuple[int, int]]:
    """Return the positions of nodes with each sequence as a padded row: int64[T], and (rows, width)."""
    starts = np.append(np.flatnonzero(part.position_ids == 0), len(part.token_ids))
    lengths = np.diff(starts)
    width = int(lengths.max())
    return np.repeat(np.arange(len(lengths)) * width, lengths) + part.position_ids, (len(lengths), width)


def _checkpoint(model: PreTrainedModel, *, enable: bool) -> None:
    """Switch gradient checkpointing; transformers 5 renamed its methods, and the old names warn."""
    if enable:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
    else:
        (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
        # Set by enabling, but not undone by disabling.
        model.disable_input_require_grads()
