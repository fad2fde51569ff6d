"""A checkpoint is complete or absent, and any number of ranks goes on from what any other number of them wrote."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.forks import ForkedProcess
from tests.models import distance, norm, random_groups, same_bits, weights_of
from tests.until import CEILING, wait_until
from tests.worlds import ROOT, tiny
from treadle.core.errors import CheckpointError, ConfigError, DamageError
from treadle.core.files import MANIFEST, Manifest
from treadle.core.trainer import Trainer
from treadle.engines.staging import InProcess
from treadle.models.weights import published, weights_digest
from treadle.training.start import make_trainer

SAVER = """
import asyncio, itertools, sys
from pathlib import Path
from tests.training.ranks.test_checkpoints import train, trainer_of

async def main():
    trainer = trainer_of(2)
    await train(trainer, 0)
    print(*(worker.process.pid for worker in trainer._processes._workers), flush=True)
    for number in itertools.count():
        await trainer.save(Path(sys.argv[1]) / f"step-{number}")

asyncio.run(main())
"""

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
SETTINGS = (
    "training.threads=1",
    "algorithm.kl={coef: 0.1}",
    "training.optimizer.learning_rate=0.01",
    "training.max_tokens_per_microbatch=64",
    "orchestration.updates=100",
)


def trainer_of(ranks: int, *more: str) -> Trainer:
    return make_trainer(tiny(*SETTINGS, f"placement.learner.ranks={ranks}", *more).trainer)


async def train(trainer: Trainer, seed: int) -> list[dict[str, float]]:
    results = await trainer.train_batch(random_groups(seed, groups=2, vocabulary=16))
    return [dict(result.metrics) for result in results]


def check_close(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name in wanted.keys() - {"slot_balance", "padded_passes"}:
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def test_ranks_begin_with_the_weights_of_one_process() -> None:
    """Though only the first one reads any; what they score shows that buffers, which no checkpoint has, came along."""
    ids = np.arange(3, 15, dtype=np.int32)

    async def begin(ranks: int) -> tuple[str, np.ndarray[Any, Any]]:
        trainer = trainer_of(ranks)
        try:
            return await trainer.digest(), await trainer.score(ids)
        finally:
            trainer.close()

    (wanted, expected), (found, scores) = (asyncio.run(begin(ranks)) for ranks in (1, 2))
    assert found == wanted
    assert np.abs(scores - expected).max() <= 1e-5  # of numbers near 6, of which float32 keeps 2.4e-7


UNTIED_GEMMA = (
    "model.build.model_type=gemma3_text",
    "model.build.num_hidden_layers=2",
    "model.build.sliding_window=4",
    "model.build.layer_types=[sliding_attention, full_attention]",
    "model.build.tie_word_embeddings=false",
)


def test_each_rank_reads_its_own_parts_of_a_model(tmp_path: Path) -> None:
    """From several files, in half precision, with a reference and a value head; none of which changes a bit."""
    source = trainer_of(1, *UNTIED_GEMMA)
    asyncio.run(source.export(tmp_path / "one"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((tmp_path / "one" / name).read_bytes())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    how = (f"model={{path: {tmp_path / 'model'}}}", "algorithm.advantage=gae")

    async def begin(*more: str) -> tuple[str, np.ndarray[Any, Any], dict[str, float]]:
        trainer = trainer_of(2, *how, *more)
        try:
            scores = await trainer.score(np.arange(3, 15, dtype=np.int32))
            return await trainer.digest(), scores, (await train(trainer, 0))[0]
        finally:
            trainer.close()

    (digest, scores, metrics), (wanted, expected, others) = (
        asyncio.run(begin(*more)) for more in (("placement.learner.loading=sharded",), ())
    )
    assert digest == wanted
    np.testing.assert_array_equal(scores, expected)
    assert metrics == others


def test_a_model_whose_files_do_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """Files of a mixture of experts have each expert by itself; transformers stacks them when it loads the model."""
    asyncio.run(trainer_of(1).export(tmp_path / "model"))  # for the tokenizer
    (tmp_path / "model" / MANIFEST).unlink()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 726}
    experts = AutoConfig.for_model("qwen3_moe", **sizes, **heads)
    AutoModelForCausalLM.from_config(experts).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"experts.\w+ is absent in the files of .* set placement.learner.loading to"):
        trainer_of(2, f"model={{path: {tmp_path / 'model'}}}", "placement.learner.loading=sharded")
    with pytest.raises(ConfigError, match=r"model\.build has no files"):
        trainer_of(2, "placement.learner.loading=sharded")


def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Weights to the bit; optimizer, reference and counters by what the next update measures and moves."""

    async def go_on(before: Trainer, after: Trainer, directory: Path, seed: int) -> None:
        await train(before, seed)
        sha256 = await before.save(directory)
        await after.load(Manifest.load(directory, sha256))
        assert await after.digest() == await before.digest()
        [mine], [theirs] = await train(before, seed + 1), await train(after, seed + 1)
        assert mine["kl"] > 1e-6
        check_close(theirs, mine)
        ours, others = [dict(await each.stage(InProcess())) for each in (before, after)]
        assert distance(others, ours) <= 1e-5 * norm(ours)

    trainers = {ranks: trainer_of(ranks) for ranks in (1, 2, 4)}
    try:
        for seed, (before, after) in enumerate([(2, 1), (1, 2), (2, 4), (4, 2)]):
            asyncio.run(go_on(trainers[before], trainers[after], tmp_path / f"{before}-{after}", 2 * seed))
    finally:
        for trainer in trainers.values():
            trainer.close()
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".metadata", ".pt", ".pkl", ".bin")]
    assert len(list(tmp_path.iterdir())) == 4  # nothing half-written


