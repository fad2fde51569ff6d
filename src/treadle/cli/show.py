"""`treadle show`, `treadle top`."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.console import Console, Part, Table, indented, make_table
from treadle.core.images import OWN, PLACE, PromptImage
from treadle.core.outcomes import NOT_PLAYED
from treadle.core.types import PLAYERS, Ids, role_of
from treadle.record.run_directory import RunDirectory

if TYPE_CHECKING:
    from treadle.core.engine import ProcessId
    from treadle.core.trainer import StepTrace
    from treadle.core.types import Step
    from treadle.rendering.texts import TokenTexts

_NEWEST = 20
_CHARACTERS = 60  # maximum characters shown of another model's reply
_PERIOD = 1.0  # seconds between refreshes
_SAMPLE = 0.3  # seconds for measuring CPU time initially
_COLUMNS = ("component", "", "running", "waiting", "sessions", "cache", "version", "CPU", "memory")


def run_show(options: argparse.Namespace) -> int:
    console, run_path = Console(), options.run_directory
    if options.trajectory is None:
        rows, names = RunDirectory.open(run_path).ledger().newest(_NEWEST), ("trajectory", "task", "status")
        table = make_table(*names, "reward", "adv.", "steps", "began at", "tokens", text=names)
        for row in rows:
            texts = (row["trajectory_id"], row["task_id"], row["status"])
            numbers = (str(row["steps"]), str(row["start_steps"]))
            figures = (_figure(row["reward"], "g"), _figure(row["advantage"], ".3f"), *numbers)
            style = "red" if row["failure_cause"] else ""
            table.add_row(*texts, *figures, str(row["completion_tokens"]), style=style)
        if options.json:
            console.json(rows)
        else:
            console.table(table) if rows else console.line("no trajectories yet")
        return 0
    from treadle.record.record import Record

    record = Record.open(run_path)
    row, steps = record.trajectory(options.trajectory)
    trajectory = as_json(row, steps, record.texts(), record.traces(options.trajectory, row["trained_version"]))
    console.json(trajectory) if options.json else _print_trajectory(console, trajectory)
    return 0


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_json(
    row: dict[str, Any], steps: Sequence[Step], texts: TokenTexts, traces: Sequence[StepTrace] = ()
) -> dict[str, Any]:
    """Return everything recorded about a trajectory as plain data; the last of several traces of a step counts."""
    from treadle.record.describe import shown_steps

    internal = {"task", "shard", "oldest_version", "steps", "trained_version"}
    head = {key: value for key, value in row.items() if key not in internal}
    head["task"], head["components"] = json.loads(row["task"]), json.loads(row["components"])
    shown, compacted = shown_steps(steps, texts, row["advantage"], traces)
    for step, facts in zip(steps, shown, strict=True):
        (ids, length), new = texts.call(step), facts["relation"]["shared"]
        facts["new_prompt_tokens"] = None if step.is_text else length - new
        facts["new_prompt_text"], facts["reply_text"] = (
            _with_pictures(ids[new:length], texts),
            texts.decode(ids[length:]),
        )
        facts["tokens"] = _tokens(step, facts.pop("columns"), texts)
        facts["segment"] = sum(compaction.step <= facts["step"] for compaction in compacted)
    return {**head, "compactions": [asdict(compaction) for compaction in compacted], "steps": shown}


def _with_pictures(ids: Ids, texts: TokenTexts) -> str:
    """Return the text of a prompt's ids, with `[image 8780b55a1c20, 64x48 pixels, 4 tokens]` for each image."""
    pictures = (texts.images.image(ident) for ident in ids[ids >= OWN].tolist())
    names = iter([_of_image(image) for image, number in pictures if number == 0])
    head, *parts = texts.decode(ids).split(PLACE) if len(ids) else [""]
    return head + "".join(next(names, PLACE) + part for part in parts)


