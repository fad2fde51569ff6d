"""`treadle sft`."""

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.test_export import PLAIN
from tests.cli.worlds import finish, start_treadle, treadle


def test_it_writes_a_model_that_transformers_loads_and_says_how_to_go_on(place: Place) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = place.path / "some models" / "warm"
    done = treadle("sft", place.recipe, "--out", out, "warm_start.steps=10", "seed=5")
    assert (done.status, done.err) == (0, "")
    assert re.search(r"^loss \d\.\d{3} nats a token \(10 steps in \d+ s\)$", done.out, re.MULTILINE)
    assert sorted(path.name for path in out.iterdir()) == PLAIN
    assert [path.name for path in out.parent.iterdir()] == ["warm"]
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out).chat_template is not None
    commands = dict(re.findall(r"^(evaluate it|train from it): treadle (.*)$", done.out, re.MULTILINE))
    assert treadle(*shlex.split(commands["evaluate it"])).status == 0
    again = [*shlex.split(commands["train from it"]), "orchestration.updates=1", "--runs", place.runs, "--name", "next"]
    trained = treadle(*again)
    assert trained.status == 0, trained.err
    assert "warm start" not in trained.out


def test_a_second_time_it_comes_from_the_cache_and_is_the_same(place: Place) -> None:
    for name in ("a", "b"):
        done = treadle("sft", place.recipe, "--out", place.path / name, "seed=6", "warm_start.steps=5")
    assert "(read from the cache)" in done.out
    first, second = ((place.path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize(
    ("demonstrations", "message"),
    [
        ("empty.jsonl", "empty.jsonl has no demonstrations"),
        ("broken.jsonl", "broken.jsonl:1: needs a 'messages' list"),
    ],
)
def test_demonstrations_that_cannot_be_used(
    demonstrations: str, message: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text('{"text": "hello"}\n')
    override = f"warm_start.demonstrations={demonstrations}"
    done = treadle("sft", place.recipe, override, "warm_start.options={}", "--out", "m")
    assert done.status == 2 and message in done.error
    assert not Path("m").exists()


def test_not_having_learned_is_an_error_and_nothing_is_written(place: Place) -> None:
    done = treadle("sft", place.recipe, "warm_start.max_loss=0.001", "warm_start.steps=3", "--out", place.path / "m")
    assert done.status == 1 and "the warm start did not learn its demonstrations" in done.error
    assert not (place.path / "m").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(place: Place) -> None:
    process = start_treadle("sft", place.recipe, "warm_start.steps=1000000", "--out", place.path / "m")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("warm start 1/1000000 loss ")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.status, done.error) == (130, "interrupted")
    assert [path.name for path in place.path.iterdir()] == ["tiny.yaml"]