@pytest.mark.parametrize("killed", ["caller", "second rank"])
def test_a_checkpoint_is_complete_or_absent_whoever_is_killed_while_it_is_written(tmp_path: Path, killed: str) -> None:
    caller = ForkedProcess(
        [sys.executable, "-c", SAVER, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with caller:
        assert caller.stdout is not None and caller.stderr is not None
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        while not (tmp_path / "step-2").is_dir():
            assert caller.poll() is None, caller.stderr.read()
            time.sleep(0.001)
        while not (writing := list(tmp_path.glob(".step-*.tmp/model.safetensors"))):
            time.sleep(0.0001)
        os.kill({"caller": caller.pid, "second rank": pids[1]}[killed], signal.SIGKILL)
        said = caller.communicate(timeout=CEILING)[1]
        assert killed == "caller" or "RankError" in said
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert writing
    complete = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(complete) >= 3
    for path in complete:
        manifest = Manifest.load(path)
        manifest.prove(manifest.sha256)


def test_a_checkpoint_of_ranks_is_a_model_directory_and_its_damage_is_seen(tmp_path: Path) -> None:
    async def work() -> None:
        trainer = trainer_of(2)
        try:
            await train(trainer, 0)
            await trainer.save(tmp_path / "step")
            await trainer.export(tmp_path / "model")
            staged = await trainer.stage(InProcess())
            for directory in ("step", "model"):
                model = AutoModelForCausalLM.from_pretrained(tmp_path / directory, dtype="float32")
                assert weights_digest(published(model)) == await trainer.digest()
                assert same_bits(weights_of(model), {name: staged[name] for name in weights_of(model)})
            with pytest.raises(CheckpointError, match="exists already"):
                await trainer.export(tmp_path / "model")
            await train(trainer, 1)  # an error of the disk leaves the group as it is
            [shard] = (tmp_path / "step" / "optimizer").glob("shard-00002-*")
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(bytes(content))
            with pytest.raises(DamageError, match="shard-00002"):
                await trainer.load(Manifest.load(tmp_path / "step"))
        finally:
            trainer.close()

    asyncio.run(work())
