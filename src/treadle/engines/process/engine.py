"""`ProcessEngine`: a `TorchEngine` in a process of its own, so that inference, learner and environments never wait for
one another's thread.

    open / close / generate -> held -> wave --(channel)--> worker -> TorchEngine -> answers
    update_weights -> a file in shared memory ------------^

If that process ends, another one takes its place, with the weights that were published last: their file is kept until
others are published. It must score a probe as the one before it did. It samples what the same engine in this process
would sample, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.status import ComponentStatus
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.config import tolerance_of
from treadle.engines.limits import Limits
from treadle.engines.lock_step import everybody_waits
from treadle.engines.process.protocol import Message, completion_of, sampling_message
from treadle.engines.process.rpc import EngineEnded, Link
from treadle.engines.staging import Staged
from treadle.engines.torch.options import TorchEngineOptions

_CHILD = "treadle.engines.process.worker"
_CLOSED = "the engine was closed"
_PROBE = 64  # tokens that a process which replaces another one is proven with


async def start_engine(
    model: Path,
    options: TorchEngineOptions,
    *,
    log: Path,
    timeout: float = 600.0,
    silence: float = 60.0,
    notify: Callable[[str], None] = lambda line: None,
    on_close: Callable[[], None] = lambda: None,
) -> ProcessEngine:
    """Return a `ProcessEngine` that has loaded `model`, a directory with model and tokenizer, needed until `on_close`.

    It computes with as many threads as this process does now, and deterministically if this process does.
    log: where the process writes. timeout: seconds it may take to start, or to take new weights.
    silence: seconds without any message after which it is killed. notify: gets a line when it is started again.
    Raises EngineError, with the end of the log, if it does not start.
    """
    load: Message = {
        "do": "load",
        "model": str(model.absolute()),
        "options": {**asdict(options), "stop_token_ids": list(options.stop_token_ids)},
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return await connect_engine(
        partial(Link.start, _CHILD, log),
        load,
        lock_step=options.lock_step,
        tolerance=tolerance_of(options.dtype),
        timeout=timeout,
        silence=silence,
        notify=notify,
        on_close=on_close,
    )


async def connect_engine(
    connect: Callable[[], Awaitable[Link]],
    load: Message,
    *,
    lock_step: bool,
    tolerance: float,
    timeout: float = 600.0,
    silence: float = 60.0,
    name: str = "the engine",
    notify: Callable[[str], None] = lambda line: None,
    on_close: Callable[[], None] = lambda: None,
) -> ProcessEngine:
    """Return a `ProcessEngine` whose process has answered the `load` message.

    connect: starts a process; called again whenever one has ended. tolerance: by how much log-probabilities of the same
    weights may differ, on average. name: in what `notify` gets. See `start_engine`.
    """
    process = _Process(partial(_start, connect, timeout), load, timeout, silence, name, tolerance)
    try:
        link, [facts] = await process.start([load])
    except BaseException:
        on_close()
        raise
    limits = Limits(facts["vocabulary"], facts["context"])
    return ProcessEngine(link, limits, process, lock_step, notify, on_close)


@dataclass(frozen=True, slots=True)
class _Process:
    """How an engine's process is started: with these orders, of which `load` is the first. See `start_engine`."""

    start: Callable[[Sequence[Message]], Awaitable[tuple[Link, list[Message]]]]
    load: Message
    timeout: float
    silence: float
    name: str
    tolerance: float


async def _start(
    connect: Callable[[], Awaitable[Link]], timeout: float, orders: Sequence[Message]
) -> tuple[Link, list[Message]]:
    """Start a process and return it with its answers to these orders."""
    link: Link | None = None
    try:
        async with asyncio.timeout(timeout):
            link = await connect()
            answers = [await link.call(order) for order in orders]
    except BaseException as error:
        if link is not None:
            await link.close(_CLOSED)
        if not isinstance(error, TimeoutError):
            raise
        tail = "no place for it was free" if link is None else link.channel.tail()
        raise EngineError(f"the engine's process did not start within {timeout:g} s; {tail}") from error
    return link, answers


