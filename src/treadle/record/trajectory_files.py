"""Files of trajectories, for exchange with other software.

    kind                      ids     format
    `treadle export-traces`   exact   a line of .jsonl, or a row of .parquet: `as_record`
    the same, of a text run   text    the same, with the messages of each call in place of ids (`treadle eval --url`)
    ATIF, Harbor's            text    a .json file, or a line of .jsonl (`atif`)
    chat logs, OpenAI's       text    {"messages": [...]}: a line of .jsonl, or a row of .parquet

Text is tokenized once, by the template of the learning model; its ids may differ from the sampled ones.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treadle.core.errors import Cause, ConfigError, DataError, RunError, TreadleError
from treadle.core.files import new_directory, refusal
from treadle.core.outcomes import was_played
from treadle.core.text import read_json
from treadle.core.types import Failure, Status, Task, Trajectory
from treadle.record.atif import as_atif, from_atif, is_atif
from treadle.record.image_files import ImageFiles, Put, Url, name_of, named, referred, resolved
from treadle.record.recorded import LoggedConversation, RecordedTrajectory, logged, start_on_record
from treadle.record.rollout_store import STEP_SCHEMA, step_of, step_row
from treadle.rendering.texts import TokenTexts, messages_of

FORMATS = {"jsonl": ".jsonl", "parquet": ".parquet", "atif": "-atif"}
"""Formats of exports -> their file suffixes; ATIF is a directory of files."""

_ROUTING = ("routing", "routing_shape")
_FUNCTION = pa.struct(dict.fromkeys(("name", "arguments"), pa.string()))
_CALL = pa.struct({"id": pa.string(), "type": pa.string(), "function": _FUNCTION})
_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")
_LISTS = {"tool_calls": pa.list_(_CALL), "images": pa.list_(pa.string())}
_MESSAGES = pa.list_(pa.struct({**dict.fromkeys(_TEXTS, pa.string()), **_LISTS}))
_STEPS = [field for field in STEP_SCHEMA if field.name not in _ROUTING]
_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("trajectory_id", "group_id", "split"), pa.string()),
        "attempt": pa.int32(),
        **dict.fromkeys(("task_id", "task"), pa.string()),
        "messages": _MESSAGES,
        "tools": pa.string(),
        "reward": pa.float64(),
        "components": pa.map_(pa.string(), pa.float64()),
        **dict.fromkeys(("status", "failure", "warning"), pa.string()),
        "seconds": pa.float64(),
        **dict.fromkeys(("vocabulary", "model", "start_source"), pa.string()),
        "start_steps": pa.int32(),
        "start_probability": pa.float64(),
        "steps": pa.list_(pa.struct([*_STEPS, ("prompt", pa.string()), ("completion", pa.string())])),
        "image_files": pa.map_(pa.string(), pa.binary()),  # those that messages, steps and task name
    }
)
_AS_JSON = ("task", "tools", "failure")  # columns stored as JSON text in Parquet


def as_record(recorded: RecordedTrajectory, texts: TokenTexts, model: str = "", put: Put = name_of) -> dict[str, Any]:
    """Return a trajectory as plain data, with the exact ids of its steps, and their texts. put: writes images.

    Its messages are those of the last played step, as a client sent them, or read back from its ids. Only clients
    send tools; templates write them into messages. model: sampling model, a run.
    """
    t = recorded.trajectory
    played = [step for step in t.steps if was_played(step)]
    chat = played[-1].chat if played else None
    read = messages_of(texts.call(played[-1])[0].tolist(), texts) if played and chat is None else []
    return {
        "trajectory_id": t.trajectory_id,
        "group_id": recorded.group_id,
        "split": recorded.split,
        "attempt": t.attempt,
        "task_id": t.task_id,
        "task": referred(asdict(recorded.task), put),
        "messages": referred([*chat.messages, chat.reply] if chat else read, put),
        "tools": list(chat.tools) if chat else [],
        "reward": t.reward,
        "components": recorded.components,
        "status": str(t.status),
        "failure": asdict(t.failure) if t.failure else None,
        "warning": t.warning,
        "seconds": t.seconds,
        "vocabulary": recorded.vocabulary,
        "model": model,
        "start_source": t.start.source if t.start else None,
        "start_steps": t.start.steps if t.start else 0,
        "start_probability": t.start.probability if t.start else None,
        "steps": [
            {
                **{name: _plain(value) for name, value in step_row(step, put).items() if name not in _ROUTING},
                "components": dict(step.given.components),
                "prompt": texts.decode(texts.images.put(step.prompt_ids, step.images)),
                "completion": texts.decode(step.completion_ids),
            }
            for step in t.steps
        ],
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def write_trajectories(
    path: Path, form: str, trajectories: Iterable[RecordedTrajectory], texts: TokenTexts, model: str = ""
) -> int:
    """Write a file, or a directory of ATIF files, complete or absent; return the number of trajectories.

    Existing files are replaced. model: sampling model, a run or a model's directory.
    Raises RunError if the disk refuses.
    """
    count = 0

    def counted() -> Iterator[RecordedTrajectory]:
        nonlocal count
        for trajectory in trajectories:
            count += 1
            yield trajectory

    with _unless_refused(path):
        if form == "atif":
            with new_directory(path) as directory:
                for trajectory in counted():
                    if trajectory.played_steps:  # the format requires a step
                        document = json.dumps(as_atif(trajectory, texts, model), ensure_ascii=False, indent=1)
                        directory.write(f"{trajectory.trajectory.trajectory_id}.json", document.encode())
            return count
        with _replacing(path) as temporary:
            if form == "parquet":
                _write_parquet(temporary, _with_files(counted(), texts, model))
            else:
                put = _files_beside(path).put
                _write_lines(temporary, (as_record(trajectory, texts, model, put) for trajectory in counted()))
    return count


def _files_beside(path: Path) -> ImageFiles:
    return ImageFiles(path.with_name(f"{path.stem}-images"))


def _with_files(trajectories: Iterable[RecordedTrajectory], texts: TokenTexts, model: str) -> Iterator[dict[str, Any]]:
    """Yield records with the content of their images."""
    for trajectory in trajectories:
        urls: dict[str, None] = {}

        def put(url: str, urls: dict[str, None] = urls) -> str:
            urls[url] = None
            return name_of(url)

        yield {**as_record(trajectory, texts, model, put), "image_files": list(map(named, urls))}


@contextmanager
def _unless_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"could not write {path}: {refusal(error)}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _write_parquet(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        rest = iter(records)
        while part := list(islice(rest, 64)):
            rows = [
                {
                    **record,
                    **{name: json.dumps(record[name]) for name in _AS_JSON},
                    "components": list(record["components"].items()),
                    "steps": [{**s, "components": list(s["components"].items())} for s in record["steps"]],
                }
                for record in part
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))


# Reading


def read_files(path: Path) -> Iterator[RecordedTrajectory | LoggedConversation]:
    """Read a .jsonl, .parquet or .json file, or all of them in a directory, in order.

    Raises ConfigError for another path, DataError naming file and line of malformed data.
    """
    if path.is_dir():
        files = sorted(file for end in _READERS for file in path.rglob(f"*{end}"))
        if not files:
            raise ConfigError(f"{str(path)!r} is not a run, and has no {', '.join(_READERS)} file")
        for file in files:
            yield from read_files(file)
        return
    read = _READERS.get(path.suffix)
    if read is None or not path.is_file():
        raise ConfigError(f"{str(path)!r} is neither a run nor a {', '.join(_READERS)} file with trajectories")
    for where, row in read(path):
        yield _read(row, where, path)


def _read(row: Any, where: str, path: Path) -> RecordedTrajectory | LoggedConversation:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be a JSON object, got {row!r:.80}")
    if "part" in row:
        raise DataError(f"{where}: was written by an earlier treadle serve --record; export it with that version")
    try:
        if is_atif(row):
            return from_atif(row, where, path)
        if isinstance(row.get("steps"), list):
            files = {name: _url_of(name, content) for name, content in row.get("image_files") or ()}
            return _from_record(row, where, files.__getitem__ if files else _files_beside(path).url)
        if "messages" in row:
            return logged(row, where)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TreadleError) and str(error).startswith(where):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: not a trajectory that can be read: {what}") from error
    raise DataError(f"{where}: no trajectory: it has neither 'steps' nor 'messages', but {', '.join(row) or 'nothing'}")


def _url_of(name: str, content: bytes) -> str:
    if named(url := f"data:image/{name.partition('.')[2]};base64,{b64encode(content).decode()}")[0] != name:
        raise DataError(f"the image {name} is not what its name says")
    return url


def _from_record(row: Mapping[str, Any], where: str, url: Url) -> RecordedTrajectory:
    task, failure = (read_json(row[name]) if isinstance(row[name], str) else row[name] for name in ("task", "failure"))
    trajectory = Trajectory(
        trajectory_id=row["trajectory_id"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        steps=tuple(step_of(step, url) for step in row["steps"]),
        reward=row["reward"],
        status=Status(row["status"]),
        failure=Failure(Cause(failure["cause"]), failure["message"], failure["traceback"]) if failure else None,
        warning=row["warning"],
        seconds=row["seconds"],
        start=start_on_record(row),
    )
    played = Task(**resolved(task, url))
    return RecordedTrajectory(where, row["split"], row["group_id"], played, trajectory, row["vocabulary"])


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:  # bytes, because JSON may contain characters that text mode treats as line ends
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line, f"{path}:{number}")


def _document(path: Path) -> Iterator[tuple[str, Any]]:
    yield str(path), _parsed(path.read_bytes(), str(path))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        batches = pq.ParquetFile(path).iter_batches(64)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path}:{number}", row
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error


def _parsed(content: bytes, where: str) -> Any:
    try:
        return read_json(content.decode("utf-8-sig"))
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise DataError(f"{where}: not JSON: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _lines,
    ".parquet": _rows,
    ".json": _document,
}
