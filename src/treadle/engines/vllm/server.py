"""One vLLM server over HTTP: completions of admitted weights, health, and detection of lost servers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.images import PromptImage
from treadle.core.support import Probabilities, Support
from treadle.core.text import keys_in, redacted
from treadle.core.types import Floats, Ids, Routing, SamplingParams, StopReason
from treadle.engines.vllm.images import Pictures, check_ids, prompt_of
from treadle.engines.vllm.launch import VERSION, alternatives

COLDEST = 0.01
"""The lowest temperature above 0 at which vLLM samples."""
_METRIC = r"^vllm:%s(?:\{.*\})? (\S+)$"
_CONNECT = 10.0  # seconds to open a connection
_TELLING = 30.0  # seconds for an answer of the process that makes rollout workers' calls
_EXCERPT = 500  # characters of a response shown in an error
MOST_PROBABLE = 20  # of centered scores; what a server lists unless --max-logprobs says otherwise
_REMOVED = -9999.0  # what vLLM reports for -inf


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter loaded by servers under a name. directory: path of its files. pinned: whether sessions keep it."""

    name: str
    version: int
    directory: Path
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The label of the serving weights, and the policy version of each label admitted so far."""

    label: str = ""
    versions: Mapping[str, int] = field(default_factory=dict)

    @property
    def version(self) -> int | None:
        """The serving version; None before the first."""
        return self.versions.get(self.label)

    def then(self, label: str, version: int) -> Admitted:
        return Admitted(label, {**self.versions, label: version})

    def salt(self, cache_salt: str | None) -> str:
        """Combine a call's cache salt with the weights, so that versions never share a prefix cache."""
        return hashlib.sha256(f"{self.label}|{cache_salt or ''}".encode()).hexdigest()[:32]

    def spans(self, reported: Sequence[Mapping[str, object]]) -> tuple[VersionSpan, ...]:
        """Translate labels reported by a server into policy versions.

        Raises EngineError for weights that were never admitted.
        """
        spans = []
        for span in reported:
            label = str(span["version"])
            if label not in self.versions:
                raise EngineError(f"weights {label!r} sampled tokens but were never admitted; sample them again")
            spans.append(VersionSpan(self.versions[label], int(str(span["start"])), int(str(span["end"]))))
        return tuple(spans)


class Admission:
    """A gate before calls: closed until weights are admitted, and while they change."""

    def __init__(self) -> None:
        self.now = Admitted()
        self._open = asyncio.Event()

    def hold(self) -> None:
        self._open.clear()

    def open(self, admitted: Admitted) -> None:
        self.now = admitted
        self._open.set()

    async def settled(self) -> None:
        await self._open.wait()


