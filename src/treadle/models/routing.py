"""The routers of a mixture-of-experts model: recording or prescribing their choice of experts.

Shapes: T tokens of a forward pass, M layers with experts, k experts a token.

A router in transformers returns (logits, weights, indices), and its last `torch.topk` is its choice. Only that call is
watched or replaced: weights of given experts are computed, and trained, like those of chosen ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError

_TOPK = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """Inside a router's forward pass: gives the `last` top-k the experts `wanted` int64[T, k], where they are not -1.

    calls: number of top-k so far. chosen int64[T, k]: result of the latest one. experts: number to choose from.
    """

    def __init__(self, wanted: Tensor | None = None, last: int = 0) -> None:
        super().__init__()
        self.wanted, self.last = wanted, last
        self.calls = self.experts = 0
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        self.calls += 1
        self.experts, self.chosen = args[0].shape[-1], result.indices
        if self.wanted is None or self.calls != self.last:
            return result
        self.chosen = torch.where(self.wanted < 0, result.indices, self.wanted)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


@dataclass(frozen=True, slots=True, eq=False)
class Routers:
    """A model's routers, in the order of its layers.

    layers: M. top_k: k. experts: number per layer. topks: top-k calls per router. numbers: hidden layers they belong
    to, from 0.
    """

    modules: tuple[nn.Module, ...]
    top_k: int
    experts: int
    topks: int
    numbers: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.modules)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """Return a model's routers.

        Raises ConfigError for a model without experts, or with routers that do not work as described above.
        """
        name, named = type(model).__name__, _routers(model)
        modules = tuple(named.values())
        if not modules:
            raise ConfigError(f"{name} has no experts to replay; set training.routing_replay to false")
        kinds = {_kind(module, model) for module in modules}
        kind = kinds.pop()
        if kinds or kind is None:
            raise ConfigError(
                f"{name} chooses experts in a way that Treadle cannot replay ({type(modules[0]).__name__}); "
                "set training.routing_replay to false"
            )
        return cls(modules, *kind, tuple(next(int(p) for p in name.split(".") if p.isdigit()) for name in named))

    @contextmanager
    def choosing(self, wanted: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Yield a list of the routers' choices, int64[T, k] per layer, filled by the first forward pass inside.

        The routers choose `wanted` int64[T, M, k]; where that is -1, or without it, they choose themselves.
        """
        chosen: list[Tensor] = []
        with ExitStack() as undo:
            for layer, module in enumerate(self.modules):
                experts = None if wanted is None else wanted[:, layer]
                _replace_forward(module, _watched(module.forward, experts, self.topks, chosen), undo)
            yield chosen


def _watched(forward: Callable[..., Any], experts: Tensor | None, topks: int, chosen: list[Tensor]) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _Choice(experts, topks) as choice:
            answer = forward(*args, **kwargs)
        if choice.chosen is not None:
            chosen.append(choice.chosen)
        return answer

    return watched


def _replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Replace `forward` on the instance; an earlier replacement by other code is restored afterwards."""
    before = vars(module).get("forward")
    object.__setattr__(module, "forward", forward)
    if before is None:
        undo.callback(object.__delattr__, module, "forward")
    else:
        undo.callback(object.__setattr__, module, "forward", before)


def _routers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return modules, by name, of the classes for which transformers records router logits."""
    named: dict[str, nn.Module] = dict(model.named_modules())
    classes: list[type] = []
    for module in named.values():
        if isinstance(module, PreTrainedModel):
            recorders: Any = (module._can_record_outputs or {}).get("router_logits", [])
            recorders = recorders if isinstance(recorders, list) else [recorders]
            classes += [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return {name: named[name] for name in named if isinstance(named[name], tuple(classes))}


def _kind(router: nn.Module, model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Return (k, experts, calls of top-k) of a router that uses prescribed experts, otherwise None."""
    hidden = model.config.get_text_config().hidden_size
    if model.device.type == "meta":  # any weights will do to observe it
        router = copy.deepcopy(router).to_empty(device="cpu")
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.data.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
    tokens = torch.linspace(-1, 1, 3 * hidden, dtype=model.dtype, device=next(router.parameters()).device)
    with torch.no_grad():
        first = _ask(router, tokens.view(3, hidden), _Choice())
        if first is None or first.chosen is None:
            return None
        second = _Choice((first.chosen + 1) % first.experts, first.calls)
        if _ask(router, tokens.view(3, hidden), second) is None:
            return None
    return first.chosen.shape[-1], first.experts, first.calls


def _ask(router: nn.Module, tokens: Tensor, choice: _Choice) -> _Choice | None:
    """Return the choice; None if the router does not return it. Some take a bias of the choice."""
    biases = [tokens.new_zeros(1) for name in inspect.signature(router.forward).parameters if name.endswith("bias")]
    try:
        with choice:
            answer = router(tokens, *biases)
    except (TypeError, ValueError):  # unexpected inputs or outputs
        return None
    if choice.chosen is None or not isinstance(answer, tuple) or len(answer) < 3:
        return None
    return choice if torch.equal(answer[2], choice.chosen) else None
