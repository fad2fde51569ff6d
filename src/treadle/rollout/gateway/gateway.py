"""`Gateway`: maps secrets to sessions, and answers their requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from treadle.core.types import DropReason, Message
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway.answers import Answers
from treadle.rollout.gateway.images import RequestImages
from treadle.rollout.gateway.request import Answer, AnyReply, ApiError, CompletionRequest
from treadle.rollout.gateway.retries import Exchanges
from treadle.rollout.other_models import POLICY, AttemptModel, AttemptModels
from treadle.rollout.session import Reply, Session


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """Address of a session.

    base_url: `http://127.0.0.1:8000/sessions/SECRET/v1`. Alternatively use the server's URL with the secret as API key.
    """

    secret: str = field(repr=False)
    base_url: str = field(repr=False)

    @property
    def anthropic_url(self) -> str:
        """For Anthropic's client, which adds `/v1` itself."""
        return self.base_url.removesuffix("/v1")


class Recorder(Protocol):
    """Records clients' use of a session as it happens. Raises ApiError if the disk refuses.

    ident: id of the session's trajectory; "" if each of its conversations is a trajectory.
    """

    @property
    def ident(self) -> str: ...

    def call(self, reply: Reply, request: CompletionRequest) -> None:
        """Record an answered call, with its messages and tools."""

    def drop(self, number: int, reason: DropReason | None) -> None:
        """Record whether a call counts."""

    def reward(self, reward: float, numbers: Sequence[int]) -> None:
        """Record the reward of the session, or of the conversations with these calls."""


Opener = Callable[[str], tuple[Session, Recorder]]
"""Opens a recorded session for an attempt at a task, given its task_id; "" for a new task."""

_VERDICTS = {"x-treadle-rejects": False, "x-treadle-accepts": True}
"""Header -> whether the answers it names were used."""


@dataclass(frozen=True, slots=True)
class Access:
    """What clients of a session may do beside calling the policy, and what becomes of their calls.

    models: models beside the policy that they may call, if any. opens: opens sessions, for keys that may. recorder:
    recorder of the session, if any. infer_rejected: whether to reject discarded answers (`gateway.answers`) that no
    header names.
    """

    models: AttemptModels | None = None
    opens: Opener | None = None
    recorder: Recorder | None = None
    infer_rejected: bool = False


_POLICY_ALONE = Access()