def _of_image(image: PromptImage) -> str:
    width, height = image.size
    return f"[image {image.sha256[:12]}, {width}x{height} pixels, {image.tokens} tokens]"


def _tokens(step: Step, columns: dict[str, list[Any]], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return a row for each sampled token."""
    ids = step.completion_ids.tolist()
    unknown = dict.fromkeys(("advantage", "learner_logprob", "entropy", "ratio", "clipped"), [None] * len(ids))
    whole = {"id": ids, "text": [texts.piece(ident) for ident in ids], **unknown, **columns}
    return [dict(zip(whole, token, strict=True)) for token in zip(*whole.values(), strict=True)]


def _print_trajectory(console: Console, row: dict[str, Any]) -> None:
    task = row["task"]
    console.line((row["trajectory_id"], "bold"), f"   {row['split']}, {ending(row)}")
    kind = next((kind for kind in PLAYERS if task.get(kind)), "environment")
    role = role_of(row["trajectory_id"])
    console.line(f"task {task['task_id']}, {kind} {task[kind]}{f', role {role}' if role else ''}")
    if task["ground_truth"] is not None:
        console.line(f"ground truth {task['ground_truth']!r}")
    if row["start_steps"]:
        chance = row["start_probability"]
        drawn = "" if chance is None else f" (drawn with probability {chance:.3g})"
        console.line(
            f"began after {row['start_steps']} steps of {row['start_source']}{drawn}, which are context: not trained"
        )
    advantage = "" if row["advantage"] is None else f", advantage {row['advantage']:.4f}"
    unused = [step for step in row["steps"] if step["dropped"] in NOT_PLAYED]
    more = f", and {sum(len(s['tokens']) for s in unused)} in {len(unused)} that were not used" if unused else ""
    steps = f"{len(row['steps']) - len(unused)} steps{more}"
    console.line(f"{row['completion_tokens']} sampled tokens in {steps}{advantage}")
    if row["trained_reward"] is not None and row["trained_reward"] != row["reward"]:
        console.line(f"reward in training {row['trained_reward']:g}")
    if row["warning"]:
        console.line(f"warning: {row['warning']}", style="yellow")
    if row["failure_traceback"]:
        console.text(indented(row["failure_traceback"]), style="red")
    opened = {compaction["step"]: compaction for compaction in row["compactions"]}
    for step in row["steps"]:
        if step["step"] in opened:
            console.line()
            console.line(
                (f"segment {step['segment']}", "bold"), f"  {compaction_line(opened[step['step']])}", wrap=True
            )
        _print_step(console, step)


def compaction_line(compaction: dict[str, Any]) -> str:
    """Return `from the summary of step 4: 96 tokens in place of 512; cost: 2 calls, 48 tokens sampled, 157 read`."""
    summary, calls = compaction["summary"], compaction["calls"]
    source = "shortened by environment or agent" if summary is None else f"from the summary of step {summary}"
    asked = f"{calls} call{'s' if calls != 1 else ''}, {compaction['sampled']:,} tokens sampled, " if calls else ""
    return (
        f"{source}: {compaction['after']:,} tokens in place of {compaction['before']:,}; "
        f"cost: {asked}{compaction['read']:,} read"
    )


def ending(row: dict[str, Any]) -> str:
    """Return `reward 1, done`, or `no reward, failed: environment: step raised ...`."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    failure = f": {row['failure_cause']}: {row['failure_message']}" if row["failure_cause"] else ""
    return f"{reward}, {row['status']}{failure}"


def print_transcript(console: Console, run: Path, trajectory_id: str) -> None:
    from treadle.record.describe import step_relations
    from treadle.record.record import Record

    record = Record.open(run)
    row, steps = record.trajectory(trajectory_id)
    texts = record.texts()
    decode = texts.decode
    parts: list[Part] = []
    for step, relation in zip(steps, step_relations(steps, texts), strict=True):
        ids, length = texts.call(step)
        parts += [(_with_pictures(ids[relation.shared : length], texts), "dim"), (decode(ids[length:]), "bold cyan")]
    console.text(*parts)
    console.line(f"-> {ending(row)}, {len(steps)} step{'s' if len(steps) != 1 else ''}", style="bold")


def _print_step(console: Console, step: dict[str, Any]) -> None:
    chat = step["chat"] if step["new_prompt_tokens"] is None else None  # alone, without ids
    versions = step["versions"]
    version = "-".join(str(v) for v in dict.fromkeys((versions[0], versions[-1]))) if versions else "none"
    parts = ", ".join(f"{name} {value:g}" for name, value in step["components"].items())
    trained = f"; {step['reward'] + step['shaping']:g} in training" if step["shaping"] else ""
    made_of = f" ({parts}{trained})" if trained or step["components"].keys() - {"reward"} else ""
    waited = "" if step["waited"] is None else f" (waited {step['waited']:.2f})"
    read = f"prompt {step['prompt_tokens']} tokens ({step['new_prompt_tokens']} new)"
    by = f"version {version}"
    if chat is not None:
        read, by = f"{chat['prompt_tokens']} tokens read, {chat['completion_tokens']} written", f"model {chat['model']}"
    line = (
        f"{read}, stop {step['stop_reason']}, temperature {step['temperature']:g}, "
        f"reward {step['reward']:g}{made_of}, {by}, {step['seconds']:.2f} s{waited}"
    )
    if step["update"] is not None:
        line += f", traced in update {step['update']}"
    console.line()
    name = f"step {step['step']}{', summary' if step['summary'] else ''}"
    console.line((name, "bold"), f"  {line}", wrap=True)
    if step["dropped"]:
        because = f": {step['rejection']}" if step["rejection"] else ""
        console.line(f"{step['dropped']}{because}", style="red")
    if chat is None and (relation := relation_line(step["relation"], step["step"])):
        console.line(relation, style="yellow")
    if step["withheld"]:
        console.line(f"tool calls not handed out: {step['withheld']} (parallel_tool_calls: false)", style="yellow")
    for call in step["calls"]:
        console.line(call_line(call), style="magenta")
    console.text(indented(step["new_prompt_text"]), style="dim")
    if chat is None:
        console.table(_token_table(step["tokens"]))
    else:
        console.text(indented(step["reply_text"]), style="bold cyan")


def call_line(call: dict[str, Any]) -> str:
    """Return `user: 153 tokens read, 12 written, 0.41 s: 'Do you have it in blue?'`."""
    text = call["reply"]["content"]
    tokens = f"{call['prompt_tokens']} tokens read, {call['completion_tokens']} written"
    cut = "..." * (len(text) > _CHARACTERS)
    return f"{call['model']}: {tokens}, {call['seconds']:.2f} s: {text[:_CHARACTERS]!r}{cut}"


def relation_line(relation: dict[str, Any], step: int) -> str:
    """Return a line about a step unless it just extends an earlier one; for example

    `break from step 2: tokenization at token 153, 42 tokens computed again: 'par is' [7, 9] -> 'paris' [31]`.
    """
    match relation["kind"]:
        case "fork":
            return f"fork: shares {relation['shared']} tokens with step {relation['base']}"
        case "break":
            return (
                f"break from step {relation['base']}: {relation['cause']} at token {relation['shared']}, "
                f"{relation['extra_tokens']} tokens computed again: {shown_tokens(relation['was'])} -> "
                f"{shown_tokens(relation['now'])}"
            )
        case "opens" if step:
            return "opens: shares nothing with the steps before it"
    return ""


def shown_tokens(tokens: dict[str, Any]) -> str:
    """Return tokens as text and ids: `'par is' [7, 9]`."""
    return f"{tokens['text']!r} {list(tokens['ids'])}"


def _token_table(tokens: list[dict[str, Any]]) -> Table:
    traced = any(token["learner_logprob"] is not None for token in tokens)
    filtered = any(token.get("possible") for token in tokens)
    more = (*(("possible",) * filtered), *(("learner", "ratio", "clipped", "entropy") if traced else ()))
    table = make_table("#", "id", "token", "mask", "logprob", "advantage", "version", *more, text=("token",))
    for number, token in enumerate(tokens):
        row = (str(number), str(token["id"]), (repr(token["text"]), "bold cyan" if token["mask"] else ""))
        logprob = f"{round(token['logprob'], 4) + 0.0:.4f}"
        figures = [logprob, _figure(token["advantage"], ".4f"), str(token["policy_version"])]
        if filtered:
            named = token["alternatives"]
            figures.append(" ".join([_figure(token["possible"], "d"), *map(repr, named[:3] if named else ())]))
        if traced:
            logprob, ratio, entropy = (_figure(token[name], ".4f") for name in ("learner_logprob", "ratio", "entropy"))
            figures += [logprob, ratio, "-" if token["clipped"] is None else str(int(token["clipped"])), entropy]
        table.add_row(*row, "1" if token["mask"] else "0", *figures)
    return table


def run_top(options: argparse.Namespace) -> int:
    directory, console, usage = RunDirectory.open(options.run_directory), Console(), _Usage()
    try:
        _view(directory, usage)
        time.sleep(_SAMPLE)
        if not options.once and console.is_terminal:
            with console.live() as show:
                while directory.state() == "in progress":
                    show(_view(directory, usage))
                    time.sleep(_PERIOD)
        for part in _view(directory, usage):
            console.line(part) if isinstance(part, str) else console.table(part)
    except KeyboardInterrupt:
        pass
    return 0


def _view(directory: RunDirectory, usage: _Usage) -> list[str | Table]:
    from treadle.report.status import RunStatus

    state, status = directory.state(), RunStatus.read(directory.status_file)
    if status is None:
        return [f"{directory.path}: {state}; it has no status.json{' yet' if state == 'in progress' else ''}"]
    lines: list[str | Table] = [
        f"{directory.path}: {state}, update {status.update} of {status.updates}",
        status.doing(directory),
    ]
    if state != "in progress":
        return lines
    if status.published is None:
        lines.append("no weights are published yet")
    else:
        lines.append(f"versions: learner {status.trained}, published {status.published}")
    table = make_table(*_COLUMNS, text=_COLUMNS[:2])
    for part in status.components:
        counts = ["" if n is None else f"{n:,}" for n in (part.running, part.waiting, part.sessions, part.version)]
        counts.insert(3, "" if part.cache is None else f"{part.cache:.0%}")
        table.add_row(part.kind, part.name, *counts, *usage.cells(part.process))
    table.add_row("process", "of the run", *[""] * 5, *usage.cells(status.process))
    lines.append(table)
    lines += [f"{part.kind} {part.name}: {part.error}" for part in status.components if part.error]
    if status.message:
        lines.append(f"{time.time() - status.message_at:.0f} s ago: {status.message}")
    return lines


class _Usage:
    """CPU time and memory of processes on this machine between refreshes, from Linux's `/proc`; empty elsewhere."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}  # pid -> (when, CPU seconds)

    def cells(self, process: ProcessId | None) -> tuple[str, str]:
        """Return `("53%", "812 MB")`; empty for a process on another machine, or one that has ended."""
        if process is None or process.host != socket.gethostname():
            return "", ""
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "", ""
        words = stat.rpartition(")")[2].split()
        now, seconds = time.monotonic(), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        then, before = self._before.get(process.pid, (now, seconds))
        self._before[process.pid] = now, seconds
        share = (seconds - before) / (now - then) if now > then else 0.0
        return f"{share:.0%}", f"{int(words[21]) * os.sysconf('SC_PAGE_SIZE') / 1e6:,.0f} MB"
