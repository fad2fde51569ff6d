"""Images for a model: its family's own image processor, and its tower.

    data URL --ImageProcessor.prepared--> Prepared: the placeholders' text, and arrays for the tower
    Prepared --Tower.features--> Features: rows [n, d] in the placeholders' places, and further ones for early layers
    ids with `ImageIds` --Tower.inputs--> the decoder's arguments: embeddings with features, the positions of the caller

Every image goes through processor and tower alone, so that what stands for it depends on nothing beside it; while the
tower is trained, images of equal shapes go through it together. The processor needs Pillow, and no torchvision: the two
scale pictures differently.

Shapes: n placeholders of an image, d hidden size, T tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import OWN, BothWays, ImageIds, Prepared, PromptImage, picture_of, read_image

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_KEPT = 2**29  # bytes of processed images in a process, and of features of a frozen tower
_OF_THE_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
_OF_THE_TEXT |= {"rows", "cols", "num_crops", "num_soft_tokens_per_image"}  # numbers of an image's parts

T = TypeVar("T")

SEEING = (
    *("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("gemma3", "gemma4"),
)
"""Families (`model_type`) with images that learner and engine compute as transformers does."""


def check_family(model_type: str) -> None:
    """Raise ConfigError for a family whose images are not supported."""
    if model_type not in SEEING:
        raise ConfigError(
            f"images are not supported for {model_type}; take a model of one of {', '.join(SEEING)}, or tasks without "
            "images"
        )


class Recent(Generic[T]):
    """The results of the last calls, up to a number of bytes, but at least one; for several threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T], size_of: Callable[[T], int]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        size = size_of(made)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made, size
                self._size += size
            while self._size > self._limit and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1][1]
        return made

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._size = 0


def _size(prepared: Prepared) -> int:
    return sum(array.nbytes for array in prepared.arrays.values())


_PREPARED = Recent[Prepared](_KEPT)  # one for all processors: those of a run's renderer and learner are two


