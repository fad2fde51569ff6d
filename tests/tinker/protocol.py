"""The protocol by plain requests, against an application in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import PreTrainedModel

from tests.models import tiny
from tests.tinker.kit import TOKENIZER
from treadle.engines.torch.options import TorchEngineOptions
from treadle.tinker.app import make_app
from treadle.tinker.data import Datum
from treadle.tinker.models import Models
from treadle.tinker.service import Limits, Service
from treadle.tinker.wire import MESSAGES

KEY = "tml-key"
PROTOBUF = {"content-type": "application/x-protobuf"}


class Client:
    """One client."""

    def __init__(self, service: Service, key: str = KEY) -> None:
        self.service = service
        transport = httpx.ASGITransport(make_app(service, KEY), raise_app_exceptions=True)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://server/api/v1", headers={"x-api-key": key}, timeout=None
        )

    async def post(self, path: str, body: Any = None, /, **more: Any) -> Any:
        """The answer to a request that is not refused."""
        response = await self.http.post(path, json={**(body or {}), **more})
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, body: Any = None, /, **more: Any) -> tuple[int, str]:
        response = await self.http.post(path, json={**(body or {}), **more})
        return response.status_code, response.json()["detail"]

    async def get(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def session(self) -> str:
        return str((await self.post("/create_session", tags=[], user_metadata={}, sdk_version="0.38"))["session_id"])

    async def create(self, session: str, number: int = 0, **lora: Any) -> str:
        """The id of a new model."""
        lora = {"rank": 3, "seed": 7, **lora}
        body = {"session_id": session, "model_seq_id": number, "base_model": "base", "lora_config": lora}
        return str((await self.done(await self.post("/create_model", body)))["model_id"])

    async def done(self, future: Mapping[str, Any]) -> Any:
        """The result of a request that did not fail."""
        result = await self.result(future)
        assert not isinstance(result, dict) or "error" not in result, result
        return result

    async def failed(self, future: Mapping[str, Any]) -> str:
        result = await self.result(future)
        assert isinstance(result, dict) and result["category"] == "user", result
        return str(result["error"])

    async def result(self, future: Mapping[str, Any]) -> Any:
        """A result, JSON or bytes, waiting for it."""
        while True:
            response = await self.http.post("/retrieve_future", json={"request_id": future["request_id"]})
            if response.status_code != 408:
                break
            if self.service.failure is not None:
                raise self.service.failure
        assert response.status_code == 200, response.text
        return response.json() if "json" in response.headers["content-type"] else response.content

    async def forward_backward(self, model: str, seq: int, data: Sequence[Datum], loss: str, **more: Any) -> Any:
        body = forward_backward_body(model, seq, data, loss, **more)
        response = await self.http.post("/forward_backward", content=body, headers=PROTOBUF)
        assert response.status_code == 200, response.text
        return response.json()

    async def sample(self, sampler: str, seq: int, prompt: Sequence[int], **more: Any) -> Any:
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": list(prompt)}]}}
        return await self.post("/asample", {**body, "sampling_params": {"max_tokens": 4}, **more})


def forward_backward_body(
    model: str,
    seq: int,
    data: Sequence[Datum],
    loss: str,
    *,
    forward_only: bool = False,
    options: Mapping[str, float] | None = None,
    inputs: Sequence[Sequence[tuple[str, int, int, bool]]] = (),
    targets: Sequence[Sequence[tuple[str, int, int, bool]]] = (),
) -> bytes:
    """inputs, targets: provenance of each datum, (sequence, offset, length, whether it was sampled)."""
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )  # fmt: skip
    for name, value in (options or {}).items():
        message.loss_fn_config_v2.add(key=name).value.number = value
    for number, datum in enumerate(data):
        written = message.data.add()
        written.model_input.add().encoded_text.tokens = datum.ids.astype("<i4").tobytes()
        for name, array in datum.inputs.items():
            assert isinstance(array, np.ndarray)
            value = written.loss_fn_inputs.add(key=name).value
            whole = array.dtype.kind == "i"
            value.dense, value.dtype = array.astype("<i8" if whole else "<f4").tobytes(), 2 if whole else 1
            value.shape.extend(array.shape)
        if inputs:
            for spans, field in (
                (inputs[number], written.model_input_spans), (targets[number], written.loss_fn_input_spans),
            ):  # fmt: skip
                for name, offset, length, sampled in spans:
                    part = field.add()
                    span = part.sampled_tokens if sampled else part.prompt_tokens
                    span.sequence_id, span.offset, span.length = name, offset, length
    return bytes(message.SerializeToString())


def read_outputs(content: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """The log-probabilities of each datum, and the metrics."""
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(content)
    arrays = []
    for record in message.loss_fn_outputs:
        [field] = record.fields
        assert field.key == "logprobs"
        arrays.append(np.frombuffer(field.value.data, "<f4").reshape(-1, *field.value.trailing_shape))
    return arrays, {each.key: each.value for each in message.metrics}


def read_samples(content: bytes) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and log-probabilities of each sequence."""
    message = MESSAGES["SampleResponse"]()
    message.ParseFromString(content)
    return [(np.frombuffer(s.tokens, "<i4").tolist(), np.frombuffer(s.logprobs, "<f4")) for s in message.sequences]


def models_of(base: PreTrainedModel | None = None) -> Models:
    options = TorchEngineOptions((0,), cache_gib=0.1)
    return Models(base or tiny(), TOKENIZER, options, lambda ids: "".join(chr(97 + i) for i in ids))


@asynccontextmanager
async def served(folder: Path, base: PreTrainedModel, save: bool = True, **limits: Any) -> AsyncIterator[Client]:
    """A client of a new server over a directory, which may have been another's. save: whether it ends in order."""
    folder.mkdir(exist_ok=True)
    service = Service(models_of(base), folder, ["base"], TOKENIZER, limits=Limits(**limits))
    await service.start()
    client = Client(service)
    try:
        yield client
    finally:
        await client.http.aclose()
        await service.close(save)


async def settled(service: Service) -> None:
    """Wait until the server has nothing to do."""
    while any(service.counts()[name] for name in ("sampling", "waiting")):
        await asyncio.sleep(0.005)


def facts(content: Any) -> Any:
    return json.loads(content) if isinstance(content, bytes) else content
