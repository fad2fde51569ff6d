"""A file of a directory that was written as a whole is used only as it was written."""

import random
from pathlib import Path

import pytest

from treadle.core.errors import DamageError, RemovedError
from treadle.core.files import MANIFEST, Manifest, new_directory, prove_files, read_proven, remove_at_once, sha256_of

FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)), "no newline": b"x"}


def written(path: Path) -> Path:
    with new_directory(path) as new:
        for name, content in FILES.items():
            new.write(name, content)
    assert sha256_of((path / MANIFEST).read_bytes()) == new.manifest_sha256
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    manifest = Manifest.load(written(tmp_path / "d"))
    assert {name: manifest.read(name) for name in FILES} == FILES
    manifest.prove(FILES)
    prove_files(tmp_path / "d", FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize("content", [b'{"a": 2}', b"", None])
def test_what_is_read_is_proven_and_nothing_else(content: bytes | None, tmp_path: Path) -> None:
    manifest = Manifest.load(written(tmp_path / "d"), remedy="do this")
    file = tmp_path / "d" / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    what = "is gone" if content is None else "does not have the SHA-256 in SHA256SUMS"
    for read in (manifest.read, lambda name: manifest.prove([name])):
        with pytest.raises(DamageError, match=f"d is damaged: config.json {what}; do this"):
            read("config.json")
    with pytest.raises(DamageError, match=r"config.json .*in an export that was changed on purpose, remove SHA256SUMS"):
        prove_files(tmp_path / "d", FILES)
    manifest.prove(["model.safetensors"])
    prove_files(tmp_path / "d", ["model.safetensors", "what is neither there nor listed"])


def test_a_file_that_came_later_is_nobodys(tmp_path: Path) -> None:
    (written(tmp_path / "d") / "tokenizer.json").touch()
    with pytest.raises(DamageError, match=r"tokenizer\.json is not listed in SHA256SUMS"):
        prove_files(tmp_path / "d", ["tokenizer.json"])


def test_without_a_manifest_there_is_nothing_to_prove(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    prove_files(tmp_path, FILES)
    with pytest.raises(DamageError, match="SHA256SUMS is gone"):
        Manifest.load(tmp_path)


def test_a_manifest_vouches_for_itself_and_a_ledger_for_it(tmp_path: Path) -> None:
    """Whatever is flipped in it, not every file is proven; and its digest is another one."""
    file = written(tmp_path / "d") / MANIFEST
    good = file.read_bytes()
    draws = random.Random(0)
    for place in range(len(good) - 1):  # the last line's end may be missing
        bad = bytearray(good)
        bad[place] ^= 1 << draws.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(DamageError):
            Manifest.load(tmp_path / "d").prove(FILES)
        with pytest.raises(DamageError, match="SHA256SUMS is not as it was written"):
            Manifest.load(tmp_path / "d", sha256_of(good))
    file.write_bytes(good)
    Manifest.load(tmp_path / "d", sha256_of(good)).prove(FILES)


def test_a_directory_that_is_removed_is_not_damaged(tmp_path: Path) -> None:
    manifest = Manifest.load(written(tmp_path / "d"))
    remove_at_once(tmp_path / "d")
    for read in (
        lambda: manifest.read("config.json"),
        lambda: manifest.prove(FILES),
        lambda: Manifest.load(tmp_path / "d"),
    ):
        with pytest.raises(RemovedError, match="d is gone"):
            read()
    assert list(tmp_path.iterdir()) == []


def test_a_single_file_has_its_digest_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    assert read_proven(tmp_path / "a", sha256_of(b"1"), "do this") == b"1"
    with pytest.raises(DamageError, match="a is damaged: its SHA-256 is not the recorded one; do this"):
        read_proven(tmp_path / "a", sha256_of(b"2"), "do this")
    with pytest.raises(DamageError, match="b is gone; do this"):
        read_proven(tmp_path / "b", sha256_of(b"2"), "do this")
