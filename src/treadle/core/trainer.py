"""The interfaces to what learns: `Trainer`, which owns the weights, and `WeightSync`, which gets them to the engines.

    groups -> Trainer.train_batch -> WeightSync.publish(version + 1) -> Trainer.stage(destination) -> engines

Nothing here names a tensor library: what crosses these interfaces is plain picklable data, so that a trainer may be an
object of this process, another process, or a group of them that shard one model.

A trainer has three sets of weights. They coincide for a model that is trained whole in one process, and differ with
adapters and shards (`treadle.models.weights` defines them for a model in this process):

    trained     what the optimizer moves
    published   what engines serve: `stage`, `digest`, `score`
    saved       what a checkpoint or an export holds: `save`, `load`, `export`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from treadle.core.engine import ComponentStatus
from treadle.core.files import Manifest
from treadle.core.metrics import Measures
from treadle.core.types import Floats, Group, Ids, Mask, Routing

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

Conversation = Sequence[tuple[Ids, Ids]]
"""(prompt ids, completion ids) of each assistant turn of a demonstration."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """What one update computed of the C sampled tokens of a step that it trained.

    update: its number in the run, from 1. step: its number in the trajectory.
    logprobs   float32[C]  of the learner, before the update
    entropy    float32[C]  of the distribution that each token is drawn from, in nats
    advantage  float32[C]  that the loss weighs each token with
    ratio      float32[C]  to the policy that the loss compares with, as the loss has it; None if it compares with none
    clipped    bool[C]     whether the loss bounded that ratio; None if it never does

    Tokens that are not trained (`Step.mask`) have values too, of which nothing depends.
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
    """What one optimizer update did.

    metrics: of what it trained (`training.metrics`). advantage: trajectory_id -> mean over its trainable tokens, if it
    has any. refused: trajectory_id -> why it could not be trained. traces: of the steps of traced groups, in order.
    """

    metrics: Measures
    advantage: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)
    traces: tuple[StepTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model without its weights.

    vocabulary: ids are below it. context: most tokens of a sequence. parameters: their number, tied ones once.
    shapes: of the published weights, by name. expert_layers: the hidden layers, from 0, whose experts engines report
    and the trainer replays; None without `training.routing_replay`.
    decoding_gap: by how many nats log-probabilities may differ because layers compute single tokens, as in sampling,
    otherwise than several, as in scoring, and how they do so; None: no such layers.
    """

    vocabulary: int
    context: int
    parameters: int
    shapes: Mapping[str, tuple[int, ...]]
    expert_layers: tuple[int, ...] | None = None
    decoding_gap: tuple[float, str] | None = None

    @property
    def publishes_adapters(self) -> bool:
        """Return whether the published weights are those of LoRA adapters."""
        return any(".lora_A." in name for name in self.shapes)


class WeightsDestination(Protocol[R_co]):
    """Writes published weights to where engines get them: a small picklable object, used where the weights are."""

    def write(self, described: Mapping[str, Any], weights: Iterable[tuple[str, Any]]) -> R_co:
        """Write (name, tensor) pairs, in the order of names; return the result of `stage`, which must be picklable.

        described: an object with dtype and shape for each name. Consume all pairs: a sharded tensor is gathered when
        it is read. Tensors belong to the trainer; copy them to keep them. Raises EngineError.
        """


class WeightSource(Protocol):
    """Provides engines with the weights of a model. A `Trainer` is one; so is a model that is only sampled from."""

    @property
    def model(self) -> ModelInfo:
        """Return the model's sizes and the shapes of its published weights."""

    async def stage(self, destination: WeightsDestination[R]) -> R:
        """Have the destination write the published weights; returns what it returns, and raises what it raises."""

    async def score(self, ids: Ids) -> Floats:
        """Return the log-probability of ids[1:] under the published weights: int32[T] -> float32[T - 1].

        Computed in float32 whatever the precision of training, whose rounding might hide other weights; with
        `training.precision` bfloat16_pure in bfloat16.
        """

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write the saved weights as a new directory that transformers and `model.path` load.

        The directory is complete, with tokenizer and manifest, or absent. more: further files, by name.
        Raises CheckpointError if the directory exists or the disk refuses.
        """


class Trainer(WeightSource, Protocol):
    """Owns the weights that are trained, the optimizer and whatever else an update needs.

    Calls are made one at a time: a trainer need not guard against a second one before the first has returned.
    A trainer that computes on a thread or in processes of its own never blocks the event loop.
    """

    @property
    def checkpoint_bytes(self) -> int:
        """Return about how many bytes one checkpoint needs on disk."""

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Apply the updates between two publications to the trained weights; returns one result an update.

        Raises TrainingStopped where an update cannot be made; the weights are then those before it.
        """

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        """Apply one step of the warm start to the trained weights, on assistant tokens only.

        step: from 0; the optimizer is that of the warm start, and lasts from the first step to the last.
        Returns the mean loss before the step, in nats a token. Raises TrainingStopped as `train_batch` does.
        """

    async def experts(self, ids: Ids) -> Routing:
        """Return the experts chosen for each token, computed as `score`: int32[T] -> int16[T, M, k], M layers."""

    async def digest(self) -> str:
        """Return the SHA-256 (hex) of the published weights: names, dtypes, shapes and bytes, in the order of names."""

    async def save(self, directory: Path) -> str:
        """Write a checkpoint: the saved weights and all else that `load` needs to continue bit for bit.

        The directory is complete, with its manifest, or absent; one of that name that nothing points to is replaced.
        Returns the manifest's digest. Raises CheckpointError; then nothing of it is left.
        """

    async def load(self, saved: Manifest) -> None:
        """Continue from what `save` wrote, or start with the weights that `export` wrote.

        Raises DamageError for files that are damaged, CheckpointError for those of another model or tokenizer; a
        trainer that raised must not be used any more.
        """

    def status(self) -> Sequence[ComponentStatus]:
        """Return the current load, one entry for each process. Never blocks; thread-safe."""

    def close(self) -> None:
        """Release threads, processes and memory. Idempotent."""


class WeightSync(Protocol):
    """Makes the engines serve the weights that the trainer has.

    A publication has these steps, in this order; implementations leave out those that do not apply to them:

        1. stage    the trainer writes the published weights to where engines can get them; engines keep sampling
        2. score    the trainer scores a probe under them (for engines that do not run Treadle's own code)
        3. pause    engines stop between two tokens
        4. load     engines copy the weights in
        5. resume   calls in flight continue, with their caches kept or computed anew (`engine.in_flight`)
        6. prove    engines must score the probe as the trainer did
        7. admit    completions of the new weights are handed out, and report their version

    A failure in step 1 or 2 changes nothing. A failure in 3 to 6 restores the version before, which serves on, or,
    where there is none or it cannot be restored, leaves an engine that refuses every call. No caller ever gets a
    token of weights that were not admitted, and a token's version is that of the weights that sampled it.
    """

    async def publish(self, version: int) -> None:
        """Make every engine serve the trainer's weights as this version; returns once admitted. Raises EngineError."""
