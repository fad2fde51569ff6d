"""The journal: every session, model, checkpoint and request of the server, in SQLite.

    request --accept--> open --(the server may be killed)--> finish: done or failed, with its result --expire--> gone

A request is in the journal before it is answered, and its result before it can be read. What a killed server had not
finished is open again after a restart; gradients since a model's last saved state are computed again from the bodies.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.core.errors import RunError
from treadle.core.files import sha256_of
from treadle.core.types import Ids
from treadle.record.tables import journal_mode

VERSION = 1
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sessions (
  session TEXT PRIMARY KEY, created REAL NOT NULL, ended TEXT, facts TEXT NOT NULL, clients INTEGER NOT NULL);
CREATE TABLE models (
  model TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, adapter TEXT NOT NULL, seed INTEGER NOT NULL,
  facts TEXT NOT NULL, state INTEGER NOT NULL, done INTEGER NOT NULL, unloaded INTEGER NOT NULL);
CREATE TABLE samplers (
  sampler TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, path TEXT, clients INTEGER NOT NULL);
CREATE TABLE checkpoints (
  path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL,
  expires REAL, size INTEGER NOT NULL, facts TEXT NOT NULL, listed INTEGER NOT NULL, version INTEGER NOT NULL);
CREATE TABLE requests (
  request TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, sha256 TEXT NOT NULL,
  body BLOB, state TEXT NOT NULL, result BLOB, created REAL NOT NULL, finished REAL, read REAL);
CREATE TABLE sequences (
  sequence TEXT PRIMARY KEY, sampler TEXT NOT NULL, prompt BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE TABLE datums (
  request TEXT NOT NULL, number INTEGER NOT NULL, tokens INTEGER NOT NULL, targets INTEGER NOT NULL,
  sequences TEXT NOT NULL, PRIMARY KEY (request, number)) WITHOUT ROWID;
CREATE TABLE steps (
  model TEXT NOT NULL, seq INTEGER NOT NULL, facts TEXT NOT NULL, PRIMARY KEY (model, seq)) WITHOUT ROWID;
CREATE INDEX requests_owner ON requests (owner, seq);
CREATE INDEX requests_state ON requests (state, finished);
"""

Row = Mapping[str, Any]
_DAY = 86400.0
_PROTOBUF = ("forward", "forward_backward", "sample")  # kinds of requests with results in protobuf


@dataclass(frozen=True, slots=True)
class Request:
    """An accepted request. owner: model or sampler that it is for. seq: its place among the owner's requests."""

    ident: str
    kind: str
    owner: str
    seq: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's result, in protobuf or JSON, or the JSON of its error."""

    content: bytes
    failed: bool = False
    is_protobuf: bool = False