class ImageProcessor:
    """The image processor of a model's directory, as transformers has it for the family; loaded when it is first used.

    name: what a chat template writes for an image, `<|image_pad|>`. placeholder: id of the tokens that features
    replace. settings: SHA-256 of the processor's settings. Each raises ConfigError for a directory without one, or with
    one of an unknown kind.
    """

    def __init__(self, directory: Path, where: str = "model.path") -> None:
        self._directory, self._where = directory, where

    @classmethod
    def find(cls, *directories: Path) -> ImageProcessor | None:
        """Return that of the first directory with the files of one."""
        return next((cls(d) for d in directories if any((d / file).is_file() for file in PROCESSOR_FILES)), None)

    @functools.cached_property
    def _own(self) -> Any:
        try:
            return _family_processor(self._directory)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"{self._where}: {str(self._directory)!r} has no usable image processor: {error}"
            ) from error

    @functools.cached_property
    def name(self) -> str:
        name = getattr(self._own, "image_token", None)
        if not isinstance(name, str):
            raise ConfigError(
                f"{self._where}: {type(self._own).__name__} names no image token; images of such a model are unknown"
            )
        return name

    @functools.cached_property
    def placeholder(self) -> int:
        return int(self._own.image_token_ids[0])  # Gemma 3's `image_token_id` is that of what begins an image

    @functools.cached_property
    def _written(self) -> str:
        """The placeholder in `Prepared.text`."""
        return str(self._own.tokenizer.convert_ids_to_tokens(self.placeholder))

    @functools.cached_property
    def settings(self) -> str:
        own = self._own.image_processor
        settings = {"class": type(own).__name__, **json.loads(own.to_json_string())}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()

    def __reduce__(self) -> tuple[type[ImageProcessor], tuple[Path, str]]:
        return ImageProcessor, (self._directory, self._where)

    def prepared(self, url: str) -> Prepared:
        """Process an image, given as a data URL. The last results are kept. Raises DataError."""
        key = self._directory, self.settings, url
        return _PREPARED.get(key, lambda: self._prepared(url), lambda made: _size(made) + len(url))

    def _prepared(self, url: str) -> Prepared:
        from PIL import Image

        picture = picture_of(url)
        try:
            made = self._own(
                text=[self.name],
                images=[Image.fromarray(picture.pixels)],
                return_tensors="np",
                return_text_replacement_offsets=True,
            )
            text = made["text_replacement_offsets"][0][0]["replacement"]
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the image {picture.sha256[:12]} of {picture.pixels.shape[1]}x{picture.pixels.shape[0]} pixels cannot "
                f"be processed by {type(self._own).__name__}: {error}"
            ) from error
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in _OF_THE_TEXT}
        digest = hashlib.sha256()
        for key, array in sorted(arrays.items()):
            digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        grid: tuple[int, ...] = ()
        if "image_grid_thw" in arrays:
            merge = int(self._own.image_processor.merge_size)
            frames, rows, columns = map(int, arrays["image_grid_thw"][0])
            grid = frames, rows // merge, columns // merge
        height, width, _ = picture.pixels.shape
        return Prepared(
            picture.sha256, (width, height), digest.hexdigest(), text, text.count(self._written), grid, arrays
        )

    def encoded(self, text: str) -> NDArray[np.int32]:
        """Return the ids int32[T] of `Prepared.text`, or of a part of it."""
        return np.array(self._own.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def checked(self, image: PromptImage) -> Prepared:
        """Process a recorded image again. Raises DataError if the result is not the recorded one."""
        prepared = self.prepared(image.url)
        if image.settings != self.settings:
            raise DataError(
                f"the image {image.sha256[:12]} was recorded with other settings of its processor "
                f"({image.settings[:12]}) than {str(self._directory)!r} has ({self.settings[:12]})"
            )
        if prepared.processed != image.processed:
            raise DataError(
                f"the image {image.sha256[:12]} is processed to {prepared.processed[:12]}, and {image.processed[:12]} "
                "was recorded: another version of transformers or Pillow? Use those that recorded it"
            )
        return prepared


def _family_processor(directory: Path) -> Any:
    """Return the processor of a directory without its part for videos, which needs torchvision."""
    from transformers import AutoImageProcessor, AutoTokenizer

    family = _family_of(directory)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            directory, backend="pil", local_files_only=True, trust_remote_code=False
        ),
        "tokenizer": AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
    }
    settings, _ = family.get_processor_dict(directory, local_files_only=True)
    # The base class refuses a missing part by its type.
    lenient: Any = type(family.__name__, (family,), {"check_argument_for_proper_class": lambda *_: None})
    made = lenient.from_args_and_dict([parts.get(name) for name in family.get_attributes()], settings)
    return made[0] if isinstance(made, tuple) else made


