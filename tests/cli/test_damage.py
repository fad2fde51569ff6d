"""Bytes are flipped at seeded places of every kind of file: no command uses what was damaged, and each says so."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import Done, files, treadle
from tests.runs import shard_of
from treadle.record.checkpoint_retention import find_checkpoint
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory

PLACES = 40
TRAJECTORY = "g000005.2"


@dataclass(frozen=True)
class World:
    """A finished and a stopped run, an export of the one, and commands that read them."""

    place: Place
    export: Path

    @property
    def run(self) -> Path:
        return self.place.runs / "finished"

    @property
    def stopped(self) -> Path:
        return self.place.runs / "stopped"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step-000004"

    def command(self, name: str) -> Done:
        """Of those that cannot be refused none is called more than a few times: they take a second."""
        out = self.place.path / "never"
        from_export = ("model.build=null", "model.tokenizer=null", f"model.path={self.export}", "warm_start=null")
        words: dict[str, Sequence[object]] = {
            "report": ("report", self.run, "--json"),
            "show": ("show", self.run, "--json"),
            "show one": ("show", self.run, TRAJECTORY, "--json"),
            "eval": ("eval", self.run, "data.held_out.options.count=2", "--json"),
            "eval model": ("eval", self.place.recipe, "--model", self.checkpoint, "data.held_out.options.count=2"),
            "eval export": ("eval", self.place.recipe, "--model", self.export, "data.held_out.options.count=2"),
            "export": ("export", self.run, out),
            "serve": ("serve", self.checkpoint, "--port", 0),
            "serve export": ("serve", self.export, "--port", 0),
            "train from it": ("train", self.place.recipe, "--runs", self.place.runs, "--name", "new", *from_export),
            "resume": ("train", self.place.recipe, "--runs", self.place.runs, "--name", "stopped", "--resume"),
            "resume any": ("train", self.place.recipe, "--runs", self.place.runs, "--resume"),
        }
        done = treadle(*words[name])
        assert not (self.place.runs / "new").exists()
        if out.exists():
            assert (out / "model.safetensors").read_bytes() == (self.checkpoint / "model.safetensors").read_bytes()
            shutil.rmtree(out)
        return done


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, finished: Trained, stopped: Trained) -> World:
    place = Place(tmp_path_factory.mktemp("damage"), finished.place.cache)
    shutil.copy(finished.place.recipe, place.recipe)
    made = World(place, place.path / "exported")
    for source, copy in ((finished.path, made.run), (stopped.path, made.stopped)):
        shutil.copytree(source, copy)
    assert treadle("export", made.run, made.export).status == 0
    return made


@pytest.fixture(autouse=True)
def untouched(world: World) -> Iterator[None]:
    """Whatever is refused leaves everything as it is, and a test puts back what it has damaged."""
    before = files(world.place.path).keys(), os.environ.get("TREADLE_CACHE")
    os.environ["TREADLE_CACHE"] = str(world.place.cache)
    yield
    assert (files(world.place.path).keys()) == before[0]
    if before[1] is not None:
        os.environ["TREADLE_CACHE"] = before[1]


@contextmanager
def flipped(file: Path, number: int) -> Iterator[None]:
    """The file with one bit flipped, for a while: at the n-th place of its own."""
    good = bytearray(file.read_bytes())
    draws = random.Random(f"{file.name} {number}")
    place, mask = draws.choice(range(len(good))), 1 << draws.randrange(8)
    file.write_bytes(good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :])
    try:
        yield
    finally:
        file.write_bytes(good)


def refused(done: Done, *said: str) -> None:
    assert done.status == 1, (done, said)
    assert done.error.startswith("error: ") and all(part in done.error for part in said), done.err


CHECKPOINT, RESUMED = "runs/finished/checkpoints/step-000004", "runs/stopped/checkpoints/step-000003"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

FILES: dict[str, tuple[str, Sequence[str], Sequence[str], Sequence[str]]] = {
    # directory, files in it that are damaged in turn, commands that refuse them, commands that have no use for them
    "weights": (CHECKPOINT, ["model.safetensors"], ["eval", "export", "eval model", "serve"], ["report", "show one"]),
    "model": (CHECKPOINT, ["config.json", "SHA256SUMS"], ["eval", "export", "serve"], ["show"]),
    "tokenizer": (CHECKPOINT, TOKENIZER, ["eval", "export"], ["show"]),
    "shown tokenizer": (CHECKPOINT, ["tokenizer.json"], ["show one"], ["show"]),
    "exported weights": ("exported", ["model.safetensors"], ["eval export", "train from it", "serve export"], ["eval"]),
    "export": ("exported", ["config.json", "SHA256SUMS", *TOKENIZER], ["eval export", "train from it"], ["export"]),
    "resumed weights": (RESUMED, ["model.safetensors"], ["resume"], []),
    "optimizer": (RESUMED, ["optimizer.safetensors"], ["resume"], []),
    "resumed": (RESUMED, ["checkpoint.json", "config.json", "SHA256SUMS"], ["resume"], []),
    "shard": ("runs/finished/rollouts", ["SHARD"], ["show one"], ["show", "export", "eval"]),
    "configuration": ("runs/finished", ["config.yaml"], ["report", "eval", "export"], ["show one"]),
    "resumed configuration": ("runs/stopped", ["config.yaml"], ["resume", "resume any"], []),
    "warm start": ("runs/stopped", ["warm_start.json"], ["resume"], []),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", FILES)
def test_what_is_damaged_is_refused_and_nothing_else(what: str, world: World) -> None:
    directory, names, refusing, others = FILES[what]
    expected = {name: answer(world.command(name)) for name in others}
    for number in range(PLACES):
        name = names[number % len(names)].replace("SHARD", shard_of(world.run, TRAJECTORY))
        with flipped(world.place.path / directory / name, number):
            done = world.command(refusing[number % len(refusing)])
            refused(done, "is damaged", directory.rpartition("/")[2], name)
            if number == 0:
                assert {name: answer(world.command(name)) for name in others} == expected


def answer(done: Done) -> tuple[int, str]:
    return done.status, re.sub(r'"seconds": .*', "", done.out)


@pytest.mark.parametrize("which", ["finished", "stopped"])
def test_a_damaged_ledger(which: str, world: World) -> None:
    """Commands that do not meet the damage go on as before."""
    ledger = world.place.runs / which / "ledger.sqlite"
    good, some = ledger.read_bytes(), ["show", "show one", "export"] if which == "finished" else ["resume any"]
    expected = {name: answer(world.command(name)) for name in some} if which == "finished" else {}
    try:
        for number, start in enumerate(range(0, len(good), 4096)):
            ledger.write_bytes(good[:start] + bytes(8) + good[start + 8 :])
            refused(
                world.command("report" if which == "finished" else "resume"), str(ledger), "is damaged", "restore it"
            )
            name = some[number % len(some)]
            done = world.command(name)
            if done.status or name not in expected:
                refused(done, str(ledger), "is damaged", "start a new run from a checkpoint: model.path=")
            else:
                assert answer(done) == expected[name]
    finally:
        ledger.write_bytes(good)


def test_lines_of_metrics(world: World) -> None:
    file = world.run / "metrics.jsonl"
    good = json.loads(world.command("report").out)
    for number in range(PLACES):
        with flipped(file, number):
            found = json.loads(world.command("report").out)
            assert re.match(r"metrics\.jsonl cannot be read in line \d", found["metrics_problem"])
            assert all(row in good["evaluations"] for row in found["evaluations"])
            assert found["last_update"] in (good["last_update"], *RunDirectory.open(world.run).metrics())
    assert good["metrics_problem"] is None


@pytest.mark.slow
def test_a_shard_is_named_by_the_report_and_not_counted(world: World) -> None:
    name = shard_of(world.run, TRAJECTORY)
    good = json.loads(world.command("report").out)
    for number in range(PLACES):
        with flipped(world.run / "rollouts" / name, number):
            found = json.loads(world.command("report").out)
            assert found["damaged_shards"] == [name] and found["steps"] == good["steps"]
            assert 0 < found["packing"]["step"] < good["packing"]["step"]
    assert good["damaged_shards"] == []


# --- what is not there, or not known ----------------------------------------------------------------------------------


def test_the_latest_checkpoint_is_what_the_ledger_says(world: World) -> None:
    """Not one whose directory was renamed into place before the run was killed, or that somebody put there."""
    other = shutil.copytree(world.checkpoint, world.run / "checkpoints" / "step-000005")
    try:
        for name in ("eval", "export", "report"):
            done = world.command(name)
            assert done.status == 0 and "step-000005" not in done.out + done.err, done
        done = treadle("eval", f"{world.run}@5")
        refused(done, "has no checkpoint 'step-000005'; it has step-000002, step-000004")
    finally:
        shutil.rmtree(other)


def test_a_latest_checkpoint_that_is_gone(world: World) -> None:
    away = world.checkpoint.rename(world.place.path / "away")
    try:
        for name in ("eval", "export"):
            refused(world.command(name), "step-000004", "is gone; ", "take another checkpoint (step-000002)")
        assert world.command("show one").status == 0
    finally:
        away.rename(world.checkpoint)


def test_a_best_checkpoint_that_is_gone(world: World) -> None:
    best = find_checkpoint(world.run, "best").directory
    [other] = {path.name for path in best.parent.iterdir()} - {best.name}
    away = best.rename(world.place.path / "away")
    try:
        for words in (("eval",), ("export", world.place.path / "never")):
            done = treadle(words[0], f"{world.run}@best", *words[1:])
            refused(done, f"was best at update {int(best.name[5:])}, whose checkpoint is gone", f"it has {other}; ")
    finally:
        away.rename(best)


@pytest.mark.parametrize("how", ["gone", "empty", "new"])
def test_without_its_ledger_a_run_names_the_way_on(how: str, world: World) -> None:
    for run, names in (
        (world.run, ("report", "show", "show one", "eval", "export")),
        (world.stopped, ("resume", "resume any")),
    ):
        ledger = run / "ledger.sqlite"
        away = ledger.rename(world.place.path / "away")
        try:
            if how == "empty":
                ledger.touch()
            if how == "new":
                Ledger(ledger).close()
            for name in names:
                last = max((run / "checkpoints").iterdir())
                way_on = (
                    f"restore it from a copy, or start a new run from a checkpoint: model.path={last} model.build=null"
                )
                done = world.command(name)
                if how == "new" and name in ("report", "show"):  # it has nothing on record
                    assert done.status == 0 and way_on in treadle("report", run).out
                    continue
                refused(done, way_on if (how, name) != ("new", "show one") else "no trajectory")
            assert ledger.exists() == (how != "gone")
        finally:
            away.replace(ledger)


def test_the_way_on_is_one(world: World) -> None:
    words = (f"model.path={world.checkpoint}", "model.build=null", "model.tokenizer=null", "warm_start=null")
    done = world.place.train(*words, "orchestration.updates=1", "data.held_out=null", "data.table_by=null", name="on")
    assert done.status == 0, done.err
    shutil.rmtree(world.place.runs / "on")