class Journal:
    """The journal of one server. Thread-safe. Raises RunError if the disk fails, or for a file of another version."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.RLock()
        with self._errors():
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            if not self._db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={VERSION}; COMMIT")
            self._db.execute(f"PRAGMA journal_mode={journal_mode(path)}")
            self._db.execute("PRAGMA synchronous=FULL")
            [version] = self._db.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise RunError(f"{path} was written by another version of Treadle; choose another run directory")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(f"{self._path} could not be used: {error}; free disk space and start again") from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors(), self._db:
            yield self._db

    def rows(self, query: str, *values: Any) -> list[Row]:
        """Return a query's rows."""
        with self._lock, self._errors():
            return [dict(row) for row in self._db.execute(query, values)]

    def row(self, query: str, *values: Any) -> Row | None:
        """Return a query's first row, if any."""
        return next(iter(self.rows(query, *values)), None)

    def fact(self, name: str, default: str) -> str:
        """Return a fact of the server; the first caller's default stays."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, default))
            [value] = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    def add_session(self, facts: Row) -> str:
        """Begin a session; return its id."""
        with self._writing() as db:
            [count] = db.execute("SELECT count(*) FROM sessions").fetchone()
            session = f"s{count}"
            db.execute("INSERT INTO sessions VALUES (?, ?, NULL, ?, 0)", (session, time.time(), json.dumps(facts)))
        return session

    def end_session(self, session: str, reason: str) -> None:
        """Note how a session ended; the first reason stays."""
        with self._writing() as db:
            db.execute("UPDATE sessions SET ended = coalesce(ended, ?) WHERE session = ?", (reason, session))

    def add_sampler(self, sampler: str, session: str, path: str | None) -> None:
        """Begin a sampling session, of the base if path is None; one that exists stays."""
        with self._writing() as db:
            db.execute(
                "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, 0)", (sampler, session, time.time(), path)
            )  # fmt: skip

    def join_sampler(self, sampler: str) -> int:
        """Return the number of a new client of a sampling session, from 1 on."""
        with self._writing() as db:
            db.execute("UPDATE samplers SET clients = clients + 1 WHERE sampler = ?", (sampler,))
            [clients] = db.execute("SELECT clients FROM samplers WHERE sampler = ?", (sampler,)).fetchone()
        return int(clients)

    def add_model(self, model: str, session: str, adapter: Row, seed: int, facts: Row) -> None:
        """Note a created model."""
        values = (model, session, time.time(), json.dumps(adapter), seed, json.dumps(facts))
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO models VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0)", values)

    def unload_model(self, model: str) -> None:
        """Note that a client gave up a model."""
        with self._writing() as db:
            db.execute("UPDATE models SET unloaded = 1 WHERE model = ?", (model,))

    def accept(self, request: Request) -> bool:
        """Note a request; return whether it is new. Raises ValueError if its id is that of a different one."""
        sha256 = sha256_of(request.kind.encode() + request.body)
        with self._writing() as db:
            known = db.execute("SELECT sha256 FROM requests WHERE request = ?", (request.ident,)).fetchone()
            if known is not None and known["sha256"] != sha256:
                raise ValueError(f"{request.ident} is the id of a different request; give each its own seq_id")
            if known is None:
                db.execute(
                    "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, 'open', NULL, ?, NULL, NULL)",
                    (request.ident, request.kind, request.owner, request.seq, sha256, request.body, time.time()),
                )
        return known is None

    def open_requests(self) -> list[Request]:
        """Return all requests that are not finished, in the order of their owners' numbers."""
        return self._requests("state = 'open' ORDER BY owner, seq")

    def applied(self, model: str) -> list[Request]:
        """Return the finished requests that changed a model since its last saved state, in order.

        A step that failed may have cleared gradients; a pass that failed changed nothing.
        """
        return self._requests(
            "owner = ? AND (kind = 'forward_backward' AND state = 'done' OR kind = 'optim_step' AND state <> 'open')"
            " AND seq > (SELECT state FROM models WHERE model = owner) ORDER BY seq",
            model,
        )

    def _requests(self, where: str, *values: Any) -> list[Request]:
        rows = self.rows(f"SELECT request, kind, owner, seq, body FROM requests WHERE {where}", *values)
        return [Request(r["request"], r["kind"], r["owner"], r["seq"], r["body"] or b"") for r in rows]

    def finish(
        self,
        request: Request,
        finished: Finished,
        sequences: Sequence[tuple[Ids, Ids]] = (),
        datums: Iterable[tuple[int, int, Sequence[str]]] = (),
        step: Row | None = None,
        checkpoint: Row | None = None,
    ) -> None:
        """Note a result, with what was sampled (prompt, tokens), trained, or an optimizer step.

        datums: tokens, targets that count, and names of sequences. step: metrics of an optimizer step.
        checkpoint: the row of a saved one, which replaces that of its path.
        """
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET state = ?, result = ?, finished = ? WHERE request = ?",
                ("failed" if finished.failed else "done", finished.content, time.time(), request.ident),
            )
            db.execute("UPDATE models SET done = max(done, ?) WHERE model = ?", (request.seq, request.owner))
            if request.kind not in ("forward_backward", "optim_step"):
                db.execute("UPDATE requests SET body = NULL WHERE request = ?", (request.ident,))
            db.executemany("INSERT OR IGNORE INTO sequences VALUES (?, ?, ?, ?)", [
                (f"{request.ident}/{n}", request.owner, prompt.tobytes(), tokens.tobytes())
                for n, (prompt, tokens) in enumerate(sequences)
            ])  # fmt: skip
            db.executemany("INSERT OR IGNORE INTO datums VALUES (?, ?, ?, ?, ?)", [
                (request.ident, n, tokens, targets, json.dumps(names))
                for n, (tokens, targets, names) in enumerate(datums)
            ])  # fmt: skip

            if checkpoint is not None:
                db.execute(
                    "INSERT OR REPLACE INTO checkpoints VALUES"
                    " (:path, :model, :kind, :name, :created, :expires, :size, :facts, :listed, :version)",
                    checkpoint,
                )
            if step is not None:
                db.execute("INSERT INTO steps VALUES (?, ?, ?)", (request.owner, request.seq, json.dumps(step)))

    def finished(self, request: str) -> Finished | None:
        """Return a request's result; None if it is open. Raises KeyError for one that is unknown, or gone."""
        row = self.row("SELECT kind, state, result FROM requests WHERE request = ?", request)
        if row is None or (row["state"] != "open" and row["result"] is None):
            raise KeyError(request)
        if row["state"] == "open":
            return None
        failed = row["state"] == "failed"
        return Finished(row["result"], failed, not failed and row["kind"] in _PROTOBUF)

    def sequence(self, sequence: str) -> tuple[Ids, Ids] | None:
        """Return the prompt and the tokens of a sampled sequence; None if it was not sampled here."""
        row = self.row("SELECT prompt, tokens FROM sequences WHERE sequence = ?", sequence)
        if row is None:
            return None
        return np.frombuffer(row["prompt"], np.int32), np.frombuffer(row["tokens"], np.int32)

    def saved(self, model: str, seq: int) -> None:
        """Note that a model's state after a request is saved: nothing before it is computed again."""
        with self._writing() as db:
            db.execute("UPDATE models SET state = ? WHERE model = ?", (seq, model))
            db.execute("UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ? AND state <> 'open'", (model, seq))

    def steps(self, model: str) -> int:
        """Return how many optimizer steps a model has made."""
        return len(self.rows("SELECT 1 FROM steps WHERE model = ?", model))

    def step_metrics(self) -> list[Row]:
        """Return the metrics of all optimizer steps, in the order in which they were made."""
        rows = self.rows("SELECT facts FROM steps JOIN requests ON owner = model AND requests.seq = steps.seq"
                         " ORDER BY finished")  # fmt: skip
        return [json.loads(row["facts"]) for row in rows]

    def pending(self, model: str) -> Row:
        """Return what the next optimizer step trains: datums, tokens, targets, and datums that name sequences."""
        row = self.row(
            "SELECT count(*) AS datums, coalesce(sum(tokens), 0) AS tokens, coalesce(sum(targets), 0) AS targets,"
            " coalesce(sum(sequences <> '[]'), 0) AS attributed FROM datums JOIN requests USING (request)"
            " WHERE owner = ? AND seq > (SELECT coalesce(max(seq), 0) FROM steps WHERE model = ?)",
            model,
            model,
        )
        assert row is not None
        return row

    def drop_checkpoint(self, path: str) -> None:
        """Forget a checkpoint."""
        with self._writing() as db:
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def set_expiry(self, path: str, expires: float | None) -> None:
        """Change when a checkpoint expires."""
        with self._writing() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def note_read(self, requests: Iterable[str]) -> None:
        """Note that clients have results."""
        with self._writing() as db:
            now = time.time()
            db.executemany("UPDATE requests SET read = ? WHERE request = ?", [(now, each) for each in requests])

    def forget(self, before: float) -> None:
        """Drop the results that were read before a time, or a day before it made, and sequences of ended sessions."""
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET result = NULL WHERE read < ? OR finished < ?", (before, before - _DAY)
            )  # fmt: skip
            db.execute(
                "DELETE FROM sequences WHERE sampler IN (SELECT sampler FROM samplers JOIN sessions USING (session)"
                " WHERE ended IS NOT NULL AND samplers.created < ?)",
                (before,),
            )
