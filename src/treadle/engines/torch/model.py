"""The model of `TorchEngine` with its passes: extending cached rows, scoring, loading new weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import EngineError
from treadle.core.images import OWN, BothWays, ImageIds, PromptImage, axes, image_ends
from treadle.core.types import Floats, Ids
from treadle.engines.torch.kv_cache import ATTENTION, KVCache, KVCall
from treadle.models.passing import Passing, handed
from treadle.models.routing import Routers
from treadle.models.states import States, stateful_layers
from treadle.models.support import context_of, decoder_of, mixing_layers
from treadle.models.vision import Tower, pixels_problem
from treadle.models.weights import adapter_weights, saved

Span = tuple[int, int, int]  # row, first and last position + 1 of tokens to compute
Axes = NDArray[np.int64] | None  # positions of a sequence's tokens on three axes, int64[3, T]; None: on one, from 0 on
Reach = tuple[Tensor, BothWays] | None
MakeTower = Callable[[PreTrainedModel], Tower | None]
"""Returns the tower for an engine's copy of a model, which may contain it."""


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """Predictions after the last token of each of B rows.

    logits float32[B, V]. routing int16[B, M, k]: experts chosen there; None unless requested.
    """

    logits: Tensor
    routing: Tensor | None = None

    def put(self, rows: Tensor, values: Predicted, of: Tensor | slice = slice(None)) -> None:
        """Set rows `rows` to the rows `of` in `values`."""
        self.logits[rows] = values.logits[of]
        if self.routing is not None and values.routing is not None:
            self.routing[rows] = values.routing[of]


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """What rows show. table: of the ids that stand for placeholders. axes: of each row."""

    table: ImageIds
    axes: Sequence[Axes]


