"""The server's requests: what they do to models, in which order, and how often."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import VOCABULARY, same_bits, tiny
from tests.tinker.kit import TOKENIZER, conversations
from tests.tinker.methods import METHODS, table
from tests.tinker.protocol import (
    PROTOBUF,
    Client,
    forward_backward_body,
    models_of,
    read_outputs,
    read_samples,
    served,
)
from treadle.core.config import build
from treadle.models.chat import load_tokenizer
from treadle.models.weights import adapter_weights
from treadle.plan.config import RunConfig
from treadle.plan.inputs import IN_MEMORY
from treadle.record.record import Record
from treadle.record.recording import Recording
from treadle.report.report import report_of
from treadle.tinker.app import ROUTES, UNSUPPORTED
from treadle.tinker.data import AdamParams, Adapter, Datum
from treadle.tinker.learner import TrainedModel
from treadle.tinker.record import SampleRecorder
from treadle.tinker.service import Service

DATA = conversations(("logprobs", "advantages"), samples=2, turns=2)
LOSS = "importance_sampling"
STEP = {"learning_rate": 0.01}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Of float32, with files."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny()
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def weights(client: Client, model: str) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in adapter_weights(client.service.models[model].model).items()}


def direct(base: PreTrainedModel, steps: int = 1, data: Sequence[Datum] = DATA) -> dict[str, torch.Tensor]:
    """Weights after some steps that nobody asked for by requests."""
    model = TrainedModel(base, Adapter(3), 7, 8192, TOKENIZER)
    for _ in range(steps):
        model.forward(data, LOSS, {}, backward=True)
        model.optim_step(AdamParams(**STEP))
    return adapter_weights(model.model)


async def test_an_update_by_requests_is_that_of_the_learner(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        model = await client.create(await client.session())
        half = len(DATA) // 2
        parts = [
            await client.forward_backward(model, n + 1, part, LOSS) for n, part in enumerate((DATA[:half], DATA[half:]))
        ]
        step = await client.post("/optim_step", model_id=model, seq_id=3, adam_params=STEP)
        outputs = [read_outputs(await client.done(part)) for part in parts]
        assert (await client.done(step))["metrics"]["grad_norm"] > 0
        learner = TrainedModel(base, Adapter(3), 7, 8192, TOKENIZER)
        expected = [learner.forward(part, LOSS, {}, backward=True) for part in (DATA[:half], DATA[half:])]
        learner.optim_step(AdamParams(**STEP))
        for (arrays, metrics), other in zip(outputs, expected, strict=True):
            assert metrics == dict(other.metrics)
            assert all((a == b["logprobs"]).all() for a, b in zip(arrays, other.arrays, strict=True))
        assert same_bits(weights(client, model), adapter_weights(learner.model))


async def test_requests_are_executed_in_the_order_of_their_numbers(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        model = await client.create(await client.session())
        step = await client.post("/optim_step", model_id=model, seq_id=3, adam_params=STEP)
        later = await client.forward_backward(model, 2, DATA[3:], LOSS)
        for _ in range(20):  # turns of the event loop, in which they could begin
            await asyncio.sleep(0)
        assert client.service.counts()["waiting"] == 2
        first = await client.forward_backward(model, 1, DATA[:3], LOSS)
        for future in (first, later, step):
            await client.done(future)
        learner = TrainedModel(base, Adapter(3), 7, 8192, TOKENIZER)
        for part in (DATA[:3], DATA[3:]):
            learner.forward(part, LOSS, {}, backward=True)
        learner.optim_step(AdamParams(**STEP))
        assert same_bits(weights(client, model), adapter_weights(learner.model))


async def test_a_repeated_request_is_executed_once(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        session = await client.session()
        model = await client.create(session)
        assert await client.create(session) == model
        for _ in range(3):
            await client.done(await client.forward_backward(model, 1, DATA, LOSS))
            await client.done(await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP))
        assert same_bits(weights(client, model), direct(base))
        status, message = await client.refused("/optim_step", model_id=model, seq_id=2, adam_params={"eps": 0.1})
        assert (status, message) == (400, f"{model}:2 is the id of a different request; give each its own seq_id")
        assert client.service.counts()["repeated"] == 5


async def test_requests_after_one_that_never_came_fail(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base, gap=0.05) as client:
        model = await client.create(await client.session())
        futures = [await client.post("/optim_step", model_id=model, seq_id=n, adam_params=STEP) for n in (2, 3)]
        for future in futures:
            assert await client.failed(future) == f"request 1 of model {model!r}, which comes before, never arrived"
        late = await client.post("/optim_step", model_id=model, seq_id=1, adam_params=STEP)
        assert "request 1 came after request 3" in await client.failed(late)
        await client.done(await client.post("/optim_step", model_id=model, seq_id=4, adam_params=STEP))


KINDS = ["forward", "backward", "backward", "step", "step", "save", "load", "wrong", "invented"]


def histories(draw: random.Random) -> list[tuple[str, int]]:
    """Requests by kind, each with what happens after it: nothing, an orderly end, or a killed server."""
    return [(draw.choice(KINDS), draw.choice([0, 0, 1, 2, 3])) for _ in range(draw.randrange(3, 9))]


async def _request(client: Client, model: str, seq: int, kind: str, saved: list[str]) -> dict[str, Any]:
    if kind == "invented":  # a sequence that was never sampled
        spans: Any = [[("none", 0, len(DATA[0].ids), True)]]
        return await client.forward_backward(model, seq, DATA[:1], LOSS, inputs=spans, targets=spans)  # type: ignore[no-any-return]
    if kind in ("forward", "backward", "wrong"):
        loss, data = "ppo" if kind == "wrong" else LOSS, DATA[seq % 3 : seq % 3 + 2]
        options = {"beta": 1.0} if kind == "wrong" else {}
        return await client.forward_backward(model, seq, data, loss, options=options, forward_only=kind == "forward")  # type: ignore[no-any-return]
    if kind == "save":
        return await client.post("/save_weights", model_id=model, seq_id=seq, path=f"at-{seq}")  # type: ignore[no-any-return]
    if kind == "load" and saved:
        return await client.post("/load_weights", model_id=model, seq_id=seq, path=saved[-1], optimizer=True)  # type: ignore[no-any-return]
    return await client.post("/optim_step", model_id=model, seq_id=seq, adam_params=STEP)  # type: ignore[no-any-return]


async def _played(folder: Path, base: PreTrainedModel, history: list[tuple[str, int]], ends: bool) -> Any:
    """Play a history and one more step; return all results and the weights. ends: whether servers end in between."""
    results, saved, model, left = [], list[str](), "", list(enumerate([*history, ("step", 0)], 1))
    future: dict[str, Any] | None = None
    while True:
        seq, (kind, after) = left[0]
        async with served(folder, base, save=after == 1, replay=0.0 if len(left) % 2 else 1e9) as client:
            model = model or await client.create(await client.session())
            while left:
                seq, (kind, after) = left[0]
                if future is None:
                    future = await _request(client, model, seq, kind, saved)
                    if ends and after == 3:  # killed while the request is open
                        break
                results.append(await client.result(future))
                saved += [results[-1]["path"]] if kind == "save" else []
                left, future = left[1:], None
                if ends and after and left:
                    break
            else:
                return results, weights(client, model)


def _lost_nothing(base: PreTrainedModel, whole: Path, cut: Path, history: list[tuple[str, int]]) -> None:
    results, final = asyncio.run(_played(whole, base, history, ends=False))
    again, other = asyncio.run(_played(cut, base, history, ends=True))
    assert again == results
    assert same_bits(other, final)


def test_a_killed_server_makes_every_step_once(tmp_path: Path, base: PreTrainedModel) -> None:
    """Killed with a step open, after gradients, after a step, after loading; ended in order with gradients pending."""
    history = [("backward", 0), ("step", 3), ("save", 0), ("backward", 2), ("step", 2), ("load", 3)]
    history += [("backward", 1), ("invented", 2)]
    _lost_nothing(base, tmp_path / "whole", tmp_path / "cut", history)


async def test_a_server_killed_after_it_saved_and_before_it_said_so_saves_again(
    tmp_path: Path, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, base, save=False) as client:
        model = await client.create(await client.session())
        with monkeypatch.context() as killed:
            killed.setattr(client.service, "_finish", lambda *_, **__: None)
            await client.post("/save_weights", model_id=model, seq_id=1, path="a")
            while not client.service._lines[model].done:
                await asyncio.sleep(0.005)
    async with served(tmp_path, base) as client:
        saved = await client.done({"request_id": f"{model}:1"})
        assert saved["path"] == f"tinker://{model}/weights/a"


async def test_unloading_a_model_fails_what_it_has_not_done(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        model = await client.create(await client.session())
        future = await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP)  # waits for the first
        assert (await client.done(await client.post("/unload_model", model_id=model)))["model_id"] == model
        assert "was unloaded before" in await client.failed(future)
        status, message = await client.refused("/optim_step", model_id=model, seq_id=3)
        assert (status, "was unloaded" in message) == (400, True)


@pytest.mark.slow
def test_a_server_killed_anywhere_loses_nothing_and_does_nothing_twice(tmp_path: Path, base: PreTrainedModel) -> None:
    """Without hypothesis, which changes the recursion limit under the learner's thread."""
    for seed in range(60):
        history = histories(random.Random(seed))
        _lost_nothing(base, tmp_path / f"whole-{seed}", tmp_path / f"cut-{seed}", history)


