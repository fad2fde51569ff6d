"""Models that score the policy's tokens and are not optimized: the reference of `algorithm.kl`, and the teacher.

a model of its own ------------------------------+
the policy's copy, or its adapters' -------------+-> Frozen -> Learner scores its tokens, once per update
the current policy ------------------------------+      ^-- after_update: nothing, a reset, a moving average
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.algorithms.config import DistillationConfig, KlConfig
from treadle.core.errors import ConfigError
from treadle.models.vision import Tower
from treadle.models.weights import adapter_weights, copy_by_name, model_sha256, replaced, saved
from treadle.training.config import TrainingConfig
from treadle.training.forward import Forward
from treadle.training.ranks import Ranks, ReadWeights
from treadle.training.teacher_prompts import TeacherPrompts, Truths

if TYPE_CHECKING:
    from treadle.training.teacher_server import TeacherServer


class Frozen:
    """A model that scores the policy's tokens. `Learner` opens it with the policy's forward pass.

    given: a separate model, vision: its tower; None: a copy of the current policy, or only of its adapters if it has
    any. current: use the policy of each update, without a copy.
    reset_every: updates between resets to the policy. ema_decay: decay of its moving average of the policy per update.
    """

    forward: Forward

    def __init__(
        self,
        policy: PreTrainedModel,
        given: PreTrainedModel | None = None,
        vision: Tower | None = None,
        *,
        current: bool = False,
        reset_every: int | None = None,
        ema_decay: float | None = None,
    ) -> None:
        self.given, self._vision, self._policy, self._current = given, vision, policy, current
        self._reset_every, self._ema_decay = reset_every, ema_decay
        copied = given is None and not current and not adapter_weights(policy)
        self._module = copy.deepcopy(policy) if copied else given  # before the policy is sharded
        self._adapter: dict[str, Tensor] = {}

    def open(
        self, policy: Forward, ranks: Ranks, training: TrainingConfig, half: bool, read: ReadWeights | None
    ) -> None:
        """Shard its model, or share the sharded policy's. half, read: as for `Ranks.shard`."""
        if self._module is not None:
            module = self._module.requires_grad_(False)
            if self.given is None and (seen := policy.scorer.vision) is not None:
                self._vision = Tower(module, seen.processor) if seen.trained else seen
            half_passes = training.precision == "bfloat16"
            self.forward = Forward(module, policy.budget, half=half_passes, vision=self._vision)
            ranks.shard(self.forward, half=half, read=read if self.given is None else None)
            return
        self.forward = policy.choosing()
        if not self._current:
            self._adapter = {name: tensor.clone() for name, tensor in adapter_weights(self._policy).items()}

    @contextmanager
    def in_place(self) -> Iterator[Forward]:
        """Yield the forward pass with its weights; the policy's adapters may be replaced inside the block."""
        if not self._adapter:
            yield self.forward
            return
        with replaced(self._policy, self._adapter):
            yield self.forward

    def weights(self) -> dict[str, Tensor]:
        """Return name -> tensor, not copied, of its own weights; {} for the current policy."""
        return {} if self._current else self._adapter or saved(self.forward.model)

    def refresh(self) -> None:
        """Reset to the policy."""
        copy_by_name(self.weights(), saved(self._policy))
        self.changed()

    def changed(self) -> None:
        """Call after its own weights changed."""
        if self._vision is not None:
            self._vision.changed()

    def begin_here(self) -> None:
        """Call after weights changed outside updates; refreshes a copy of the policy."""
        if self.given is None:
            self.refresh()

    @torch.no_grad()
    def after_update(self, updates: int) -> None:
        """Follow the policy. updates: number made so far."""
        if self._reset_every and updates % self._reset_every == 0:
            self.refresh()
        if self._ema_decay is not None:
            policy = saved(self._policy)
            for name, tensor in self.weights().items():
                tensor.mul_(self._ema_decay).add_(policy[name], alpha=1 - self._ema_decay)
            self.changed()


@dataclass(slots=True)
class Teacher:
    """Teacher of `algorithm.distillation`: a model, or a server called by the first rank.

    prompts: prompts of `distillation.context`; None: the policy's. truths: texts of form `turns`. sha256: digest of a
    given model's weights, once open.
    """

    frozen: Frozen | None = None
    server: TeacherServer | None = None
    prompts: TeacherPrompts | None = None
    truths: Truths | None = None
    sha256: str | None = None

    def weights(self) -> dict[str, Tensor]:
        """Return name -> tensor, not copied, of an earlier policy; {} for any other teacher, which never changes."""
        return {} if self.frozen is None or self.frozen.given is not None else self.frozen.weights()

    def open(
        self, policy: Forward, ranks: Ranks, training: TrainingConfig, half: bool, read: ReadWeights | None
    ) -> None:
        if self.frozen is None:
            return
        # Of several ranks, the first one has the weights.
        if (given := self.frozen.given) is not None:
            self.sha256 = ranks.every(lambda: "" if ranks.rank else model_sha256(given))[0]
        self.frozen.open(policy, ranks, training, half, read)


def make_reference(
    config: KlConfig | None,
    policy: PreTrainedModel,
    given: PreTrainedModel | None = None,
    vision: Tower | None = None,
) -> Frozen | None:
    """Return the reference of `algorithm.kl`; None without one. given: replaces a copy of the current policy. vision:
    its tower.

    Raises ConfigError if a given model should be reset to the policy but cannot become it.
    """
    if config is None:
        return None
    if config.reset_every is not None and given is not None and _shapes(given) != _shapes(policy):
        raise ConfigError(
            f"algorithm.kl.reset_every is {config.reset_every}, but algorithm.kl.model has other weights than the "
            "trained model and cannot become it; leave reset_every out, or take a reference of the same architecture"
        )
    return Frozen(policy, given, vision, reset_every=config.reset_every)


def make_teacher(
    config: DistillationConfig | None,
    policy: PreTrainedModel,
    given: PreTrainedModel | None = None,
    server: TeacherServer | None = None,
    prompts: TeacherPrompts | None = None,
    truths: Truths | None = None,
    vision: Tower | None = None,
) -> Teacher | None:
    """Return the teacher of `algorithm.distillation`; None without one. given, server: the model that it names, with
    its tower.
    """
    if config is None:
        return None
    if config.teacher is not None and given is None:
        return Teacher(server=server, prompts=prompts, truths=truths)
    decay = config.ema_decay if config.weights == "ema" else None
    current = given is None and config.weights == "current"
    return Teacher(Frozen(policy, given, vision, current=current, ema_decay=decay), prompts=prompts, truths=truths)


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in saved(model).items()}