class CachedModel:
    """A copy of a Hugging Face decoder that reads and writes a `KVCache`; one with adapters shares the base's tensors.

    dtype: dtype of weights and cache; logits are always float32.
    prefill_tokens: maximum number of (padded) tokens per pass. routing: whether to report chosen experts. device:
    device to compute on; None: the model's. vision: makes the tower, for prompts with images. slow: why the model is
    computed call by call (`RowModel`); None: it is not. reuses: whether calls can start from cached sequences. blind:
    why it is shown no images; None: it can be. Raises ConfigError with routing if the choice of experts cannot be
    observed.
    """

    slow: str | None = None
    reuses = True

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        prefill_tokens: int,
        routing: bool = False,
        device: str | None = None,
        vision: MakeTower | None = None,
    ) -> None:
        adapted = bool(adapter_weights(model))
        shared: dict[int, Tensor] = {
            id(p): nn.Parameter(p.detach(), requires_grad=False)
            for name, p in model.named_parameters()
            if adapted and ".lora_" not in name
        }
        # layers of RecurrentGemma hold the states of their last pass, with a gradient if the learner made it
        left = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
        shared |= {id(value): value.detach() for value in left if not value.is_leaf}
        self.model = copy.deepcopy(model, shared).requires_grad_(False).eval()
        # Not registered as buffers: rounded rotary frequencies would misplace late tokens.
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        if device is not None:
            self.model.to(device)
        self._routers = Routers.of(self.model) if routing else None
        self.prefill_tokens = prefill_tokens
        self.device = self.model.device
        self.samples_on = torch.device("cpu") if self.device.type == "mps" else self.device  # Apple's has no float64
        text = self.model.config.get_text_config()
        self.vocabulary, self.context = int(text.vocab_size), context_of(text)
        self.stateful = self._prepare()
        self._tower = None if vision is None else vision(self.model)
        self._shown: dict[str, Any] = {}  # arguments for the decoder in the next pass
        decoder_of(self.model).register_forward_pre_hook(self._show, with_kwargs=True)

    @property
    def blind(self) -> str | None:
        name = type(self.model).__name__
        return f"{name} was loaded without a part that sees images" if self._tower is None else None

    def _prepare(self) -> bool:
        """Have the layers use the engine's cache; return whether any keeps a state."""
        decoder_of(self.model).set_attn_implementation(ATTENTION)
        self._passing = Passing[KVCall]()
        self._passing.hang(self.model)
        layers = stateful_layers(self.model)
        for layer, argument in layers.items():
            vars(layer)["forward"] = _with_cached_state(layer, layer.forward, argument)
        return bool(layers)

    @torch.inference_mode()
    def cache_bytes(self) -> tuple[int, int]:
        """Compute one cached position; return its size and the size of a row's states, in bytes.

        Raises EngineError, or ConfigError, for layers that do not use the engine's cache.
        """
        cache = KVCache(1, 1)
        self.extend(cache, slice(0, 1), [np.zeros(1, np.int32)], [0])
        mixing = mixing_layers(self.model.config)
        if missing := len(mixing - cache.layers.keys() - cache.states.layers.keys()):
            raise EngineError(
                f"{missing} of {len(mixing)} layers of {type(self.model).__name__} did not read the engine's cache, "
                "but attend or keep states in their own way"
            )
        return cache.position_bytes(), cache.states.row_bytes()

    def empty(self, rows: int) -> Predicted:
        logits = torch.empty(rows, self.vocabulary, device=self.device)
        if self._routers is None:
            return Predicted(logits)
        shape = (rows, self._routers.layers, self._routers.top_k)
        return Predicted(logits, torch.empty(shape, dtype=torch.int16, device=self.device))

    def extend(
        self,
        cache: KVCache,
        rows: slice | Tensor,
        chunks: Sequence[Ids],
        starts: Sequence[int],
        pictures: Pictures | None = None,
    ) -> Predicted:
        """Append chunks[i] at position starts[i] of each row; return the predictions after each chunk.

        Chunks are padded on the left, so that every row's last token is in the last column; padding is written to the
        cache's last position, which no real query attends to. For a model with states, chunks must have one length, and
        either all or none start at position 0. pictures: of the rows; None: chunks are text.
        """
        width = max(map(len, chunks))
        ids = np.zeros((len(chunks), width), np.int64)
        positions = np.full((len(chunks), width), cache.capacity - 1, np.int64)
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            ids[row, width - len(chunk) :] = chunk
            positions[row, width - len(chunk) :] = np.arange(start, start + len(chunk))
        length = max(start + len(chunk) for chunk, start in zip(chunks, starts, strict=True))
        call = KVCall(cache, rows, torch.from_numpy(positions).to(self.device), length, not any(starts))
        if pictures is None:
            return self.forward(call, torch.from_numpy(ids))
        if any(each is not None for each in pictures.axes):
            places = np.broadcast_to(positions, (3, *positions.shape)).copy()
            for row, (each, chunk, start) in enumerate(zip(pictures.axes, chunks, starts, strict=True)):
                if each is not None:
                    places[:, row, width - len(chunk) :] = each[:, start : start + len(chunk)]
            call.places = torch.from_numpy(places).to(self.device)
        call.reach = self._reach(ids, positions)
        return self.forward(call, self._plain(ids, pictures.table))

    def _reach(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Reach:
        """Return `KVCall.reach` for ids [B, C] at these positions. A chunk has all of an image or nothing of it."""
        if self._tower is None or ids.max() < OWN or not (both_ways := self._tower.both_ways):
            return None
        columns = np.arange(ids.shape[1])
        ahead = np.stack([image_ends(row, where) - 1 - columns for row, where in zip(ids, positions, strict=True)])
        return torch.from_numpy(positions + ahead).to(self.device), both_ways

    def forward(self, call: KVCall, ids: Tensor) -> Predicted:
        """Return the predictions after the last column. ids: int64[B, C]."""
        self._passing.current = call
        places = call.positions if call.places is None else call.places
        return self._predict(ids, position_ids=places, use_cache=False, logits_to_keep=1)[0]

    def _plain(self, ids: NDArray[np.int64], table: ImageIds) -> Tensor:
        """Return ids [..., C] for the next pass, in which the decoder gets the features of the table's images."""
        if self._tower is None or ids.max() < OWN:
            return torch.from_numpy(ids)
        self._shown = self._tower.inputs(self.model, ids.astype(np.int32), table)
        return torch.from_numpy(np.where(ids < OWN, ids, self._tower.processor.placeholder))

    def _show(self, decoder: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        shown, self._shown = self._shown, {}
        return (args, {**named, "input_ids": None, **shown}) if shown else None

    def _predict(self, ids: Tensor, **named: Any) -> tuple[Predicted, Any]:
        """Return the predictions after the last column of int64[B, C], and all that the model answers."""
        ids = ids.to(self.device)
        with nullcontext(list[Tensor]()) if self._routers is None else self._routers.choosing() as chosen:
            answer = self.model(input_ids=ids, **named)
        logits = answer.logits[:, -1].float()
        if not chosen:
            return Predicted(logits), answer
        last = [layer.view(*ids.shape, -1)[:, -1] for layer in chosen]
        return Predicted(logits, torch.stack(last, 1).to(torch.int16)), answer

    def parts(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Cut spans into parts of at most `prefill_tokens` padded tokens, in computation order.

        Parts are consecutive; for a model with states, whose rows cannot be padded, their spans are alike in length and
        beginning. Calls with few rows are slow: if it saves calls, lengths are rounded down, and remaining tokens
        follow one by one.
        """
        if not self.stateful:
            return self._consecutive(spans)
        alike = min((_alike(spans, multiple) for multiple in (1, 2, 4, 8)), key=len)
        return [part for same in alike for part in self._consecutive(same)]

    def _consecutive(self, spans: Sequence[Span]) -> list[list[Span]]:
        parts: list[list[Span]] = []
        width = 0
        for span in spans:
            _, begin, end = span
            wider = max(width, end - begin)
            if parts and wider * (len(parts[-1]) + 1) <= self.prefill_tokens:
                parts[-1].append(span)
                width = wider
            else:
                parts.append([span])
                width = end - begin
        return parts

    def check_pixels(self, image: PromptImage) -> None:
        """Raise EngineError unless changed pixels change the log-probabilities after an image, and only those."""
        assert self._tower is not None
        tolerance = 1e-3 if self.model.dtype.itemsize >= 4 else 0.1

        def score(ids: Ids, images: Sequence[PromptImage]) -> Floats:
            return self.score(ids, 1.0, images)

        if why := pixels_problem(score, image, self._tower.processor, self.vocabulary, tolerance):
            raise EngineError(f"{type(self.model).__name__} {why}")

    @torch.inference_mode()
    def score(self, ids: Ids, temperature: float, images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probability of ids[1:] in one pass without cache: int32[T] -> float32[T - 1]."""
        table = ImageIds()
        shown = table.put(ids, images).astype(np.int64)[None]
        reach = self._reach(shown, np.arange(len(ids))[None])
        tokens = self._plain(shown, table).to(self.device)
        logits = self._logits(tokens, axes(len(ids), images), reach)[:-1].float()
        logprobs = (logits / temperature).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return np.asarray(logprobs.cpu().numpy(), np.float32)

    def _logits(self, ids: Tensor, places: Axes = None, reach: Reach = None) -> Tensor:
        """Return the logits [T, V] of int64[1, T], computed in one pass without cache."""
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        length = ids.shape[1]
        self._passing.current = KVCall(KVCache(1, length), slice(0, 1), positions, length, begins=True, reach=reach)
        told = positions if places is None else torch.from_numpy(places)[:, None].to(self.device)
        logits: Tensor = self.model(input_ids=ids, position_ids=told, use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy weights in. Raises EngineError, and changes nothing, if any are missing or of another shape."""
        mine = saved(self.model)
        unfit = sorted(name for name, t in mine.items() if name not in weights or weights[name].shape != t.shape)
        if unfit:
            raise EngineError(
                f"publication of version {version} lacks {unfit[:3]} in the engine's shapes ({len(unfit)} weights)"
            )
        for name, tensor in mine.items():
            tensor.untyped_storage().resize_(tensor.nbytes)  # no-op unless released
            tensor.copy_(weights[name])
        if self._tower is not None:
            self._tower.changed()

    def release(self) -> None:
        """Free the memory of the weights until others are loaded; with adapters, only theirs."""
        for tensor in saved(self.model).values():
            tensor.untyped_storage().resize_(0)


def _with_cached_state(layer: nn.Module, own: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """Return the layer's forward, with the states of a `KVCall`'s rows. argument: its cache parameter."""
    index = int(layer.layer_idx)  # type: ignore[arg-type]

    def forward(hidden_states: Tensor, *_: Any, **named: Any) -> Any:
        call: KVCall = handed(layer)
        states = States() if call.begins else call.cache.states.take(index, call.rows)
        named |= {argument: states, "attention_mask": None}
        answer = own(hidden_states, **named)
        call.cache.states.put(index, call.rows, states)
        return answer

    return forward


def _alike(spans: Sequence[Span], multiple: int) -> list[list[Span]]:
    """Group pieces of spans by their length and whether they begin at 0, in the order of each span.

    The first piece of a span is as long as a multiple of `multiple` can be, the others are single tokens.
    """
    alike: dict[tuple[int, int, bool], list[Span]] = {}
    for number, begin, end in spans:
        cut = end - (end - begin) % multiple
        pieces = [(begin, cut)] * (begin < cut) + [(token, token + 1) for token in range(cut, end)]
        for turn, (first, last) in enumerate(pieces, begin == cut):
            alike.setdefault((turn, last - first, not first), []).append((number, first, last))
    return [alike[key] for key in sorted(alike)]