async def test_idle_models_leave_memory_and_come_back(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base, idle=0.05) as client:
        model = await client.create(await client.session())
        await client.done(await client.forward_backward(model, 1, DATA, LOSS))
        while client.service.counts()["models"]:
            await asyncio.sleep(0.01)
        await client.done(await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP))
        assert same_bits(weights(client, model), direct(base))


async def test_several_models_train_side_by_side(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        session = await client.session()
        models = [await client.create(session, number) for number in range(4)]

        async def train(model: str, steps: int) -> None:
            for n in range(steps):
                future = await client.forward_backward(model, 2 * n + 1, DATA, LOSS)
                await client.done(await client.post("/optim_step", model_id=model, seq_id=2 * n + 2, adam_params=STEP))
                await client.done(future)

        await asyncio.gather(*(train(model, steps + 1) for steps, model in enumerate(models)))
        for steps, model in enumerate(models):
            assert same_bits(weights(client, model), direct(base, steps + 1))


async def _sampled(client: Client, sampler: str, seq: int, **more: Any) -> list[tuple[list[int], np.ndarray]]:
    body = {"sampling_params": {"max_tokens": 6, "seed": 5}, **more}
    return read_samples(await client.done(await client.sample(sampler, seq, [3, 1, 4], **body)))


async def test_sampling_sessions(tmp_path: Path, base: PreTrainedModel) -> None:
    """By the base, by a name, and by weights without one; the same tokens after a restart."""
    async with served(tmp_path, base, save=False) as client:
        session = await client.session()
        model = await client.create(session)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
        plain = (await client.post("/create_sampling_session", body))["sampling_session_id"]
        before = await _sampled(client, plain, 0, num_samples=3, sampling_params={"max_tokens": 5})
        assert len({tuple(ids) for ids, _ in before}) > 1
        await client.done(await client.forward_backward(model, 1, DATA, LOSS))
        await client.done(
            await client.post("/optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.3})
        )
        body = {"model_id": model, "seq_id": 3, "path": "a"}
        named = await client.done(await client.post("/save_weights_for_sampler", body))
        body = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 1}
        unnamed = (await client.done(await client.post("/save_weights_for_sampler", body)))["sampling_session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 2, "model_path": named["path"]}
        by_path = (await client.post("/create_sampling_session", body))["sampling_session_id"]
        [trained] = await _sampled(client, unnamed, 0)
        [same] = await _sampled(client, by_path, 0)
        [other] = await _sampled(client, plain, 1)
        assert trained[0] == same[0] and np.array_equal(trained[1], same[1])
        assert other[0] != trained[0]
        shown = await client.get(f"/samplers/{by_path}")
        assert (shown["base_model"], shown["model_path"]) == ("base", named["path"])
        assert (await client.post("/join_sampling_session", sampling_session_id=plain))["client_counter"] == 1
    async with served(tmp_path, base) as client:
        again = await _sampled(client, plain, 0, num_samples=3, sampling_params={"max_tokens": 5})
        assert [ids for ids, _ in again] == [ids for ids, _ in before]
        assert (await _sampled(client, unnamed, 1))[0][0] == trained[0]


async def test_what_a_datum_says_of_its_tokens_is_checked(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        session = await client.session()
        model = await client.create(session)
        sampler = await client.done(
            await client.post("/save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
        )
        prompt = [3, 1, 4]
        future = await client.sample(
            sampler["sampling_session_id"], 0, prompt, sampling_params={"max_tokens": 4, "stop": []}
        )
        [name] = future["sample_sequence_ids"]
        [(tokens, logprobs)] = read_samples(await client.done(future))
        whole = np.array([*prompt, *tokens])
        given = {
            "target_tokens": whole[1:].astype(np.int64),
            "logprobs": np.concatenate([np.zeros(2, np.float32), logprobs]),
            "advantages": np.array([0, 0, 1, 1, 1, 1], np.float32),
        }
        datum = Datum(whole[:-1].astype(np.int32), given)
        right = {
            "inputs": [[(name, 0, 3, False), (name, 0, 3, True)]],
            "targets": [[(name, 1, 2, False), (name, 0, 4, True)]],
        }
        future = await client.forward_backward(model, 2, [datum], LOSS, **right)
        [array], _ = read_outputs(await client.done(future))
        assert np.allclose(array[2:], logprobs, atol=1e-5)

        changed = given["target_tokens"].copy()
        changed[4] = (changed[4] + 1) % VOCABULARY
        wrong = Datum(datum.ids, {**given, "target_tokens": changed})
        message = await client.failed(await client.forward_backward(model, 3, [wrong], LOSS, **right))
        assert message == (
            f"datum 0: target_tokens[4] is {changed[4]}, and sampled token 2 of sequence {name!r} is {tokens[2]}: "
            "it is not what was sampled"
        )
        for spans, problem in (
            ([(name, 1, 2, False), (name, 0, 3, True)], "its spans of target_tokens cover 5 positions, and it has 6"),
            ([(name, 1, 2, False), ("other", 0, 4, True)], "sequence 'other' was not sampled by this server"),
            ([(name, 1, 2, False), (name, 2, 4, True)], "which has 4"),
            ([(name, 0, 2, False), (name, 0, 4, True)], "it is not what was sent"),
        ):
            seq = 4 + len(client.service.journal.rows("SELECT 1 FROM requests WHERE state = 'failed'")) - 1
            future = await client.forward_backward(model, seq, [datum], LOSS, inputs=right["inputs"], targets=[spans])
            assert problem in await client.failed(future)
        assert client.service.counts()["contradicted"] == 5
        step = await client.done(await client.post("/optim_step", model_id=model, seq_id=seq + 1, adam_params=STEP))
        assert step["metrics"]["grad_norm"] > 0
        [row] = client.service.journal.step_metrics()
        assert (row["datums"], row["tokens"], row["targets"], row["attributed"]) == (1, 6, 4, 1)


async def test_checkpoints_by_the_clients_names(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        session = await client.session()
        model = await client.create(session)
        await client.done(await client.forward_backward(model, 1, DATA, LOSS))
        await client.done(await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP))
        saved = await client.done(await client.post("/save_weights", model_id=model, seq_id=3, path="one"))
        assert saved["path"] == f"tinker://{model}/weights/one"
        for name, problem in (("one", "overwrite=True"), ("../one", "letters, digits"), ("", "letters, digits")):
            seq = 4 + ["one", "../one", ""].index(name)
            assert problem in await client.failed(
                await client.post("/save_weights", model_id=model, seq_id=seq, path=name)
            )
        info = await client.post("/weights_info", tinker_path=saved["path"])
        assert (info["lora_rank"], info["train_mlp"], info["base_model"]) == (3, True, "base")
        loaded = await client.done(
            await client.post("/load_weights", session_id=session, model_seq_id=1, path=saved["path"], optimizer=True)
        )
        assert same_bits(weights(client, loaded["model_id"]), weights(client, model))
        [listed] = (await client.get("/checkpoints"))["checkpoints"]
        assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("weights/one", "training")
        run = await client.get(f"/training_runs/{model}")
        assert run["last_checkpoint"]["tinker_path"] == saved["path"]
        answer = await client.http.delete(f"/training_runs/{model}/checkpoints/weights/one")
        assert answer.status_code == 204
        status, message = await client.refused(
            "/load_weights", model_id=model, seq_id=7, path=saved["path"], optimizer=True
        )
        assert (status, message.split(":")[0]) == (404, "there is no checkpoint 'tinker")


async def test_unnamed_weights_do_not_pile_up(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        model = await client.create(await client.session())
        for n in range(12):
            body = {"model_id": model, "seq_id": n + 1, "sampling_session_seq_id": n}
            await client.done(await client.post("/save_weights_for_sampler", body))
        folder = tmp_path / "sampler_weights" / model.replace(":", "-")
        assert sorted(path.name for path in folder.iterdir()) == sorted(f"session-{n}" for n in range(4, 12))
        future = await client.sample("s0:sample:0", 0, [1, 2])
        assert "session-0" in await client.failed(future)


async def test_what_is_refused(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base, open_requests=1) as client:
        session = await client.session()
        model = await client.create(session)
        ended = await client.session()
        await client.post(f"/sessions/{ended}/finish", reason={"type": "success"})
        create = {"session_id": session, "model_seq_id": 5, "base_model": "base", "lora_config": {"rank": 1}}
        cases: list[tuple[str, dict[str, Any], int, str]] = [
            ("/create_model", {**create, "base_model": "gpt"}, 400, "this server has 'base', got 'gpt'"),
            ("/create_model", {**create, "lora_config": None}, 400, "trains adapters only"),
            ("/create_model", {**create, "session_id": "s9"}, 404, "no session 's9'"),
            ("/create_model", {**create, "session_id": ended}, 410, "has ended (success)"),
            ("/create_model", {**create, "optimizer_config": {"type": "dimuon"}}, 400, "the only optimizer is Adam"),
            ("/create_model", {**create, "speed": 3}, 400, "speed: this server does not know it"),
            ("/session_heartbeat", {"session_id": ended}, 410, "has ended"),
            ("/optim_step", {"model_id": "m", "seq_id": 1}, 404, "no model 'm'"),
            ("/optim_step", {"model_id": model, "seq_id": 0}, 400, "seq_id"),
            ("/save_weights_for_sampler", {"model_id": model, "kind": "inflight"}, 400, "inflight"),
            ("/load_weights", {"model_id": model, "path": "tinker://a/weights/b"}, 404, "no checkpoint"),
            ("/load_weights", {"path": "a"}, 400, "give either model_id"),
            ("/asample", {"prompt": {"chunks": [{"type": "image"}]}}, 400, "chunks of tokens only"),
            ("/asample", {"prompt": {"chunks": []}, "prompt_alt_tokens_k": 2}, 400, "not sampled here"),
            ("/retrieve_future", {"request_id": "none"}, 410, "send the request again"),
            ("/weights_info", {"tinker_path": "tinker://x/y/z"}, 404, "no checkpoint"),
        ]
        for path, body, status, part in cases:
            got = await client.refused(path, body)
            assert got[0] == status and part in got[1], (path, body, got)
        await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP)  # waits for the first
        status, message = await client.refused("/optim_step", model_id=model, seq_id=3)
        assert (status, message) == (429, "1 requests are open; wait for some of them")


async def test_wrong_bodies_keys_and_routes(tmp_path: Path, base: PreTrainedModel) -> None:
    async with served(tmp_path, base) as client:
        model = await client.create(await client.session())
        assert (await Client(client.service, "tml-other").http.get("/healthz")).status_code == 401
        assert (await client.get("/healthz")) == {"status": "ok"}
        for path in ("/nothing", "/get_server_capabilities"):
            answer = await client.http.post(path, json={})
            assert answer.status_code in (404, 405) and "protocol of SDK 0.34 to 0.38" in answer.json()["detail"]
        for (method, path), sentence in UNSUPPORTED.items():
            at = path.format(session="s0", run="r", kind="weights", name="n")
            answer = await client.http.request(method, at)
            assert (answer.status_code, answer.json()["detail"]) == (400, sentence)
        assert not ROUTES.keys() & UNSUPPORTED.keys()
        body = forward_backward_body(model, 1, DATA, LOSS)
        for content, headers, part in (
            (body, {"content-type": "application/json"}, "protobuf only"),
            (body, {**PROTOBUF, "content-encoding": "zstd"}, "compressed"),
            (b"\xff" + body, PROTOBUF, "not a ForwardBackwardRequest"),
            (body[:-7], PROTOBUF, "not a ForwardBackwardRequest"),
        ):
            answer = await client.http.post("/forward_backward", content=content, headers=headers)
            assert answer.status_code in (400, 415) and part in answer.json()["detail"], answer.text


def test_the_page_has_the_table_of_methods() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text(encoding="utf-8")
    assert table() in page, f"python -m tests.tinker.methods:\n{table()}"
    routes = {route for methods in METHODS.values() for route in methods.values() if route is not None}
    assert routes <= ROUTES.keys() | UNSUPPORTED.keys()


async def test_samples_are_trajectories_of_the_run(tmp_path: Path, base: PreTrainedModel) -> None:
    """Of one task if their prompts are equal; a prompt that goes on from an earlier sample continues its trajectory."""
    config = build(RunConfig, {"recipe": "tinker", "data": {"train": {"source": IN_MEMORY}}, "model": {"path": "base"}})
    recording = Recording(tmp_path / "run", config, load_tokenizer(TOKENIZER).backend_tokenizer, "base")
    service = Service(models_of(base), recording.path, ["base"], TOKENIZER, SampleRecorder(recording))
    await service.start()
    client = Client(service)
    session = await client.session()
    model = await client.create(session)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = (await client.post("/create_sampling_session", body))["sampling_session_id"]
    first = await _sampled(client, sampler, 0, num_samples=3, sampling_params={"max_tokens": 4, "stop": []})
    [*_, chosen] = first
    prompt = [3, 1, 4, *chosen[0], 9, 2]
    future = await client.sample(sampler, 1, prompt, sampling_params={"max_tokens": 2, "stop": []})
    [second] = read_samples(await client.done(future))
    await client.done(await client.forward_backward(model, 1, DATA, LOSS))
    await client.done(await client.post("/optim_step", model_id=model, seq_id=2, adam_params=STEP))
    await client.http.aclose()
    await service.close()
    recording.close()
    recorded = {t.trajectory.trajectory_id: t.trajectory for t in Record.open(recording.path).trajectories()}
    assert sorted(len(t.steps) for t in recorded.values()) == [1, 1, 2]
    assert len({t.task_id for t in recorded.values()}) == 1
    [long] = [t for t in recorded.values() if len(t.steps) == 2]
    assert [step.completion_ids.tolist() for step in long.steps] == [chosen[0], second[0]]
    assert long.steps[1].prompt_ids.tolist() == prompt
    assert np.array_equal(long.steps[1].logprobs, second[1])
    facts = report_of(Record.open(recording.path))
    [steps] = facts["optimizer_steps"]
    assert (steps["model"], steps["steps"], steps["datums"]) == (model, 1, len(DATA))