class ClientSession:
    """A session open to clients. Remembers conversations for requests that continue them by id.

    exchanges: its requests. bytes_in_flight: size of those being received or sampled. images: data URLs of the images
    in its requests, each to itself: most requests repeat those of earlier ones.
    """

    def __init__(self, session: Session, address: SessionAddress, gateway: Gateway, access: Access) -> None:
        self.session, self.address, self.access, self._note = session, address, access, gateway.note
        self.exchanges = Exchanges(self._set_delivered, gateway.grace, gateway.max_in_flight)
        self.bytes_in_flight = 0
        self.images: dict[str, str] = {}
        self._answers, self._said_used = Answers(), dict[int, bool]()  # by number of the step
        self._responses: dict[str, tuple[Message, ...]] = {}
        self._numbers: dict[str, list[int]] = {}  # numbers of steps, by response id

    def take_verdicts(self, headers: Mapping[str, str]) -> None:
        """Apply a request's headers about earlier answers. Raises ApiError (400) for an unknown id."""
        verdicts: dict[int, bool] = {}
        for name, used in _VERDICTS.items():
            for ident in filter(None, map(str.strip, headers.get(name, "").split(","))):
                verdicts |= dict.fromkeys(
                    self.numbers(ident, name, "give the ids of answers of this session, separated by commas"), used
                )
        self._said_used |= verdicts
        if self.access.recorder is not None:
            for number, used in verdicts.items():
                self.access.recorder.drop(number, None if used else DropReason.REJECTED)

    def numbers(self, ident: str, name: str, remedy: str) -> list[int]:
        """Return the numbers of an answer's steps. Raises ApiError (400), naming the field, for an unknown id."""
        if ident not in self._numbers:
            raise ApiError(400, f"{name}: no answer has the id {ident!r:.60}; {remedy}", name)
        return self._numbers[ident]

    async def answer(self, request: CompletionRequest, ident: str) -> Answer:
        """Sample every choice of every prompt; the policy's are recorded as steps. Raises as `Session.chat` does, and
        ApiError for an unknown model.
        """
        other = self._other(request)
        previous: tuple[Message, ...] = ()
        if request.previous is not None:
            if request.previous not in self._responses:
                text = f"previous_response_id: no response {request.previous!r:.60} here"
                raise ApiError(404, text, "previous_response_id")
            previous = self._responses[request.previous]
        history = (*previous, *request.messages)
        opening = (Message(role="system", content=request.instructions),) if request.instructions else ()
        whole = replace(request, messages=(*opening, *history))
        samples = request.choices * (1 if request.prompts is None else len(request.prompts))
        number = self._answers.ask()
        replies = await self._gather([self._call(whole, number, other) for number in range(samples)])
        for kind in request.left_out:
            self._note(f"agents offer tools of type {kind}, which no model here supports: they are left out")
        for note in self.session.notes.values():
            self._note(note)
        recorded = [reply for reply in replies if isinstance(reply, Reply)]
        if self.access.recorder is not None:
            for reply in recorded:
                self.access.recorder.call(reply, whole)
        self._numbers[ident] = [reply.number for reply in recorded]
        if request.prompts is None:
            if recorded:
                self._answers.answer(number, whole.messages, recorded)
            self._responses[ident] = (*history, replies[0].message)
        renderer = (other and other.renderer) or self.session.renderer
        return Answer(ident, int(time.time()), request, replies, renderer)

    def _other(self, request: CompletionRequest) -> AttemptModel | None:
        """Return the model beside the policy named by a request, if the recipe has any."""
        models, name = self.access.models, request.model
        if models is None or name in ("", POLICY):
            return None
        if name not in models:
            known = ", ".join((POLICY, *models))
            raise ApiError(404, f"model: there is no {name!r:.60} here; ask for one of {known}", "model")
        other = models.called(name)
        if request.prompts is not None or (other.renderer is None and (request.logprobs or request.token_ids)):
            what = "raw prompts" if request.prompts is not None else "ids and log-probabilities of tokens"
            raise ApiError(400, f"model: {what} are not available from {name!r}; request chat completions", "model")
        return other

    def _call(
        self, request: CompletionRequest, number: int, other: AttemptModel | None
    ) -> Coroutine[Any, Any, AnyReply]:
        (prompt, choice), options = divmod(number, request.choices), request.options
        if choice and "seed" in options.sampling_overrides:
            seed = (options.sampling_overrides["seed"] + choice) % 2**63
            options = replace(options, sampling_overrides={**options.sampling_overrides, "seed": seed})
        if other is not None:
            return other.ask(request.messages, request.tools, options)
        if not self.session.has_ids and (request.logprobs or request.token_ids):
            text = "ids and log-probabilities of tokens: the model is behind a chat endpoint; leave them out"
            raise ApiError(400, text, "logprobs" if request.logprobs else "return_token_ids")
        if request.prompts is not None:
            return self.session.complete(request.prompts[prompt], options)
        return self.session.chat(request.messages, request.tools, options)

    async def _gather(self, calls: Sequence[Coroutine[Any, Any, AnyReply]]) -> list[AnyReply]:
        """Return all replies. If a call fails, the others are aborted, and replies already recorded are dropped."""
        if len(calls) == 1:
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
                # Not after the wait, which may itself be cancelled.
                task.add_done_callback(self._drop)
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def close(self) -> None:
        """Abort requests in flight, close the session, and reject the steps of discarded answers."""
        await self.exchanges.close()
        self.session.close()
        unused = dict.fromkeys(self._answers.unused() if self.access.infer_rejected else (), False)
        for number, used in (unused | self._said_used).items():
            if not used:
                self.session.reject(number)

    def _set_delivered(self, number: int, delivered: bool) -> None:
        self.session.set_delivered(number, delivered)
        if self.access.recorder is not None:
            self.access.recorder.drop(number, None if delivered else DropReason.CANCELLED)

    def _drop(self, call: asyncio.Task[AnyReply]) -> None:
        if not call.cancelled() and call.exception() is None and isinstance(reply := call.result(), Reply):
            self._set_delivered(reply.number, False)


class Gateway:
    """Opens sessions to clients, each under a secret that gives access to nothing else.

    model: name listed by `/v1/models`; requests may name any. grace: seconds to keep sampling an answer that no client
    waits for. max_in_flight: number of requests of one session sampled concurrently. max_body: maximum size of a
    request, in bytes. max_bytes_in_flight: total size of one session's requests being received or sampled, in bytes.
    images: which images requests may have. log: receives each distinct warning about an ignored request field once.

    Secrets are looked up by digest, so that the time of a lookup reveals nothing about them.
    """

    def __init__(
        self,
        *,
        model: str = POLICY,
        grace: float = 5.0,
        max_in_flight: int = 256,
        max_body: int = 64 * 2**20,
        max_bytes_in_flight: int = 256 * 2**20,
        images: ImagesConfig = ImagesConfig(),  # noqa: B008  # frozen
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.max_body, self.max_bytes_in_flight = model, max_body, max_bytes_in_flight
        self.url = ""  # set by `serving`
        self.grace, self.max_in_flight = grace, max_in_flight
        self.images = RequestImages(images)
        self._log, self._logged = log, set[str]()
        self._attached: dict[bytes, ClientSession] = {}

    def attach(self, session: Session, access: Access = _POLICY_ALONE, secret: str | None = None) -> ClientSession:
        """Open a session to clients, by default under a new secret."""
        secret = secret or secrets.token_urlsafe(32)
        address = SessionAddress(secret, f"{self.url}/sessions/{secret}/v1")
        attached = self._attached[_digest(secret)] = ClientSession(session, address, self, access)
        return attached

    async def detach(self, secret: str) -> None:
        """Close a session. Its calls in flight are aborted; its steps stay. Ignores unknown secrets."""
        attached = self._attached.pop(_digest(secret), None)
        if attached is not None:
            await attached.close()

    @asynccontextmanager
    async def attached(self, session: Session, access: Access = _POLICY_ALONE) -> AsyncIterator[ClientSession]:
        attached = self.attach(session, access)
        try:
            yield attached
        finally:
            await self.detach(attached.address.secret)

    async def close(self) -> None:
        while self._attached:
            _, attached = self._attached.popitem()
            await attached.close()

    def find(self, secret: str) -> ClientSession | None:
        return self._attached.get(_digest(secret))

    def note(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