class ProcessEngine:
    """Passes calls on to a `TorchEngine` in another process. Made by `start_engine`.

    In lock-step, waves are formed here, by TorchEngine's rule and as many turns of the event loop after the call that
    completes one: in the other process they would depend on when messages arrive. The other engine receives calls and
    sessions one wave at a time, and then has every open session waiting.
    If the process ends, or is killed because it sends nothing (it may be stopped), calls that were sent to it fail with
    an EngineError that holds its exit code and the end of its log; a publication, and calls that were not yet sent,
    wait for the next process, which has the same sessions and the weights that were published last. A replacement that
    does not start, or ends before it has answered a call, is not replaced again: every call fails.
    """

    def __init__(
        self,
        link: Link,
        limits: Limits,
        process: _Process,
        lock_step: bool,
        notify: Callable[[str], None],
        on_close: Callable[[], None],
    ) -> None:
        self.limits, self._lock_step = limits, lock_step
        self._begin, self._timeout, self._silence = process.start, process.timeout, process.silence
        self._name, self._tolerance = process.name, process.tolerance
        ids = np.random.default_rng(0).integers(0, limits.vocabulary, min(_PROBE, limits.context))
        self._probe: list[int] = ids.tolist()
        self._notify, self._on_close = notify, on_close
        self._orders = [process.load]  # then the publication that succeeded last: what the next process begins with
        self._file: Staged | None = None  # of that publication
        self._scores: Sequence[float] = ()  # of the probe under its weights
        self._over: str | None = None  # why nothing is served any more
        self._sessions: dict[str, None] = {}  # in the order of opening
        self._calls = 0  # that sample
        self._held: list[tuple[Message, asyncio.Future[Message] | None]] = []  # not yet sent, in order
        self._waiting: dict[asyncio.Future[Message], str] = {}  # calls among them -> session
        self._driver: asyncio.Task[None] | None = None
        self._publication = asyncio.Lock()
        self._adopt(link, 0)

    @property
    def pid(self) -> int:
        """Return the id of the engine's process."""
        return self._link.channel.process.pid

    @property
    def is_down(self) -> bool:
        """Return whether it has no process now. Calls wait for the next one."""
        return self._over is not None or self._link.ended.done()

    @property
    def over(self) -> str | None:
        """Return why it will have no process any more; None if it may have one."""
        return self._over

    @property
    def route(self) -> Any:
        """Return what reaches the engine from other processes; None if nothing does, or waves are formed here."""
        return None if self._lock_step else self._link.channel.route

    def open_session(self, session: str) -> None:
        """Announce a session; in lock-step no wave starts before it waits or closes."""
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None
        self._send(_opening(session))

    def close_session(self, session: str) -> None:
        """Forget a session and its cache; a wave may be waiting for this. Its calls that wait fail, others finish."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self._fail_waiting(EngineError(f"session {session!r} was closed while its call waited"), session)
        self._send({"do": "close", "session": session})

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the call frees its row at the next token. Raises as `TorchEngine` does."""
        self._check_open()
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        self.limits.check_call(prompt_ids, sampling, session)
        message: Message = {
            "do": "generate",
            "session": session,
            "prompt": np.asarray(prompt_ids).tolist(),
            "sampling": sampling_message(sampling),
            "salt": cache_salt,
        }
        self._calls += 1
        try:
            answer = await (self._in_a_wave(message) if self._lock_step else self._call(message))
        finally:
            self._calls -= 1
        return completion_of(answer["completion"])

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return the log-probability of ids[1:] in one pass without cache: int32[T] -> float32[T - 1].

        Raises EngineError.
        """
        answer = await self._call({"do": "score", "ids": np.asarray(ids).tolist(), "temperature": temperature})
        return np.array(answer["logprobs"], np.float32)

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        """Have the other engine copy in what `stage` writes, between two tokens, in lock-step between two waves.

        This engine discards the file when it is no longer needed. Calls in flight continue with the new weights; waves
        that start later have them. Raises EngineError, and changes nothing, where weights are missing or of another
        shape, or cannot be handed over.
        """
        self._check_open()
        try:
            async with self._publication:
                file = await stage()
                publication: Message = {"do": "publish", "version": version, "probe": self._probe, **file.message}
                try:
                    answer = await self._in_time(self._call(publication, again=True))
                except BaseException:
                    file.discard()
                    raise
                self._orders[1:] = [publication]
                self._discard_file()
                self._file, self._scores = file, answer["logprobs"]
        finally:
            self._start()

    async def sleep(self) -> None:
        """Have the other engine give back the memory of its weights and cache, until weights are published or `wake`.

        Raises EngineError while calls run.
        """
        await self._call({"do": "sleep"}, again=True)

    async def wake(self) -> None:
        """Have the other engine serve again what was published last, proven by its scores. Raises EngineError."""
        answer = await self._in_time(self._call(self._orders[-1], again=True))
        self._check_scores(answer["logprobs"], "before it slept")

    def status(self) -> list[ComponentStatus]:
        """Return what it does now. How full its cache is, and what others call it for, its process said a while ago."""
        waiting, said = len(self._waiting), self._link.said
        others = said if self.route is not None else {}
        return [
            ComponentStatus(
                "engine",
                "process",
                process=self._link.channel.process,
                running=max(0, self._calls - waiting, others.get("running", 0)),
                waiting=max(waiting, others.get("waiting", 0)),
                sessions=len(self._sessions),
                cache=said.get("cache"),
                version=self._orders[-1].get("version"),
                error=self._over or "",
            )
        ]

    async def close(self) -> None:
        """End the process; calls that wait or run fail. Idempotent."""
        self._over = self._over or _CLOSED
        self._successor.cancel()
        await asyncio.wait([self._successor])
        await self._link.close(_CLOSED)
        await asyncio.wait([self._watch])
        self._fail_waiting(EngineEnded(self._over))
        if self._driver is not None:
            await asyncio.wait([self._driver])
        async with self._publication:
            self._discard_file()
        self._on_close()

    def _discard_file(self) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _check_open(self) -> None:
        if self._over is not None:
            raise EngineEnded(self._over)

    async def _call(self, message: Message, again: bool = False) -> Message:
        """Return the answer. again: if the process ends before it answers, send the message to the next one."""
        if self._link.ended.done() and self._over is None:
            await asyncio.wait([self._successor])
        self._check_open()
        link = self._link
        try:
            return await link.call(message)
        except EngineError:
            if not (again and link.ended.done()):
                raise
        return await self._call(message)

    async def _in_time(self, publication: Coroutine[Any, Any, Message]) -> Message:
        try:
            async with asyncio.timeout(self._timeout):
                return await publication
        except TimeoutError as error:
            what = f"the engine's process did not take new weights within {self._timeout:g} s"
            raise EngineError(f"{what}; {self._link.channel.tail()}") from error

    # --- its process, and the next one ---------------------------------------------------------------------------

    def _adopt(self, link: Link, answered: int) -> None:
        self._link = link
        self._watch = asyncio.get_running_loop().create_task(link.watch(self._silence))
        self._successor = asyncio.get_running_loop().create_task(self._succeed(answered))

    async def _succeed(self, answered: int) -> None:
        """Replace the process once it has ended, unless it has answered no more calls than `answered`."""
        link = self._link
        await asyncio.wait([link.ended])
        await link.close(_CLOSED)  # this end of the channel
        try:
            if link.answered == answered:
                raise EngineError(link.ended.result())
            self._note(f"{self._name}'s process ended with {link.exit_code}, see {link.channel.log}; starting it again")
            successor = await self._proven(*await self._begin(self._orders))
        except (EngineError, OSError) as error:
            self._over = f"{self._name}'s process was started again in vain: {error}"
            self._fail_waiting(EngineEnded(self._over))
            return
        for session in self._sessions:
            successor.post(_opening(session))
        self._held = [(message, answer) for message, answer in self._held if answer is not None]
        self._adopt(successor, successor.answered)
        self._start()
        self._note(f"{self._name}'s process was started again")

    async def _proven(self, link: Link, answers: Sequence[Message]) -> Link:
        """Return the process if it scores the probe as the one before it did. Raises EngineError."""
        if self._scores:
            try:
                self._check_scores(answers[-1]["logprobs"], "of the process before it")
            except EngineError:
                await link.close(_CLOSED)
                raise
        return link

    def _check_scores(self, scores: Sequence[float], whose: str) -> None:
        """Raise EngineError for scores of the probe that are not those of the same weights."""
        gap = float(np.abs(np.subtract(scores, self._scores)).mean())
        if not gap <= self._tolerance:
            raise EngineError(
                f"its log-probabilities differ by {gap:.2e} on average from those {whose}, with the same weights (at "
                f"most {self._tolerance:g})"
            )

    def _note(self, line: str) -> None:
        self._link.channel.note(line)
        self._notify(line)

    # --- lock-step -----------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._lock_step:
            self._held.append((message, None))
            self._start()
        else:
            self._link.post(message)

    async def _in_a_wave(self, message: Message) -> Message:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._held.append((message, answer))
        self._waiting[answer] = message["session"]
        self._start()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    def _start(self) -> None:
        """Start sending waves if every open session waits; to be called after any change."""
        if self._driver is None and self._wave_is_complete():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            await asyncio.sleep(0)  # what is closed or opened in this same tick may change who waits
            while self._wave_is_complete():
                await asyncio.wait(self._send_wave())  # callers that are answered continue before this does
        finally:
            self._driver = None

    def _wave_is_complete(self) -> bool:
        if self._publication.locked() or self._link.ended.done():
            return False
        return everybody_waits(self._waiting.values(), self._sessions.keys())

    def _send_wave(self) -> list[asyncio.Future[Message]]:
        """Send what was held and return its calls, whose answers are passed on as they arrive."""
        held, self._held, waiting, self._waiting = self._held, [], self._waiting, {}
        calls = []
        for message, answer in held:
            if answer is None:
                self._link.post(message)
            elif answer in waiting:  # not cancelled, nor failed with its session
                calls.append(self._link.call(message))
                calls[-1].add_done_callback(partial(_pass_on, answer))
                answer.add_done_callback(partial(_cancel, calls[-1]))
        return calls

    def _fail_waiting(self, error: EngineError, session: str | None = None) -> None:
        for answer in [a for a, whose in self._waiting.items() if session in (None, whose)]:
            del self._waiting[answer]
            if not answer.done():
                answer.set_exception(error)


def _opening(session: str) -> Message:
    return {"do": "open", "session": session}


def _pass_on(answer: asyncio.Future[Message], call: asyncio.Future[Message]) -> None:
    if call.cancelled():
        return
    error = call.exception()
    if answer.done():  # cancelled
        return
    if error is None:
        answer.set_result(call.result())
    else:
        answer.set_exception(error)


def _cancel(call: asyncio.Future[Message], _: object) -> None:
    call.cancel()  # of no effect on one that is answered
