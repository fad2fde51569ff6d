"""`Service`: what the protocol's requests do, whatever their transport.

    accept -> Journal -> a line per model, in the order of seq_id -> one learner thread -> Journal -> result
                     \\-> sampling, all at once --------------------> Samplers -------/

The journal is the truth: models, samplers and results in memory are there for speed, and come back from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import logging
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import CheckpointError, DataError, EngineError, RunError
from treadle.core.types import Ids
from treadle.tinker import requests as body
from treadle.tinker.data import Adapter, PromptScores, Samples, Sampling, Sparse, TopTokens
from treadle.tinker.journal import Finished, Journal, Request, Row
from treadle.tinker.models import Models, TrainedModel, Version
from treadle.tinker.provenance import check_provenance, named_sequences
from treadle.tinker.record import SampleRecorder
from treadle.tinker.sampler import MISSING
from treadle.tinker.wire import ForwardBackward, read_forward_backward, write_outputs, write_samples

T = TypeVar("T")
_log = logging.getLogger(__name__)

KEPT_VERSIONS = 16
"""Sampled versions that stay in memory."""
KEPT_SESSIONS = 8
"""Weights without a name that stay on disk, of each model."""
_KINDS = {"save_weights": "weights", "save_for_sampler": "sampler_weights"}
_USER = (DataError, CheckpointError, EngineError, RunError)


class Refused(Exception):
    """Raised for a request to be answered by an error. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server.

    open_requests: of all clients together; more are told to wait. gap: seconds that a model waits for a missing
    request before those after it fail. idle: seconds without a sign of a client after which its models leave memory.
    replay: seconds of computing that a restart may have to do again for a model. results: seconds that results stay.
    """

    open_requests: int = 4096
    gap: float = 600.0
    idle: float = 1800.0
    replay: float = 30.0
    results: float = 3600.0


@dataclass(slots=True, eq=False)
class _Line:
    """Requests of one model.

    waiting: heap of those that wait for their turn, by number. spent: seconds of computing since the saved state. seen:
    when a client last gave a sign. current: the request in progress, which may have changed the model.
    """

    done: int
    waiting: list[tuple[int, str, Request]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    trained: TrainedModel | None = None
    spent: float = 0.0
    seen: float = field(default_factory=time.monotonic)
    current: Request | None = None


class Service:
    """Sessions, models and samplers of one server.

    directory: of its run. names: the base's, by which clients ask for it; the first one is told. recorder: writes
    samples into the run. refuse: whether datums that contradict what was sampled fail, or are only counted.
    """

    def __init__(
        self,
        models: Models,
        directory: Path,
        names: Sequence[str],
        tokenizer: Path,
        recorder: SampleRecorder | None = None,
        refuse: bool = True,
        limits: Limits = Limits(),
    ) -> None:
        self.models, self.names, self.tokenizer, self.limits = models, tuple(names), tokenizer, limits
        self.directory, self.journal = directory, Journal(directory / "tinker.sqlite")
        self.metrics: dict[str, int] = dict.fromkeys(("accepted", "repeated", "finished", "failed", "contradicted"), 0)
        self._recorder, self._refuse = recorder, refuse
        self._lines: dict[str, _Line] = {}
        self._versions: OrderedDict[str, Version] = OrderedDict()
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._awaited: dict[str, asyncio.Event] = {}
        self._read: set[str] = set()  # results that a client has
        self._learner = ThreadPoolExecutor(1, "learner")
        self._keeper: asyncio.Task[None] | None = None
        self.failed = asyncio.Event()  # set when the server cannot go on, for example because the disk is full
        self.failure: BaseException | None = None

    async def start(self) -> int:
        """Take up the requests that a killed server left open; return their number."""
        if self._recorder is not None:
            self._recorder.rewrite_steps(self.journal.step_metrics())  # a killed server may have lost the last one
        left = self.journal.open_requests()
        for request in left:
            self._enqueue(request)
        self._keeper = self._task(self._keep())
        return len(left)

    async def close(self, save: bool = True) -> None:
        """End the work in progress, which a restart takes up again. save: models' states, so that it computes less."""
        tasks = [*(line.task for line in self._lines.values()), *self._sampling.values(), self._keeper]
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        for model, line in self._lines.items():
            if save and line.current is None:
                await self._save_state(model, line)
        self._learner.shutdown()
        self._forget()
        await self.models.close()
        self.journal.close()

    # Sessions and samplers

    def create_session(self, request: body.CreateSession) -> str:
        """Begin a session; return its id."""
        return self.journal.add_session(request.model_dump(exclude={"type"}))

    def session(self, session: str) -> Row:
        """Return a session that has not ended. Raises Refused."""
        row = self.journal.row("SELECT * FROM sessions WHERE session = ?", session)
        if row is None:
            raise Refused(404, f"there is no session {session!r} in this server's run; create a new ServiceClient")
        if row["ended"] is not None:
            raise Refused(410, f"session {session!r} has ended ({row['ended']}); create a new ServiceClient")
        return row

    def heartbeat(self, session: str) -> None:
        """Keep a session's models in memory. Raises Refused."""
        self.session(session)
        for model, line in self._lines.items():
            if model.startswith(f"{session}:"):
                line.seen = time.monotonic()

    def create_sampler(self, request: body.CreateSampler) -> str:
        """Begin a sampling session; return its id. Raises Refused."""
        self.session(request.session_id)
        if request.model_path is None:
            self._check_base(request.base_model)
        else:
            self.checkpoint(request.model_path)
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self.journal.add_sampler(sampler, request.session_id, request.model_path)
        return sampler

    def sampler(self, sampler: str) -> Row:
        """Return a sampling session. Raises Refused."""
        row = self.journal.row("SELECT * FROM samplers WHERE sampler = ?", sampler)
        if row is None:
            raise Refused(404, f"there is no sampling session {sampler!r}; create a sampling client")
        return row

    def model(self, model: str) -> Row:
        """Return a created model. Raises Refused."""
        row = self.journal.row("SELECT * FROM models WHERE model = ?", model)
        if row is None:
            raise Refused(404, f"there is no model {model!r}; create a training client")
        return row

    def _check_base(self, name: str | None) -> None:
        if name not in self.names:
            raise Refused(400, f"base_model: this server has {self.names[0]!r}, got {name!r}")

    def checkpoint(self, path: str, kind: str | None = None) -> Row:
        """Return a checkpoint, of a kind. Raises Refused."""
        row = self.journal.row("SELECT * FROM checkpoints WHERE path = ?", path)
        if row is None:
            raise Refused(404, f"there is no checkpoint {path!r}: none of this name was saved here, or it was deleted")
        if kind is not None and row["kind"] != kind:
            raise Refused(400, f"{path!r} has weights for sampling only; save_state writes those to train on from")
        return row

    # Requests

    def create_model(self, request: body.CreateModel, raw: bytes) -> str:
        """Accept the creation of a model; return the id of its result. Raises Refused."""
        self.session(request.session_id)
        self._check_base(request.base_model)
        if request.lora_config is None:
            raise Refused(400, "lora_config: this server trains adapters only; give LoraConfig(rank=32)")
        model = f"{request.session_id}:train:{request.model_seq_id}"
        return self._accept(Request(f"{model}:create", "create_model", model, 0, raw))

    def load_weights(self, request: body.LoadWeights, raw: bytes) -> str:
        """Accept the loading of weights into a model, or a new one. Raises Refused."""
        self.checkpoint(request.path, "weights")
        if request.model_id is not None:
            return self.ordered("load_weights", body.Ordered(model_id=request.model_id, seq_id=request.seq_id), raw)
        self.session(request.session_id or "")
        if request.base_model is not None:
            self._check_base(request.base_model)
        model = f"{request.session_id}:train:{request.model_seq_id}"
        return self._accept(Request(f"{model}:create", "load_weights", model, 0, raw))

    def ordered(self, kind: str, request: body.Ordered, raw: bytes) -> str:
        """Accept a request that a model takes in its turn. Raises Refused."""
        row = self.model(request.model_id)
        self.session(row["session"])
        if row["unloaded"]:
            raise Refused(400, f"model {request.model_id!r} was unloaded; create another training client")
        seq = request.seq_id if request.seq_id is not None else self._next_seq(request.model_id)
        return self._accept(Request(f"{request.model_id}:{seq}", kind, request.model_id, seq, raw))

    def forward_backward(self, raw: bytes) -> str:
        """Accept a forward pass, with or without gradients. Raises Refused, DataError."""
        request = read_forward_backward(raw)
        kind = "forward_backward" if request.backward else "forward"
        return self.ordered(kind, body.Ordered(model_id=request.model_id, seq_id=request.seq_id or None), raw)

    def sample(self, request: body.Sample, raw: bytes) -> tuple[str, list[str]]:
        """Accept sampling; return the ids of its result and of its sequences. Raises Refused."""
        if request.sampling_session_id is not None:
            row = self.sampler(request.sampling_session_id)
            self.session(row["session"])
            owner, seq = request.sampling_session_id, request.seq_id
        else:
            if request.model_path is None:
                self._check_base(request.base_model)
            else:
                self.checkpoint(request.model_path)
            owner, seq = request.model_path or "base", None
        seq = self._next_seq(owner) if seq is None else seq
        ident = self._accept(Request(f"{owner}:{seq}", "sample", owner, seq, raw))
        return ident, [f"{ident}/{n}" for n in range(request.num_samples)]

    def _next_seq(self, owner: str) -> int:
        row = self.journal.row("SELECT coalesce(max(seq), 0) + 1 AS seq FROM requests WHERE owner = ?", owner)
        assert row is not None
        return int(row["seq"])

    def _accept(self, request: Request) -> str:
        self.metrics["accepted"] += 1
        busy = len(self._sampling) + sum(len(line.waiting) for line in self._lines.values())
        if busy >= self.limits.open_requests:
            raise Refused(429, f"{busy} requests are open; wait for some of them")
        try:
            is_new = self.journal.accept(request)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        if is_new:
            self._enqueue(request)
        else:
            self.metrics["repeated"] += 1
        return request.ident

    def _enqueue(self, request: Request) -> None:
        if request.kind == "sample":
            self._sampling[request.ident] = self._task(self._sample(request))
            return
        line = self._lines.get(request.owner)
        if line is None:
            row = self.journal.row("SELECT done FROM models WHERE model = ?", request.owner)
            line = self._lines[request.owner] = _Line(-1 if row is None else row["done"])
        heapq.heappush(line.waiting, (request.seq, request.ident, request))
        line.arrived.set()
        if line.task is None:
            line.task = self._task(self._work(request.owner, line))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.failed.set()

    async def result(self, request: str, seconds: float) -> Finished | None:
        """Return a result, waiting up to some seconds; None if it is not there yet. Raises Refused for none at all."""
        finished = self._found(request)
        if finished is None:
            event = self._awaited.setdefault(request, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
            finished = self._found(request)
        if finished is not None:
            self._read.add(request)
        return finished

    def _found(self, request: str) -> Finished | None:
        try:
            return self.journal.finished(request)
        except KeyError as error:
            raise Refused(410, f"there is no result of {request!r}, or no more; send the request again") from error

    def cancel(self, request: str) -> None:
        """Stop sampling that nobody waits for."""
        if (task := self._sampling.get(request)) is not None:
            self._cancelled.add(request)
            task.cancel()

    def _finish(self, request: Request, finished: Finished, **noted: Any) -> None:
        self.journal.finish(request, finished, **noted)
        self.metrics["failed" if finished.failed else "finished"] += 1
        if (event := self._awaited.pop(request.ident, None)) is not None:
            event.set()

    def _fail(self, request: Request, error: str, category: str = "user") -> None:
        self._finish(request, Finished(json.dumps({"error": error, "category": category}).encode(), True))

    # Training

    async def _work(self, model: str, line: _Line) -> None:
        """Execute a model's requests in order, until its clients have been silent for long."""
        while (request := await self._next(model, line)) is not None:
            began, line.current = time.monotonic(), request
            try:
                line.trained = line.trained or await self._restored(model)
                finished, noted = await self._train(request, line)
            except Refused as error:
                self._fail(request, error.message)
            except _USER as error:
                self._fail(request, str(error))
            except Exception as error:  # noqa: BLE001  # a bug that one request meets does not end the others
                _log.exception("request %s failed", request.ident)
                self._fail(request, f"the server failed: {type(error).__name__}: {error}", "server")
            else:
                self._finish(request, finished, **noted)
                if self._recorder is not None and "step" in noted:
                    self._recorder.step(noted["step"])
            line.spent += time.monotonic() - began
            line.done, line.seen, line.current = max(line.done, request.seq), time.monotonic(), None
            if line.spent >= self.limits.replay:
                await self._save_state(model, line)
        del self._lines[model]
        with suppress(KeyError):
            self.models.unload(model)

    async def _next(self, model: str, line: _Line) -> Request | None:
        """Wait for the request whose turn it is; None if there is none for long. Those after a missing one fail."""
        while True:
            line.arrived.clear()
            if line.waiting and line.waiting[0][0] <= line.done + 1:
                return heapq.heappop(line.waiting)[2]
            try:
                async with asyncio.timeout(self.limits.gap if line.waiting else self.limits.idle):
                    await line.arrived.wait()
            except TimeoutError:
                if line.waiting:
                    self._skip(model, line)
                elif time.monotonic() - line.seen >= self.limits.idle:
                    await self._save_state(model, line)
                    if not line.waiting:
                        return None

    def _skip(self, model: str, line: _Line) -> None:
        """Fail the requests after one that never arrived."""
        missing = line.done + 1
        line.done = line.waiting[0][0] - 1
        _log.warning("model %s: request %d never arrived", model, missing)
        while line.waiting and line.waiting[0][0] == line.done + 1:
            request = heapq.heappop(line.waiting)[2]
            line.done = request.seq
            self._fail(request, f"request {missing} of model {model!r}, which comes before, never arrived")

    async def _train(self, request: Request, line: _Line) -> tuple[Finished, dict[str, Any]]:
        """Execute a request; return its result, and what else the journal notes."""
        if 0 < request.seq <= line.done:
            raise Refused(400, f"request {request.seq} came after request {line.done} of its model was made")
        if request.kind == "create_model":
            return _json(await self._create(request, line)), {}
        if request.kind == "load_weights":
            return _json(await self._load(request, line)), {}
        trained = line.trained
        if trained is None:
            raise Refused(400, f"model {request.owner!r} could not be created; create another training client")
        match request.kind:
            case "forward" | "forward_backward":
                return await self._forward(read_forward_backward(request.body), trained)
            case "optim_step":
                params = body.read(body.OptimStep, request.body).adam_params.params()
                metrics = await self._learn(lambda: trained.optim_step(params))
                return _json({"metrics": metrics}), {"step": self._step(request.owner, params.learning_rate, metrics)}
            case "save_weights":
                return await self._save(request, body.read(body.SaveWeights, request.body), trained)
            case "save_for_sampler":
                return await self._save(request, body.read(body.SaveForSampler, request.body), trained)
        raise Refused(400, f"unknown kind of request {request.kind!r}")

    async def _learn(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._learner, call)

    async def _create(self, request: Request, line: _Line) -> Mapping[str, Any]:
        asked = body.read(body.CreateModel, request.body)
        lora = asked.lora_config
        assert lora is not None
        seed = _seed(request.owner) if lora.seed is None else lora.seed & (2**63 - 1)
        adapter = Adapter(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        line.trained = await self._learn(lambda: self._made(request.owner, adapter, seed))
        self.journal.add_model(request.owner, asked.session_id, asdict(adapter), seed, dict(asked.user_metadata or {}))
        return {"model_id": request.owner, "type": "create_model"}

    def _made(self, model: str, adapter: Adapter, seed: int) -> TrainedModel:
        with suppress(KeyError):  # a request that was in progress when the server was killed
            self.models.unload(model)
        return self.models.create(model, adapter, seed)

    async def _load(self, request: Request, line: _Line) -> Mapping[str, Any]:
        asked = body.read(body.LoadWeights, request.body)
        checkpoint = self.checkpoint(asked.path, "weights")
        if request.seq == 0:
            source = self.model(checkpoint["model"])
            adapter, seed = Adapter(**json.loads(source["adapter"])), _seed(request.owner)
            trained = await self._learn(lambda: self._made(request.owner, adapter, seed))
        elif line.trained is None:
            raise Refused(400, f"model {request.owner!r} could not be created; create another training client")
        else:
            trained = line.trained
        await self._learn(lambda: trained.load(self.folder(asked.path), asked.optimizer))
        if request.seq == 0:
            facts = dict(asked.user_metadata or {})
            self.journal.add_model(request.owner, asked.session_id or "", asdict(adapter), seed, facts)
        line.trained, line.done = trained, request.seq
        await self._save_state(request.owner, line)  # because the checkpoint may be gone after a restart
        return {"path": asked.path, "model_id": request.owner, "type": "load_weights"}

    async def _forward(self, request: ForwardBackward, trained: TrainedModel) -> tuple[Finished, dict[str, Any]]:
        wrong = check_provenance(request, self.journal.sequence)
        self.metrics["contradicted"] += len(wrong)
        if wrong and self._refuse:
            raise Refused(400, wrong[0])
        outputs = await self._learn(
            lambda: trained.forward(request.data, request.loss, request.options, backward=request.backward)
        )
        datums = [
            (len(datum.ids), _trained_targets(datum.inputs), named_sequences(request, n))
            for n, datum in enumerate(request.data)
        ]
        if wrong:
            metrics = {**outputs.metrics, "contradicted:sum": float(len(wrong))}
            outputs = replace(outputs, metrics=metrics)
        return Finished(write_outputs(outputs)), {"datums": datums if request.backward else []}

    async def _save(
        self, request: Request, asked: body.SaveWeights | body.SaveForSampler, trained: TrainedModel
    ) -> tuple[Finished, dict[str, Any]]:
        """Save a checkpoint by its client's name, or weights for a new sampling session.

        The journal notes it together with the result: a request that is executed again must not find its own.
        """
        kind, facts = _KINDS[request.kind], dict(asked.user_metadata or {})
        sampler, name = None, asked.path
        if isinstance(asked, body.SaveForSampler) and name is None:
            if asked.sampling_session_seq_id is None:
                raise Refused(400, "give a path, or a sampling_session_seq_id")
            session = self.model(request.owner)["session"]
            sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
            name = f"session-{asked.sampling_session_seq_id}"
        name = f"step-{request.seq}" if name is None else _checked_name(name)
        path = f"tinker://{request.owner}/{kind}/{name}"
        known = self.journal.row("SELECT * FROM checkpoints WHERE path = ?", path)
        if known and isinstance(asked, body.SaveWeights) and not asked.overwrite:
            raise Refused(400, f"there is a checkpoint {path} already; choose another name, or overwrite=True")
        directory = self.folder(path)
        await self._learn(lambda: trained.save(directory, optimizer=kind == "weights"))
        self._versions.pop(path, None)
        if kind == "sampler_weights":
            self._keep_version(path, await self._learn(lambda: self.models.publish(request.owner, path)))
        now = time.time()
        expires = None if asked.ttl_seconds is None else now + asked.ttl_seconds
        size = sum(file.stat().st_size for file in directory.iterdir())
        checkpoint = {
            "path": path, "model": request.owner, "kind": kind, "name": name, "created": now, "expires": expires,
            "size": size, "facts": json.dumps(facts), "listed": sampler is None,
            "version": self.journal.steps(request.owner),
        }  # fmt: skip
        if sampler is not None:
            self.journal.add_sampler(sampler, self.model(request.owner)["session"], path)
            self._drop_old_sessions(request.owner)
        answer = {"path": path} if sampler is None else {"sampling_session_id": sampler}
        answer["type"] = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        return _json(answer), {"checkpoint": checkpoint}

    def folder(self, path: str) -> Path:
        """Return the directory of a checkpoint: `tinker://s0:train:1/weights/a` is in `weights/s0-train-1/a`."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        return self.directory / kind / model.replace(":", "-") / name

    def _drop_old_sessions(self, model: str) -> None:
        """Make room for new weights without a name: delete the oldest, except those in use."""
        rows = self.journal.rows(
            "SELECT path, sampler FROM checkpoints JOIN samplers USING (path)"
            " WHERE model = ? AND NOT listed ORDER BY checkpoints.created DESC",
            model,
        )
        for row in rows[KEPT_SESSIONS - 1 :]:
            if not any(request.startswith(f"{row['sampler']}:") for request in self._sampling):
                self.delete(row["path"])

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises Refused if there is none."""
        self.checkpoint(path)
        self.journal.drop_checkpoint(path)
        self._versions.pop(path, None)
        shutil.rmtree(self.folder(path), ignore_errors=True)

    def expire(self, path: str, seconds: float | None) -> None:
        """Set a checkpoint's time to live; None for ever. Raises Refused."""
        self.checkpoint(path)
        self.journal.set_expiry(path, None if seconds is None else time.time() + seconds)

    def counts(self) -> dict[str, int]:
        """Return counts of requests, and what is open and in memory."""
        waiting = sum(len(line.waiting) for line in self._lines.values())
        memory = {
            "models": sum(line.trained is not None for line in self._lines.values()),
            "versions": len(self._versions),
        }
        return {**self.metrics, "sampling": len(self._sampling), "waiting": waiting, **memory}

    def _step(self, model: str, learning_rate: float, metrics: Mapping[str, float]) -> Row:
        """Return the metrics of a model's next optimizer step, with counts of what it trained."""
        facts = {"kind": "optim_step", "model": model, "step": self.journal.steps(model) + 1}
        return {**facts, **self.journal.pending(model), "learning_rate": learning_rate, **metrics}

    # States of models

    async def _restored(self, model: str) -> TrainedModel | None:
        """Return a model as it was after its last finished request; None if it is yet to be created."""
        row = self.journal.row("SELECT * FROM models WHERE model = ?", model)
        if row is None:
            return None
        trained = await self._learn(lambda: self._made(model, Adapter(**json.loads(row["adapter"])), row["seed"]))
        state = self._state(model, row["state"])
        if state.is_dir():
            await self._learn(lambda: trained.load(state, optimizer=True))
        for request in self.journal.applied(model):
            with suppress(*_USER):  # it failed the first time, too
                await self._learn(partial(_apply, request, trained))
        return trained

    def _state(self, model: str, seq: int) -> Path:
        return self.directory / "states" / model.replace(":", "-") / str(seq)

    async def _save_state(self, model: str, line: _Line) -> None:
        """Save a model's state, unless gradients wait for their optimizer step."""
        trained = line.trained
        if trained is None or trained.has_gradients:
            return
        state, before = self._state(model, line.done), self._state(model, self.model(model)["state"])
        await self._learn(lambda: trained.save(state, optimizer=True))
        self.journal.saved(model, line.done)
        if before != state:
            shutil.rmtree(before, ignore_errors=True)
        line.spent = 0.0

    async def unload(self, model: str) -> str:
        """Give up a model for good; its checkpoints stay. Return the id of the result. Raises Refused."""
        self.model(model)
        request = Request(f"{model}:unload", "unload_model", model, -1, b"")
        if not self.journal.accept(request):
            return request.ident
        self.journal.unload_model(model)
        line = self._lines.pop(model, None)
        if line is not None and line.task is not None:
            line.task.cancel()
            for each in filter(None, (line.current, *(waiting for _, _, waiting in line.waiting))):
                self._fail(each, f"model {model!r} was unloaded before this request was done")
        with suppress(KeyError):
            self.models.unload(model)
        shutil.rmtree(self._state(model, 0).parent, ignore_errors=True)
        self._finish(request, _json({"model_id": model, "type": "unload_model"}))
        return request.ident

    # Sampling

    async def _sample(self, request: Request) -> None:
        try:
            asked = body.read(body.Sample, request.body)
            prompt = _prompt(asked, self.models.vocabulary)
            began = time.monotonic()
            path = self.sampler(request.owner)["path"] if asked.sampling_session_id is not None else asked.model_path
            sampling = asked.sampling_params.sampling(_seed(request.ident))
            samples = await self._completions(path, asked, prompt, sampling)
            if self._recorder is not None:
                version = 0 if path is None else int(self.checkpoint(path)["version"])
                self._recorder.samples(request.owner, prompt, samples, sampling, version, time.monotonic() - began)
        except asyncio.CancelledError:
            if request.ident in self._cancelled:
                self._fail(request, "cancelled by the client")
            raise
        except Refused as error:
            self._fail(request, error.message)
        except _USER as error:
            self._fail(request, str(error))
        except Exception as error:  # noqa: BLE001  # as above
            _log.exception("request %s failed", request.ident)
            self._fail(request, f"the server failed: {type(error).__name__}: {error}", "server")
        else:
            sequences = [(prompt, sampled.ids) for sampled in samples.sequences]
            self._finish(request, Finished(write_samples(samples)), sequences=sequences)
        finally:
            self._sampling.pop(request.ident, None)
            self._cancelled.discard(request.ident)

    async def _completions(self, path: str | None, asked: body.Sample, prompt: Ids, sampling: Sampling) -> Samples:
        version = None if path is None else await self._version(path)
        targets, last = asked.target_prompt_logprobs, asked.prompt_logprobs_last_n
        if last is not None and not (asked.prompt_logprobs and last < len(prompt)):
            raise DataError(f"prompt_logprobs_last_n: {last} needs prompt_logprobs and more than {last} tokens")
        scores = PromptScores(
            bool(asked.prompt_logprobs),
            asked.topk_prompt_logprobs,
            None if targets is None else targets.ids(),
            asked.topk_sample_logprobs,
        )
        samples = await self.models.sample(version, prompt, sampling, asked.num_samples, scores)
        return _as_asked(samples, asked)

    async def _version(self, path: str) -> Version:
        if path not in self._versions:
            self.checkpoint(path)
            self._keep_version(path, await asyncio.to_thread(self.models.load_version, self.folder(path), path))
        self._versions.move_to_end(path)
        return self._versions[path]

    def _keep_version(self, path: str, version: Version) -> None:
        self._versions[path] = version
        while len(self._versions) > KEPT_VERSIONS:
            self._versions.popitem(last=False)

    # Upkeep

    async def _keep(self) -> None:
        """Delete what has expired, now and then."""
        while True:
            await asyncio.sleep(60)
            for row in self.journal.rows("SELECT path FROM checkpoints WHERE expires < ?", time.time()):
                self.delete(row["path"])
            self._forget()

    def _forget(self) -> None:
        self.journal.note_read(self._read)
        self._read.clear()
        self.journal.forget(time.time() - self.limits.results)


def _seed(name: str) -> int:
    """Return the seed of a request or model without one of its own: the same in every run of the same clients."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def _prompt(asked: body.Sample, vocabulary: int) -> Ids:
    ids = np.array([token for chunk in asked.prompt.chunks for token in chunk.tokens], np.int64)
    if not len(ids) or not 0 <= ids.min() <= ids.max() < vocabulary:
        raise DataError(f"the prompt's tokens must be non-empty and in [0, {vocabulary})")
    return ids.astype(np.int32)


def _json(answer: Mapping[str, Any]) -> Finished:
    return Finished(json.dumps(answer).encode())


def _apply(request: Request, trained: TrainedModel) -> None:
    """Change a model again as a finished request did."""
    if request.kind == "optim_step":
        trained.optim_step(body.read(body.OptimStep, request.body).adam_params.params())
        return
    read = read_forward_backward(request.body)
    trained.forward(read.data, read.loss, read.options, backward=True)


def _trained_targets(inputs: Mapping[str, Any]) -> int:
    """Return the number of a datum's targets that have a weight or an advantage."""
    signal = inputs.get("advantages", inputs.get("weights"))
    array = signal.values if isinstance(signal, Sparse) else signal
    targets = inputs.get("target_tokens")
    if array is None:
        return 0 if targets is None else len(targets.values if isinstance(targets, Sparse) else targets)
    return int(np.count_nonzero(array))


def _as_asked(samples: Samples, asked: body.Sample) -> Samples:
    """Return samples with the prompt's last log-probabilities alone, if asked for these, and sparse ones as such."""
    last, targets, changes = asked.prompt_logprobs_last_n, asked.target_prompt_logprobs, dict[str, Any]()
    if last is not None and samples.prompt_logprobs is not None:
        changes["prompt_logprobs"] = _last(samples.prompt_logprobs, last, np.nan)
    if last is not None and samples.prompt_top is not None:
        top = samples.prompt_top
        changes["prompt_top"] = TopTokens(_last(top.ids, last, 0), _last(top.logprobs, last, MISSING))
    if targets is not None and isinstance(samples.target_logprobs, np.ndarray):
        layout = targets.sparse(np.empty(0))
        if layout is not None:
            rows = np.repeat(np.arange(layout.shape[0]), np.diff(layout.rows))
            changes["target_logprobs"] = replace(layout, values=samples.target_logprobs[rows, layout.columns])
    return replace(samples, **changes)


def _last(array: NDArray[Any], count: int, missing: float) -> NDArray[Any]:
    changed = array.copy()
    changed[:-count] = missing
    return changed


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Refused(400, f"a checkpoint's name has letters, digits and ._+=- and no more than 200, got {name!r:.220}")
    return name
