"""Wrong bodies: each is answered by a sentence, and changes nothing."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.models import same_bits
from tests.tinker.protocol import PROTOBUF, Client, forward_backward_body, served, settled
from tests.tinker.test_server import DATA, LOSS, STEP, base, direct, weights
from treadle.tinker.app import ROUTES

assert base  # a fixture
ODD: list[Any] = [None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.5, "", "a", "../..", "\x00", "é" * 300, [], {}]
ODD += [[1, "a"], {"a": {"b": []}}, [[[]]], [2**40] * 3, "tinker://s0:train:0/weights/x", "s0", "s0:train:0", "NaN"]


def valid(model: str) -> dict[str, dict[str, Any]]:
    session, of = "s0", {"model_id": model, "seq_id": 1000}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {
        "/create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.38"},
        "/session_heartbeat": {"session_id": session},
        "/create_model": {"session_id": session, "model_seq_id": 9, "base_model": "base", "lora_config": {"rank": 1}},
        "/create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "base"},
        "/join_sampling_session": {"sampling_session_id": "s0:sample:1"},
        "/asample": {"prompt": prompt, "sampling_params": {"max_tokens": 2, "stop": [], "seed": 1},
                     "base_model": "base", "prompt_logprobs": True, "topk_prompt_logprobs": 2, "num_samples": 2,
                     "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}},
        "/optim_step": {**of, "adam_params": STEP},
        "/save_weights": {**of, "path": "a", "ttl_seconds": 5},
        "/save_weights_for_sampler": {**of, "path": "a"},
        "/load_weights": {**of, "path": "tinker://a/weights/b", "optimizer": True},
        "/get_info": {"model_id": model},
        "/retrieve_future": {"request_id": f"{model}:create"},
        "/cancel_future": {"request_id": "x"},
        "/weights_info": {"tinker_path": "tinker://a/weights/b"},
        "/sessions/s9/finish": {"reason": {"type": "success"}, "detail": None},
        "/telemetry": {"events": []},
    }  # fmt: skip


def mangled(body: Any, draw: random.Random) -> Any:
    """A copy with one value replaced, left out, or added, anywhere in it."""
    body = copy.deepcopy(body)
    where = body
    while isinstance(where, dict | list) and where:
        key = draw.choice(list(where)) if isinstance(where, dict) else draw.randrange(len(where))
        deeper = where[key]
        if isinstance(deeper, dict | list) and deeper and draw.random() < 0.7:
            where = deeper
            continue
        action = draw.randrange(4)
        if action == 0:
            del where[key]
        elif action == 1 and isinstance(where, dict):
            where[draw.choice(["extra", "\x00", ""])] = draw.choice(ODD)
        else:
            where[key] = draw.choice(ODD)
        break
    return body


def bytes_of(body: Any, draw: random.Random) -> bytes:
    content = bytearray(json.dumps(body).encode())
    if draw.random() < 0.2:
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content[: draw.randrange(len(content))] if draw.random() < 0.1 else content)


async def refused_or_harmless(client: Client, model: str, seed: int) -> None:
    draw = random.Random(seed)
    bodies = valid(model)
    path = draw.choice([*bodies, "/forward_backward", "/forward_backward", "/forward_backward"])
    if path == "/forward_backward":
        content = bytearray(forward_backward_body(model, 1000 + seed, DATA[:2], LOSS, forward_only=True))
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(content))
            content[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        answer = await client.http.post(path, content=bytes(content), headers=PROTOBUF)
    else:
        answer = await client.http.post(path, content=bytes_of(mangled(bodies[path], draw), draw))
    assert answer.status_code < 500, (seed, path, answer.text)
    if answer.status_code >= 400 and answer.status_code != 408:
        assert len(answer.json()["detail"]) > 5, (seed, path, answer.text)


async def attack(folder: Path, base: PreTrainedModel, count: int) -> None:
    async with served(folder, base, gap=0.01) as client:
        model = await client.create(await client.session())
        await client.done(await client.forward_backward(model, 1, DATA, LOSS))
        for seed in range(count):
            await refused_or_harmless(client, model, seed)
        await settled(client.service)
        assert client.service.failure is None
        errors = client.service.journal.rows("SELECT request, result FROM requests WHERE state = 'failed'")
        assert not [row for row in errors if b'"category": "server"' in row["result"]], errors
        row = client.service.journal.row("SELECT max(seq) AS last FROM requests WHERE owner = ?", model)
        assert row is not None
        await client.done(await client.post("/optim_step", model_id=model, seq_id=row["last"] + 1, adam_params=STEP))
        assert same_bits(weights(client, model), direct(base))


async def test_a_hundred_wrong_bodies(tmp_path: Path, base: PreTrainedModel) -> None:
    assert {path for _, path in ROUTES if "{" not in path} <= {*valid("m"), *UNTRIED}
    await attack(tmp_path, base, 100)


UNTRIED = {
    *("/healthz", "/client/config", "/client/dynamic_config", "/get_server_capabilities", "/metrics", "/sessions"),
    *("/unload_model", "/forward_backward", "/checkpoints", "/training_runs"),
}


@pytest.mark.slow
async def test_two_thousand_wrong_bodies(tmp_path: Path, base: PreTrainedModel) -> None:
    await attack(tmp_path, base, 2000)