def _family_of(directory: Path) -> Any:
    """Return the class of a directory's processor, by its model's configuration or, without a model, by its name."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if (directory / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return PROCESSOR_MAPPING[type(config)]
    name = json.loads((directory / "processor_config.json").read_bytes()).get("processor_class")
    family = getattr(transformers, str(name), None)
    if family is None:
        raise ValueError(f"its processor_config.json names the processor_class {name!r}")
    return family


def pixels_problem(
    score: Callable[[NDArray[np.int32], Sequence[PromptImage]], NDArray[np.float32]],
    image: PromptImage,
    processor: ImageProcessor,
    vocabulary: int,
    tolerance: float,
) -> str:
    """Return why a model does not see an image, "" if it does: `blindness` of its `pixels_probe`.

    score: ids int32[T] with their images -> log-probabilities of ids[1:]. Raises DataError.
    """
    ids, one, other = pixels_probe(image, processor, vocabulary)
    return blindness(score(ids, [one]), score(ids, [other]), tolerance)


def pixels_probe(
    image: PromptImage, processor: ImageProcessor, vocabulary: int
) -> tuple[NDArray[np.int32], PromptImage, PromptImage]:
    """Return ids int32[T] of an image between three tokens of text and three, and two images for it: the given one, and
    one with every pixel changed by half the range. Raises DataError.
    """
    moved = read_image(picture_of(image.url).pixels + np.uint8(128))
    prepared = processor.prepared(moved.url)
    text = ((np.arange(1, 7) + vocabulary // 2) % vocabulary).astype(np.int32)  # ordinary ids
    written = processor.encoded(prepared.text)
    places = np.flatnonzero(written == image.placeholder)
    one = replace(image, start=3 + int(places[0]), length=int(places[-1] + 1 - places[0]))
    other = replace(one, sha256=prepared.sha256, processed=prepared.processed, url=moved.url)
    return np.concatenate([text[:3], written, text[3:]]), one, other


def blindness(seen: NDArray[np.float32], changed: NDArray[np.float32], tolerance: float) -> str:
    """Return why a model does not see images, "" if it does: pixels must change the log-probabilities of a
    `pixels_probe` after its image, and only those. tolerance: of those before it, in nats.
    """
    if np.array_equal(seen[-3:], changed[-3:]):
        return "computes the same log-probabilities after an image and after one with other pixels"
    if not np.allclose(seen[:2], changed[:2], rtol=0, atol=tolerance):
        return "computes other log-probabilities before an image with other pixels"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What the tower makes of one image: rows [n, d], and for each early layer further ones, added there (deepstack of
    Qwen3-VL).
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.rows, *self.deep))


class Tower:
    """The part of a multimodal model that turns images into rows of its language model's input.

    model: the whole model, as transformers loads it, or without decoder and head; or a function that loads it when the
    first image comes. trained: whether features carry gradients; they are then computed at each use, and otherwise kept
    for the last images.

    Images raise ConfigError for a family other than `SEEING`, and as loading does.
    """

    def __init__(
        self,
        model: PreTrainedModel | Callable[[], PreTrainedModel],
        processor: ImageProcessor,
        trained: bool = False,
    ) -> None:
        self._load, self.processor, self.trained = model, processor, trained
        self._kept = Recent[Features](_KEPT)

    @functools.cached_property
    def _model(self) -> Any:
        from transformers import PreTrainedModel

        model = self._load if isinstance(self._load, PreTrainedModel) else self._load()
        check_family(model.config.model_type)
        theirs = getattr(model.config, "image_token_id", self.processor.placeholder)
        if theirs != self.processor.placeholder:
            raise ConfigError(
                f"the model's image_token_id is {theirs}, and {self.processor.name!r} has the id "
                f"{self.processor.placeholder} in its processor's tokenizer; set it to that"
            )
        return model

    @property
    def both_ways(self) -> BothWays:
        """Layers in which a placeholder of an image also attends to later ones of it. Loads the model."""
        config = self._model.config
        if config.model_type == "gemma3":
            return "all"
        vision = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
        return "sliding" if vision else ""

    @property
    def trained_tokens(self) -> int:
        """Tokens of the tower for each placeholder, whose activations its gradient needs; 0 if it is frozen. Loads the
        model.
        """
        if not self.trained:
            return 0
        config = self._model.config
        vision = config.vision_config
        if config.model_type == "gemma3":
            return int((vision.image_size // vision.patch_size) ** 2 // config.mm_tokens_per_image)
        merged = getattr(vision, "spatial_merge_size", None) or getattr(vision, "pooling_kernel_size", None)
        return int(merged or config.scale_factor) ** 2

    def changed(self) -> None:
        """Call after the model's weights changed."""
        self._kept.clear()

    def features(self, image: PromptImage) -> Features:
        """Return an image's features, on the model's device and in its precision. Raises DataError."""
        if self.trained:
            return self._computed([image])[0]
        return self._kept.get(image.processed, lambda: self._computed([image])[0], lambda made: made.nbytes)

    def _features(self, images: Sequence[PromptImage]) -> list[Features]:
        """Return the features of each image; of a trained tower, those of equal shapes computed together."""
        if not self.trained:
            return [self.features(image) for image in images]
        alike: dict[Hashable, list[int]] = {}
        for number, image in enumerate(images):
            arrays = self.processor.checked(image).arrays
            # Idefics 3 takes a part that is all 0 for padding, unless it is alone.
            apart = None if all(array.any() for array in arrays.values()) else number
            alike.setdefault((apart, *(array.shape for array in arrays.values())), []).append(number)
        made: dict[int, Features] = {}
        for numbers in alike.values():
            made |= zip(numbers, self._computed([images[number] for number in numbers]), strict=True)
        return [made[number] for number in range(len(images))]

    def _computed(self, images: Sequence[PromptImage]) -> list[Features]:
        """Return the features of images whose arrays have equal shapes."""
        import torch

        trained, arrays = self.trained, [self.processor.checked(image).arrays for image in images]
        grads = trained and torch.is_grad_enabled()
        join = 1 if "pixel_attention_mask" in arrays[0] else 0  # Idefics 3: [1, parts, ...]
        joint = {name: np.concatenate([each[name] for each in arrays], join) for name in arrays[0]}
        # What is kept must not depend on who asks first: an engine, without gradients, or the learner.
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            model = self._model
            tensors = {name: torch.from_numpy(array).to(model.device) for name, array in joint.items()}
        half = trained and torch.is_autocast_enabled(model.device.type)
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(grads),
            torch.autocast(model.device.type, enabled=half),
        ):
            answer = model.get_image_features(**tensors, return_dict=True)
            rows = _joined(answer.pooler_output)
            deep = tuple(map(_joined, getattr(answer, "deepstack_features", None) or ()))
        if len(rows) != sum(image.tokens for image in images):
            raise DataError(
                f"the tower makes {len(rows)} rows of the images {[image.sha256[:12] for image in images]}, and their "
                f"prompts have {[image.tokens for image in images]} placeholders: processor and model do not belong "
                "together"
            )
        parts = [part.split([image.tokens for image in images]) for part in (rows, *deep)]
        return [Features(own, tuple(more)) for own, *more in zip(*parts, strict=True)]

    def inputs(self, policy: PreTrainedModel, ids: NDArray[np.int32], table: ImageIds) -> dict[str, Any]:
        """Return the decoder's arguments for ids int32[B, T] of `table`: embeddings, and features of early layers.

        policy: the model that computes.
        """
        import torch

        config, device = policy.config.get_text_config(), policy.device
        embedding, own = policy.get_input_embeddings(), ids >= OWN
        by_layer = getattr(config, "hidden_size_per_layer_input", 0)  # Gemma 4's layers have embeddings of their own
        beneath = config.pad_token_id if by_layer else self.processor.placeholder
        plain = torch.from_numpy(np.where(own, beneath, ids)).long().to(device)
        decoder: Any = policy.get_decoder()
        more = {"per_layer_inputs": decoder.get_per_layer_inputs(plain, None)} if by_layer else {}
        if not own.any():
            return {"inputs_embeds": embedding(plain), **more}
        flat = ids[own]
        images = table.among(flat)
        made = self._features([image for image, _ in images])
        ends = np.cumsum([0, *(image.tokens for image, _ in images)])
        firsts = np.array([first for _, first in images])
        number = np.searchsorted(firsts, flat, "right") - 1
        which = torch.from_numpy(ends[number] + flat - firsts[number]).to(device)
        mask = torch.from_numpy(own).to(device)

        def placed(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).to(device).index_select(0, which)

        embedded = embedding(plain)
        rows = placed([features.rows for features in made]).to(embedded.dtype)
        arguments = {"inputs_embeds": embedded.masked_scatter(mask[..., None], rows), **more}
        if made[0].deep:
            arguments["visual_pos_masks"] = mask
            arguments["deepstack_visual_embeds"] = [
                placed(parts) for parts in zip(*(m.deep for m in made), strict=True)
            ]
        return arguments


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Return rows [n, d] of one image, which transformers returns in parts."""
    import torch

    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