class Started(Protocol):
    """A server started for an engine, on this machine or another. log: file with its output."""

    @property
    def url(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def running(self) -> bool: ...

    @property
    def route(self) -> Any:
        """Handle for its calls in another process; None if there are none, and then `hold` and `open` are no-ops."""

    async def hold(self) -> None:
        """Let no call begin or return there until `open`. Raises EngineError."""

    async def open(self, admitted: Admitted) -> None:
        """Let calls continue there, under these weights. Raises EngineError."""

    async def stop(self) -> None:
        """End it. Idempotent."""


class ServerLost(EngineError):
    """Raised for calls of a permanently lost server. Idempotent calls may be repeated on another server."""


class Server:
    """Client of one server, which may be a process started by Treadle.

    Invariant: a lost server stays lost, as it would come back with outdated weights; another one takes its place.
    """

    def __init__(self, url: str, process: Started | None = None) -> None:
        self.url, self.process = url.rstrip("/"), process
        # One connection per call: the server may close a pooled one just as it is reused.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(None, connect=_CONNECT), limits=limits)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.context = 0  # tokens, prompt and completion together; set by `read_context`
        self.workers = 0  # processes with the model or parts of it; set only for broadcasts
        self.metrics: dict[str, Any] = {}  # latest result of `parse_metrics`

    def __str__(self) -> str:
        return f"vLLM server {redacted(self.url)}" + (f" (log: {self.process.log})" if self.process else "")

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def end(self) -> None:
        await asyncio.wait([self._lost])

    def lose(self, reason: str) -> None:
        """Give the server up: its calls fail now, and no more are made."""
        if not self._lost.done():
            self._lost.set_result(reason)

    def error(self) -> ServerLost:
        return ServerLost(f"{self} is lost: {self._lost.result()}")

    async def is_well(self) -> bool:
        """Return whether `/health` reports success within ten seconds. It fails once vLLM's engine has died."""
        if self.process is not None and not self.process.running:
            return False
        response = await self._try_get("/health", 10.0)
        return response is not None and response.status_code == 200

    async def check(self, seconds: float) -> bool:
        """Read the metrics, and return whether the engine answers in time.

        `/health` would be answered by the API process, even while the engine's own is stopped.
        """
        metrics = await self._try_get("/metrics", 10.0)
        self.metrics = {} if metrics is None else parse_metrics(metrics.text)
        paused = await self._try_get("/is_paused", seconds)
        return paused is not None and (paused.status_code < 500 or await self.is_well())

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Make an idempotent call, twice if the connection breaks but the server is healthy; return the answer.

        One with images is also repeated after an internal error of a healthy server, which has forgotten the pixels of
        a call that was cancelled.

        Raises EngineError for any status but 200, ServerLost if the server is or gets lost. Cancelling closes the
        connection, and vLLM aborts the work.
        """
        for last in (False, True):
            try:
                response = await self._unless_lost(self._http.post(path, json=body, params=query))
            except httpx.TransportError as error:
                if last or self.is_lost or not await self.is_well():
                    self.lose(f"{type(error).__name__} {error}".strip())
                    raise self.error() from error
                continue
            if response.status_code >= 500 and (self.is_lost or not await self.is_well()):
                self.lose(f"it answered {self._problem(response)}")
                raise self.error()
            if response.status_code >= 500 and not last and "content_parts" in (body or {}):
                continue
            return self._content(path, response)
        raise AssertionError("unreachable")

    async def get(self, path: str, seconds: float = 30.0) -> Any:
        response = await self._try_get(path, seconds)
        if response is None:
            raise EngineError(f"{self}: {path} was not answered")
        return self._content(path, response)

    async def score(
        self,
        ids: Ids,
        temperature: float = 1.0,
        salt: str | None = None,
        adapter: Adapter | None = None,
        images: Sequence[PromptImage] = (),
        pictures: Pictures | None = None,
        label: str = "",
    ) -> Floats:
        """Return the log-probability of ids[1:]: int32[T] -> float32[T - 1]. Raises EngineError.

        One call at temperature 1. vLLM scores prompts at no other, so any other takes one call per token, which may use
        prefixes cached under `salt`, and has no images. pictures, label: see `prompt_of`.
        """
        # vLLM samples a token, too.
        if len(ids) + 1 > self.context:
            raise EngineError(f"{len(ids)} tokens to score, and one that vLLM samples, exceed {self.context}")
        if temperature != 1.0:
            if images:
                raise EngineError(f"vLLM scores prompts with images at temperature 1 alone, not at {temperature}")
            calls = (self._score_next(ids[:n], int(ids[n]), temperature, salt, adapter) for n in range(1, len(ids)))
            return np.array(await asyncio.gather(*calls), np.float32)
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = {**await prompt_of(ids, images, label, pictures), "sampling_params": sampling, **_model(adapter)}
        answer = await self.post("/inference/v1/generate", body)
        check_ids(self, answer, ids, images)
        entries = answer["prompt_logprobs"] or []
        if len(entries) != len(ids):
            raise EngineError(f"{self} returned {len(entries)} log-probabilities for {len(ids)} tokens to score")
        scored = zip(entries[1:], ids[1:].tolist(), strict=True)
        return np.array([entry[str(token)]["logprob"] for entry, token in scored], np.float32)

    async def load(self, update: Mapping[str, Any], label: str) -> None:
        """Have the server load the weights described by `update`, and report this label.

        Raises EngineError; the server may then be half loaded.
        """
        await self.post("/start_weight_update")
        await self.post("/update_weights", {"update_info": update})
        await self.post("/finish_weight_update", {"weight_version": label})

    async def loads_adapters(self) -> bool:
        """Return whether it was started with dynamic loading of adapters."""
        response = await self._try_get("/v1/load_lora_adapter", 30.0)
        return response is not None and response.status_code == 405  # POST alone is allowed

    async def read_context(self) -> None:
        [model] = (await self.get("/v1/models"))["data"][:1]
        self.context = int(model["max_model_len"])

    async def hold(self) -> None:
        """Hold calls made by another process. A process that does not answer loses the server."""
        if self.process is not None:
            await self._or_lose(self.process.hold())

    async def open(self, admitted: Admitted) -> None:
        """Release held calls of other processes. Fails like `hold`."""
        if self.process is not None:
            await self._or_lose(self.process.open(admitted))

    async def close(self) -> None:
        """Fail waiting calls, close connections, end the process if Treadle started it. Idempotent."""
        self.lose("the engine was closed")
        await self._http.aclose()
        if self.process is not None:
            await self.process.stop()

    async def _or_lose(self, message: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_TELLING):
                await message
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no answer for {_TELLING:g} s"
            self.lose(f"the process that makes rollout workers' calls to it: {reason}")

    async def _score_next(
        self, prompt: Ids, token: int, temperature: float, salt: str | None, adapter: Adapter | None
    ) -> float:
        # One more, because the sampled token takes one of the answers.
        asked = [token, 0 if token else 1]
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 2, "logprob_token_ids": asked}
        body = {"token_ids": prompt.tolist(), "sampling_params": sampling, "cache_salt": salt, **_model(adapter)}
        answer = await self.post("/inference/v1/generate", body)
        [content] = answer["choices"][0]["logprobs"]["content"]
        logprobs = {entry["token_id"]: float(entry["logprob"]) for entry in [*content["top_logprobs"], content]}
        if token not in logprobs:
            raise EngineError(f"{self} returned log-probabilities of {sorted(logprobs)}, not of {token}")
        return logprobs[token]

    async def _try_get(self, path: str, seconds: float) -> httpx.Response | None:
        """Return the response to a GET request; None after a timeout."""
        try:
            return await self._http.get(path, timeout=httpx.Timeout(seconds, connect=_CONNECT))
        except httpx.TransportError:
            return None

    def _content(self, path: str, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise EngineError(f"{self}: {path} answered {self._problem(response)}")
        try:
            return response.json() if response.content else None
        except ValueError:
            # vLLM answers some calls in plain text.
            return response.text

    def _problem(self, response: httpx.Response) -> str:
        return f"{response.status_code}: {redacted(response.text, *keys_in(self.url)):.{_EXCERPT}}"

    async def _unless_lost(self, call: Any) -> httpx.Response:
        """Return the response, or raise ServerLost as soon as the server is given up."""
        work = asyncio.ensure_future(call)
        try:
            await asyncio.wait({work, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self.error()
            response: httpx.Response = work.result()
            return response
        finally:
            work.cancel()


def parse_metrics(text: str) -> dict[str, Any]:
    """Return {"running": calls, "waiting": calls, "cache": share of blocks in use} of a server's metrics.

    Empty if one of them is missing. A server reports one value for each of its engines.
    """
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    running, waiting, cache = ([*map(float, re.findall(_METRIC % name, text, re.MULTILINE))] for name in names)
    if not (running and waiting and cache):
        return {}
    return {"running": int(sum(running)), "waiting": int(sum(waiting)), "cache": max(cache)}


def serving(servers: Sequence[Server]) -> list[Server]:
    return [server for server in servers if not server.is_lost]


async def on_each(servers: Sequence[Server], call: Callable[[Server], Awaitable[object]]) -> None:
    """Call every live server, concurrently. One lost meanwhile is skipped.

    Raises the first error of the others, and EngineError if all are lost.
    """
    called = serving(servers)
    answers = await asyncio.gather(*(call(server) for server in called), return_exceptions=True)
    for server, answer in zip(called, answers, strict=True):
        if isinstance(answer, BaseException) and not server.is_lost:
            raise answer
    if not serving(servers):
        raise EngineError("; ".join(str(server.error()) for server in servers))


def check_call(prompt: int, sampling: SamplingParams, context: int) -> None:
    """Raise EngineError if a call exceeds the context, or if vLLM would silently change its sampling."""
    # vLLM would silently cut the completion short.
    if prompt + sampling.max_tokens > context:
        raise EngineError(
            f"prompt of {prompt} + max_tokens {sampling.max_tokens} exceeds the servers' context of {context}"
        )
    if sampling.forbidden:
        raise EngineError(f"vLLM cannot forbid ids as training needs it, got {sampling.forbidden[:3]}; leave them out")
    if 0 < sampling.temperature < COLDEST:
        raise EngineError(
            f"vLLM clamps temperatures below {COLDEST} (got {sampling.temperature}); use 0 or >= {COLDEST}"
        )


async def sample(
    server: Server,
    admission: Admission,
    prompt_ids: Ids,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    cache_salt: str | None,
    expert_layers: Sequence[int] | None = None,
    adapter: Adapter | None = None,
    probabilities: int | None = None,
    images: Sequence[PromptImage] = (),
    pictures: Pictures | None = None,
) -> Completion:
    """Sample one completion from admitted weights. Cancelling aborts it on the server.

    expert_layers: hidden layers with experts to report; None: no routing. adapter: adapter that samples all tokens.
    probabilities: report those of so many most probable ids, as far as they are asked for. pictures: writes images.
    Raises EngineError for a refused request, weights that were not admitted, missing experts, more kept tokens than are
    reported, or images that are not shown as recorded; ServerLost.
    """
    # A completion that begins now uses the new weights.
    await admission.settled()
    kept = 0 if sampling.temperature == 0 else alternatives(sampling.top_k)
    listed = (
        kept if probabilities is None or sampling.temperature == 0 else max(kept, min(probabilities, MOST_PROBABLE))
    )
    params: dict[str, Any] = {  # sets every parameter with a possible default on the server
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "logprobs": listed,  # beside the sampled token
        # Ignores the server's; stop_token_ids has ours.
        "ignore_eos": True,
        "stop_token_ids": list(stop_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    if sampling.grammar:
        params["structured_outputs"] = {"grammar": sampling.grammar}
    # From the prompt's last token on, which predicts the first sampled one.
    if expert_layers is not None:
        params["routed_experts_prompt_start"] = len(prompt_ids) - 1
    label, salt = admission.now.label, admission.now.salt(cache_salt)
    prompt = await prompt_of(prompt_ids, images, label, pictures)
    body = {**prompt, "sampling_params": params, "cache_salt": salt, **_model(adapter)}
    answer = await server.post("/inference/v1/generate", body)
    check_ids(server, answer, prompt_ids, images)
    # One that ends now may have tokens of weights not admitted yet.
    await admission.settled()
    [choice] = answer["choices"][:1]
    logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
    tokens = len(choice["token_ids"])
    return Completion(
        token_ids=np.array(choice["token_ids"], np.int32),
        logprobs=np.zeros_like(logprobs) if sampling.temperature == 0 else np.minimum(logprobs, 0.0),
        stop_reason=StopReason(choice["finish_reason"]),
        policy_versions=admission.now.spans(choice["weight_versions"] or [])
        if adapter is None
        else (VersionSpan(adapter.version, 0, tokens),) * bool(tokens),
        routing=None if expert_layers is None else decode_routing(server, choice, expert_layers),
        pinned=adapter is not None and adapter.pinned,
        support=decode_support(server, choice) if kept else None,
        probabilities=decode_probabilities(choice, min(probabilities, listed - 1))
        if probabilities and listed
        else None,
    )


def decode_support(server: Server, choice: Mapping[str, Any]) -> Support:
    """Return the ids that filters kept for each sampled token: the most probable ones, as far as they have any.

    Raises EngineError if no listed one was removed, so that more may have been kept.
    """
    kept: list[list[int]] = []
    for entry in choice["logprobs"]["content"]:
        listed = entry["top_logprobs"]
        each = [other["token_id"] for other in listed if other["logprob"] > _REMOVED]
        if len(each) == len(listed):
            raise EngineError(
                f"{server} kept {len(each)} tokens or more, too many being as probable as the last one of top_k; set "
                "engine.dtype=float32, or another rollout.top_k"
            )
        kept.append(sorted({entry["token_id"], *each}))
    return Support.of(kept)


def decode_probabilities(choice: Mapping[str, Any], most: int) -> Probabilities:
    """Return the probabilities of the most probable ids at each sampled token, as far as they could be sampled.

    most: less than are listed, as the sampled one takes the last place where it is less probable.
    """
    tokens = []
    for entry in choice["logprobs"]["content"]:
        listed = [(other["logprob"], other["token_id"]) for other in entry["top_logprobs"]]
        likely = sorted(
            (ident, logprob) for logprob, ident in sorted(listed, reverse=True)[:most] if logprob > _REMOVED
        )
        ids, logprobs = zip(*likely, strict=True)
        tokens.append((np.array(ids, np.int32), np.exp(np.minimum(logprobs, 0.0)).astype(np.float32)))
    return Probabilities.of_tokens(tokens)


def _model(adapter: Adapter | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter.name}


def decode_routing(server: Server, choice: Mapping[str, Any], expert_layers: Sequence[int]) -> Routing | None:
    """Return the experts chosen for C sampled tokens in these M layers: int16[C, M, k]; None if no token was sampled.

    vLLM reports all hidden layers, with zeros for those without experts.
    Raises EngineError unless there is one row for each sampled token.
    """
    tokens, encoded = len(choice["token_ids"]), choice.get("routed_experts")
    if not tokens:  # aborted before its first token
        return None
    if encoded is None:
        raise EngineError(
            f"{server} does not report the experts it chose; start it with --enable-return-routed-experts, or set "
            "training.routing_replay to false"
        )
    try:
        reported = np.load(io.BytesIO(b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EngineError(f"{server} reports experts that are not a .npy file in base64: {error}") from error
    if reported.ndim != 3 or len(reported) != tokens or reported.shape[1] <= max(expert_layers):
        raise EngineError(
            f"{server} reports experts of shape {reported.shape} for {tokens} sampled tokens and hidden layers up to "
            f"{max(expert_layers)}; use vLLM {VERSION}, or set training.routing_replay to false"
        )
    return np.asarray(reported[:, list(expert_layers)], np.int16)
