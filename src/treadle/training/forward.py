"""`Forward`: log-probabilities of packed pairs, and their gradient, at bounded memory.

    PrefixTree --chunks(budget)--> MicroBatch --decoder, tree attention--> hidden [T, d] --pair_logprobs--> [P]

A tree that fits the token budget takes one forward and one backward pass. A larger one is streamed: a first pass
without gradient keeps every node's keys and values; then, from the last chunk to the first, each is recomputed with its
ancestors' keys and values as leaves, and their gradients flow into the chunks that made them. That is exact for any
loss, because only its gradient by the pairs' log-probabilities is needed.

Shapes: T nodes of a micro-batch, P pairs of a tree, N completion tokens of an update, d hidden size.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError
from treadle.core.images import BothWays, ImageIds, PromptImage
from treadle.core.support import Probabilities, Support
from treadle.core.types import Floats, Ids, Routing
from treadle.models.routing import Routers
from treadle.models.support import refuse_randomness
from treadle.models.vision import Tower, pixels_problem
from treadle.packing.flat import PackedCall
from treadle.packing.layout import MicroBatch, Packing, Sharing, arrange, chunks, costs, cuts, lay_out, row_batches
from treadle.packing.tree import PrefixTree, depth_first
from treadle.training.attention.interface import Kernel, Past, Shape, Store
from treadle.training.attention.select import kernel_for
from treadle.training.lm_head import MostProbable
from treadle.training.objective import Gradient, LossGradients, TokenScores, joined
from treadle.training.scorer import Pass, Scorer, rows


class Forward:
    """A model's forward and backward pass over prefix trees, a budget of tokens at a time.

    A model with layers that cannot share prefixes (`support.why_not_packable`) keeps its own attention and computes
    each step as a padded row, with a warning. half: run in bfloat16. make_kernel: tree attention for a shape; default:
    the device's. routing: replay the experts recorded in trees; without a recorded choice, the model chooses.
    value_head, vision: see `Scorer`. Models on the meta device are not probed here; their weights are loaded later.

    Invariant: between calls the model is unchanged, except for gradients.
    Raises ConfigError for a model with dropout, or one that computes something else with tree attention than with its
    own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int,
        gradient_checkpointing: bool = False,
        half: bool = False,
        make_kernel: Callable[[Shape], Kernel] | None = None,
        routing: bool = False,
        value_head: nn.Linear | None = None,
        vision: Tower | None = None,
    ) -> None:
        self.budget, self.half, self.gradient_checkpointing = budget, half, gradient_checkpointing
        self._make_kernel = make_kernel
        self._routers = Routers.of(model) if routing else None
        self.scorer = Scorer(model, value_head, vision)
        refuse_randomness(model)
        # Of several ranks, the first one has the weights.
        if model.device.type != "meta":
            self._probe()
        if not self.shares:
            warnings.warn(
                f"{type(model).__name__} cannot share prefixes ({self.scorer.why_not_shared}): it is trained with "
                "packing 'step'",
                # One location for warm start and learner, so that it is shown once.
                stacklevel=1,
            )

    def configured(self, budget: int) -> Forward:
        """Return another `Forward` on the same module, in the model's precision, without gradient checkpointing."""
        other = copy.copy(self)
        other.budget, other.half, other.gradient_checkpointing = budget, False, False
        return other

    def choosing(self) -> Forward:
        """Return another `Forward` on the same module that lets the model choose experts instead of replaying them."""
        other = copy.copy(self)
        other._routers = None
        return other

    @property
    def model(self) -> PreTrainedModel:
        return self.scorer.model

    @property
    def shares(self) -> bool:
        """Return whether prefixes are shared; otherwise each call is a separate row."""
        return self.scorer.why_not_shared is None

    @property
    def routing(self) -> tuple[int, int, int] | None:
        """Return the replayed layers with experts, experts per token, experts per layer; None without replay."""
        routers = self._routers
        return None if routers is None else (routers.layers, routers.top_k, routers.experts)

    @property
    def expert_layers(self) -> tuple[int, ...] | None:
        """Return the numbers of the hidden layers with replayed experts; None without replay."""
        return None if self._routers is None else self._routers.numbers

    def trees(self, calls: Sequence[PackedCall], packing: Packing, sharing: Sharing) -> list[PrefixTree]:
        """Lay out calls for this model. Raises DataError for a call that cannot be laid out.

        The first images are probed (`models.vision.pixels_problem`).
        """
        self._look_at(calls)
        for call in calls:
            if call.table is not None:
                call.table.tower = self._tower
        if self.shares:
            return lay_out(calls, packing, sharing, self.budget)
        return row_batches(arrange(calls, Packing.STEP), self.budget)

    def _look_at(self, calls: Sequence[PackedCall]) -> None:
        scorer = self.scorer
        seen = next((call for call in calls if call.table is not None), None)
        if scorer.looked or scorer.vision is None or seen is None or seen.table is None:
            return
        scorer.looked = True  # before it lays out calls itself
        [(image, _), *_] = seen.table.among(seen.token_ids)
        vocabulary = self.model.config.get_text_config().vocab_size
        if why := pixels_problem(self.exact_logprobs, image, scorer.vision.processor, vocabulary, self._tolerance):
            raise ConfigError(
                f"{type(self.model).__name__} {why}: it would be trained without seeing; take another model"
            )

    def passes(self, tree: PrefixTree) -> int:
        """Return the number of forward passes for a tree: one, if it fits the budget."""
        return max(1, len(cuts(tree, self._chunk_size(tree), self._whole_images(tree))))

    def exact_logprobs(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probability of ids[1:]: int32[T] -> float32[T - 1], without autocast.

        images: those among the ids.
        """
        exact = self.configured(len(ids) * (1 + self._tower))
        call = replace(PackedCall.of(ids, ids[:0], 0, images=images, table=ImageIds()), prompt_length=1)
        [tree] = exact.trees([call], Packing.STEP, Sharing.TRAJECTORY)
        return np.asarray(exact.scores(tree, torch.ones(len(ids) - 1)).logp.cpu().numpy(), np.float32)

    def experts(self, ids: Ids) -> Routing:
        """Return the routers' choice of experts, without autocast: int32[T] -> int16[T, M, k]."""
        assert self._routers is not None, "the caller asks only if experts are replayed"
        with self._routers.choosing() as chosen:
            self.exact_logprobs(ids)
        return torch.stack(chosen, 1)[: len(ids)].cpu().numpy().astype(np.int16)

    def scores(
        self,
        tree: PrefixTree,
        temperature: Tensor,
        passes: int = 1,
        top: Tensor | MostProbable | None = None,
        support: Support | None = None,
    ) -> TokenScores:
        """Compute a tree without gradient. temperature [N]: of all pairs; its dtype is the result's.

        passes: minimum number of passes, if several ranks must make equally many; a tree may then be empty.
        top: other tokens to score, int64[N, k] of all pairs, or how to choose them. support: of all pairs.
        """
        parts = self._chunks(tree, passes)
        with self.scorer.ready(), torch.no_grad():
            return self._first_pass(parts, temperature, _store(parts), top, support)

    def backward(
        self,
        tree: PrefixTree,
        temperature: Tensor,
        gradient: Gradient,
        entropy_grad: bool = False,
        passes: int = 1,
        top: Tensor | None = None,
        support: Support | None = None,
        sampler: Probabilities | None = None,
    ) -> TokenScores:
        """Add a loss's gradient to the parameters' `.grad`; return the scores it was computed at.

        temperature [N], passes, top, support: as for `scores`; several passes are made twice. gradient: scores of some
        tokens, or of none -> the loss's gradient by them, which is all that is needed of it. entropy_grad: whether
        `gradient` also returns a gradient by entropies. sampler: of all pairs, if it returns one by expectations under
        it.
        """
        parts = self._chunks(tree, passes)
        with self.scorer.ready(self.gradient_checkpointing):
            if len(parts) > 1:
                return self._stream(parts, temperature, gradient, entropy_grad, top, support, sampler)
            with self._replayed(parts[0]):
                attached = self._pairs(parts[0], temperature, entropy_grad, top, support, sampler)
                scores = replace(attached.detached(), expected=None)
                _propagate(attached, gradient(scores))
        return scores

    def _chunks(self, tree: PrefixTree, passes: int) -> list[MicroBatch]:
        return chunks(tree, self._chunk_size(tree), passes, self._whole_images(tree))

    def _whole_images(self, tree: PrefixTree) -> bool:
        """Return whether no image is cut: one seen both ways cannot be, and a trained tower would compute it twice."""
        return bool(self._tower or self._both_ways(tree))

    def _both_ways(self, of: PrefixTree | MicroBatch) -> BothWays:
        vision = self.scorer.vision
        return "" if of.table is None or vision is None else vision.both_ways

    @property
    def _tower(self) -> int:
        """Tokens of a trained tower for each placeholder."""
        return 0 if self.scorer.vision is None else self.scorer.vision.trained_tokens

    def _chunk_size(self, tree: PrefixTree) -> int:
        """Return what a piece may cost; a model that cannot share computes every tree in one."""
        return self.budget if self.shares else max(int(costs(tree).sum()), 1)

    # --- streaming ---

    def _first_pass(
        self,
        parts: Sequence[MicroBatch],
        temperature: Tensor,
        store: Store,
        top: Tensor | MostProbable | None,
        support: Support | None,
    ) -> TokenScores:
        """Compute without gradient, first chunk to last; `store` then has all keys and values if there are several."""
        computed = []
        for part in parts:
            fresh = Past() if len(parts) > 1 else None
            with self._replayed(part):
                context = store.at(part.context)
                computed.append(self._pairs(part, temperature, False, top, support, None, context, fresh))
            if fresh is not None:
                store.put(part, fresh)
        return joined(computed)

    def _stream(
        self,
        parts: Sequence[MicroBatch],
        temperature: Tensor,
        gradient: Gradient,
        entropy_grad: bool,
        top: Tensor | None,
        support: Support | None,
        sampler: Probabilities | None,
    ) -> TokenScores:
        store = _store(parts)
        with torch.no_grad():
            scores = self._first_pass(parts, temperature, store, top, support)
        slopes = gradient(scores)
        bounds = np.cumsum([0, *(len(part.flat) for part in parts)]).tolist()
        for part, (first, end) in reversed(list(zip(parts, pairwise(bounds), strict=True))):
            context = store.leaves(part.context)
            fresh = Past()
            with self._replayed(part):
                attached = self._pairs(part, temperature, entropy_grad, top, support, sampler, context, fresh)
                _propagate(attached, slopes.at(slice(first, end)), *store.pending(part, fresh))
            store.collect(part.context, context)
        return scores

    # --- one forward pass ---

    @contextmanager
    def _replayed(self, part: MicroBatch) -> Iterator[None]:
        """Have the model use the part's recorded experts inside the block.

        The backward pass belongs inside, because it may recompute layers.
        """
        if self._routers is None or part.routing is None:
            yield
            return
        wanted = part.routing
        if not self.shares:
            place, shape = rows(part)
            wanted = np.full((math.prod(shape), *wanted.shape[1:]), -1, np.int16)
            wanted[place] = part.routing
        with self._routers.choosing(torch.from_numpy(wanted).long().to(self.model.device)):
            yield

    def _pairs(
        self,
        part: MicroBatch,
        temperature: Tensor,
        entropy_grad: bool,
        top: Tensor | MostProbable | None,
        support: Support | None,
        sampler: Probabilities | None = None,
        context: Past | None = None,
        fresh: Past | None = None,
    ) -> TokenScores:
        call = Pass(
            part,
            temperature,
            self._kernel(part),
            half=self.half,
            entropy_grad=entropy_grad,
            context=context,
            fresh=fresh,
            top=top,
            support=support,
            sampler=sampler,
        )
        return TokenScores(part.flat, **self.scorer(call))

    def _kernel(self, part: MicroBatch) -> Kernel | None:
        return (
            (self._make_kernel or kernel_for(self.model.device))(Shape.of(part, self._both_ways(part)))
            if self.shares
            else None
        )

    # --- what could be silently wrong ---

    def _probe(self) -> None:
        """Share prefixes only if short packed sequences have the same logits as in the unmodified model.

        Raises ConfigError if they differ even as rows.
        """
        scorer, name = self.scorer, type(self.model).__name__
        if self.shares:
            try:
                gap = self._gap()
            except ConfigError as error:
                scorer.why_not_shared = str(error)
            else:
                if not gap < self._tolerance:
                    scorer.why_not_shared = f"its logits differ by {gap:.1%} when packed"
        if not self.shares and not (gap := self._gap()) < self._tolerance:
            raise ConfigError(
                f"{name} computes other logits in a batch than alone (they differ by {gap:.1%}): its attention, "
                "positions or head work in a way unknown to Treadle"
            )

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self.model.dtype.itemsize >= 4 else 0.1

    def _gap(self) -> float:
        """Return the difference of logits, packed and alone, relative to their norm."""
        model = self.model
        size = model.config.get_text_config().vocab_size
        # Ordinary ids: the first ones and the last are often special tokens, with embeddings that half precision rounds
        # away.
        sequences = [
            (np.array(ids, np.int32) + size // 2) % size
            for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 3, 8, 9])
        ]
        calls = [PackedCall(ids, 1, 0) for ids in sequences]
        order, shared = depth_first(calls, [0] * 3) if self.shares else (list(range(3)), np.zeros(3, np.int64))
        [part] = chunks(PrefixTree.of([calls[i] for i in order], shared), 32)
        with torch.no_grad():
            alone = self.scorer.own_logits([torch.from_numpy(ids).long()[None].to(model.device) for ids in sequences])
            with self.scorer.ready():
                packed = self.scorer.logits(part, self._kernel(part))
        expected = torch.cat([alone[i][:-1] for i in order]).float()
        return float((packed.float() - expected).norm() / expected.norm())


def _store(parts: Sequence[MicroBatch]) -> Store:
    return Store(sum(len(part.token_ids) for part in parts))


def _propagate(
    scores: TokenScores, slopes: LossGradients, more: Sequence[Tensor] = (), by_more: Sequence[Tensor] = ()
) -> None:
    """Back-propagate from everything that has a gradient."""
    roots: list[tuple[Tensor | None, Tensor | None]] = [
        (scores.logp, slopes.logp),
        (scores.entropy, slopes.entropy),
        (scores.value, slopes.value),
        (scores.expected, slopes.expected),
        (scores.top, slopes.top),
        *zip(more, by_more, strict=True),
    ]
    live = [(x, by_x) for x, by_x in roots if x is not None and by_x is not None and x.requires_grad]
    if live:
        torch.autograd.backward([root for root, _ in live], [gradient for _, gradient in live])
