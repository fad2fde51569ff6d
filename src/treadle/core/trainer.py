"""Interfaces to the learner: `Trainer`, which owns the weights, and `WeightSync`, which publishes them to engines.

    groups -> Trainer.train_batch -> WeightSync.publish(version + 1) -> Trainer.stage(destination) -> engines

Nothing here names a tensor library: only plain picklable data crosses these interfaces, so that a trainer may be an
object in this process, another process, or a group of processes that shard one model.

A trainer has three sets of weights. They coincide for a whole model trained in one process, and differ with
adapters and shards (`treadle.models.weights` defines them for a model in this process):

    trained     weights that the optimizer updates
    published   weights that engines serve: `stage`, `digest`, `score`
    saved       weights in a checkpoint or an export: `save`, `load`, `export`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from treadle.core.engine import ComponentStatus
from treadle.core.files import Manifest
from treadle.core.images import PromptImage
from treadle.core.metrics import Measures
from treadle.core.types import Floats, Group, Ids, Mask, Routing

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

ConversationCall = tuple[Ids, Ids, *tuple[PromptImage, ...]]
"""Prompt ids, completion ids, and the images of the prompt."""
Conversation = Sequence[ConversationCall]
"""Each assistant turn of a demonstration."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Values computed by one update for the C sampled tokens of a step it trained.

    update: number in the run, from 1. step: number in the trajectory.
    logprobs   float32[C]  log-probabilities by the learner, before the update
    entropy    float32[C]  entropy of the distribution that each token is drawn from, in nats
    advantage  float32[C]  weight of each token in the loss
    ratio      float32[C]  ratio to the policy that the loss compares with, before clipping; None without one
    clipped    bool[C]     whether the loss bounded that ratio; None if it never does

    Untrained tokens (`Step.mask`) have values too, but nothing depends on them.
    """

    update: int
    group_id: str
    trajectory_id: str
    step: int
    logprobs: Floats
    entropy: Floats
    advantage: Floats
    ratio: Floats | None
    clipped: Mask | None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of one optimizer update.

    metrics: metrics of the trained tokens (`training.metrics`). advantage: trajectory_id -> mean over its trainable
    tokens, if any. refused: trajectory_id -> why it could not be trained. traces: steps of traced groups, in order.
    """

    metrics: Measures
    advantage: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)
    traces: tuple[StepTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model without its weights.

    vocabulary: upper bound of token ids. context: maximum length of a sequence, in tokens. parameters: their number,
    tied ones counted once. shapes: shapes of the published weights, by name. expert_layers: hidden layers, from 0, with
    routing reported by engines and replayed by the trainer; None without `training.routing_replay`.
    decoding_gap: largest difference of log-probabilities, in nats, between computing single tokens (sampling) and
    several (scoring), with its cause; None if the layers have no such difference.
    """

    vocabulary: int
    context: int
    parameters: int
    shapes: Mapping[str, tuple[int, ...]]
    expert_layers: tuple[int, ...] | None = None
    decoding_gap: tuple[float, str] | None = None

    @property
    def publishes_adapters(self) -> bool:
        """Return whether the published weights are LoRA adapters."""
        return any(".lora_A." in name for name in self.shapes)


class WeightsDestination(Protocol[R_co]):
    """Writes published weights where engines fetch them: a small picklable object, used where the weights are."""

    def write(self, described: Mapping[str, Any], weights: Iterable[tuple[str, Any]]) -> R_co:
        """Write (name, tensor) pairs, in the order of names; return the result of `stage`, which must be picklable.

        described: object with dtype and shape per name. Consume all pairs: sharded tensors are gathered as they are
        read. Tensors belong to the trainer; copy them to keep them. Raises EngineError.
        """


class WeightSource(Protocol):
    """Provides engines with a model's weights: a `Trainer`, or a model that is only sampled from."""

    @property
    def model(self) -> ModelInfo:
        """Return the model's sizes and the shapes of its published weights."""

    async def stage(self, destination: WeightsDestination[R]) -> R:
        """Have the destination write the published weights; returns its result, and passes on its errors."""

    async def score(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probability of ids[1:] under the published weights: int32[T] -> float32[T - 1].

        images: those among the ids. Computed in float32 whatever the precision of training, because rounding might hide
        wrong weights; in bfloat16 if `training.precision` is bfloat16_pure.
        """

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write the saved weights as a new directory that transformers and `model.path` load.

        The directory is complete, with tokenizer and manifest, or absent. more: additional files, by name.
        Raises CheckpointError if the directory exists or the disk refuses.
        """


class Trainer(WeightSource, Protocol):
    """Owns the trained weights, the optimizer and all other state of an update.

    Calls are made one at a time: a trainer need not guard against concurrent calls. A trainer that computes on a thread
    or in other processes never blocks the event loop.
    """

    @property
    def checkpoint_bytes(self) -> int:
        """Return the approximate size of one checkpoint on disk, in bytes."""

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Apply the updates between two publications to the trained weights; returns one result per update.

        Raises TrainingStopped if an update cannot be made; the weights then remain unchanged by it.
        """

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        """Apply one step of the warm start to the trained weights, on assistant tokens only.

        step: number from 0; the warm start has its own optimizer, which lasts from the first step to the last.
        Returns the mean loss before the step, in nats per token. Raises TrainingStopped as `train_batch` does.
        """

    async def experts(self, ids: Ids) -> Routing:
        """Return the experts chosen for each token, computed as `score`: int32[T] -> int16[T, M, k], M layers."""

    async def digest(self) -> str:
        """Return the SHA-256 (hex) of the published weights: names, dtypes, shapes and bytes, in the order of names."""

    async def save(self, directory: Path) -> str:
        """Write a checkpoint: the saved weights and all other state that `load` needs to continue bit for bit.

        The directory is complete, with its manifest, or absent; an unreferenced one of that name is replaced. Returns
        the manifest's digest. Raises CheckpointError and then leaves nothing behind.
        """

    async def load(self, saved: Manifest) -> None:
        """Continue from a checkpoint of `save`, or start with the weights of an `export`.

        Raises DamageError for damaged files, CheckpointError for another model or tokenizer. After an error, the
        trainer must not be used again.
        """

    def status(self) -> Sequence[ComponentStatus]:
        """Return the current load, one entry per process. Never blocks; thread-safe."""

    def close(self) -> None:
        """Release threads, processes and memory. Idempotent."""


class WeightSync(Protocol):
    """Makes the engines serve the trainer's weights.

    A publication has these steps, in this order; implementations skip those that do not apply to them:

        1. stage    the trainer writes the published weights where engines can fetch them; engines keep sampling
        2. score    the trainer scores a probe under them (for engines that do not run Treadle's own code)
        3. pause    engines stop between two tokens
        4. load     engines copy the weights in
        5. resume   calls in flight continue, with their caches kept or recomputed (`engine.in_flight`)
        6. prove    engines must reproduce the trainer's scores of the probe
        7. admit    completions of the new weights are released, and report their version

    A failure in step 1 or 2 changes nothing. A failure in 3 to 6 restores the previous version and resumes; if there is
    none or restoring fails, the engine refuses every call. No caller ever gets a token of weights that were not
    admitted, and a token's version is always the version that sampled it.
    """

    async def publish(self, version: int) -> None:
        """Make every engine serve the trainer's weights as this version; return once admitted. Raises EngineError."""
