"""Harbor's Agent Trajectory Interchange Format: one JSON document per trajectory.

    messages     step of ATIF
    system       source "system"
    user         source "user"
    assistant    source "agent": message, reasoning_content, tool_calls; metrics have ids and log-probabilities
    tool         a result in the observation of the agent's step before it

Content not sampled by the agent for this trajectory (`is_copied_context`) is context, not a target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import treadle
from treadle.core.errors import DataError
from treadle.core.outcomes import was_played
from treadle.core.text import read_json
from treadle.core.types import Message, Step
from treadle.record.describe import describe
from treadle.record.recorded import LoggedConversation, RecordedTrajectory, logged
from treadle.rendering.texts import TokenTexts, messages_of

_VERSION = "ATIF-v1.7"
_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}


def is_atif(row: Mapping[str, Any]) -> bool:
    return str(row.get("schema_version")).startswith("ATIF")


def as_atif(recorded: RecordedTrajectory, texts: TokenTexts, model: str) -> dict[str, Any]:
    """Return a trajectory with at least one played step as a document.

    Its messages are read back from the ids; tool calls stay in their text.
    """
    trajectory, steps = recorded.trajectory, list[dict[str, Any]]()
    known: list[Message] = []
    for step in trajectory.steps:
        if not was_played(step):
            continue
        prompt = messages_of(step.prompt_ids.tolist(), texts)
        if prompt and prompt[-1]["role"] == "assistant" and not prompt[-1]["content"]:
            del prompt[-1]  # the generation prompt
        shared = next((n for n, pair in enumerate(zip(known, prompt, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(known), len(prompt)) if shared is None else shared
        for message in prompt[shared:]:
            _add(steps, message)
        [reply] = messages_of(step.completion_ids.tolist(), texts)[:1] or [Message(role="assistant", content="")]
        known = [*prompt, {**reply, "role": "assistant"}]
        steps.append({"source": "agent", **_text(reply), "llm_call_count": 1, "metrics": _metrics(step), **_time(step)})
    facts = {
        "task": asdict(recorded.task),
        "split": recorded.split,
        "group_id": recorded.group_id,
        "attempt": trajectory.attempt,
        "reward": trajectory.reward,
        "components": recorded.components,
        "status": str(trajectory.status),
    }
    return {
        "schema_version": _VERSION,
        "session_id": trajectory.trajectory_id,
        "trajectory_id": trajectory.trajectory_id,
        "agent": {"name": "treadle", "version": treadle.__version__, "model_name": model},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "extra": {"treadle": facts},
    }


def _add(steps: list[dict[str, Any]], message: Message) -> None:
    role = message["role"]
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        results = steps[-1].setdefault("observation", {"results": []})["results"]
        results.append({"content": message["content"], "extra": {"role": "tool"}})
    elif role == "assistant":
        steps.append({"source": "agent", **_text(message), "is_copied_context": True})
    else:
        steps.append({"source": "system" if role == "system" else "user", "message": message["content"]})


def _text(message: Message) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    return {"message": message["content"], **({"reasoning_content": thought} if thought else {})}


def _time(step: Step) -> dict[str, str]:
    return {} if step.started is None else {"timestamp": datetime.fromtimestamp(step.started, UTC).isoformat()}


_EXTRA = ("mask", "policy_versions")
_IDS = {"prompt_ids": "prompt_token_ids", "completion_ids": "completion_token_ids", "logprobs": "logprobs"}


def _metrics(step: Step) -> dict[str, Any]:
    facts = describe(step)
    return {
        "prompt_tokens": len(step.prompt_ids),
        "completion_tokens": len(step.completion_ids),
        **{theirs: facts[ours].tolist() for ours, theirs in _IDS.items()},
        "extra": {name: facts[name].tolist() for name in _EXTRA},
    }


def from_atif(document: Mapping[str, Any], where: str, path: Path) -> LoggedConversation:
    """Parse a document; Harbor has task and reward in the trial's `result.json`, a folder above. Raises DataError."""
    steps, agent = document.get("steps"), document.get("agent")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise DataError(f"{where}: 'steps' must be a list of objects, got {steps!r:.80}")
    messages, untrained = list[dict[str, Any]](), set[int]()
    for number, step in enumerate(steps, 1):
        role = _SOURCES.get(str(step.get("source")))
        if role is None:
            raise DataError(f"{where}: step {number} has the source {step.get('source')!r}; there are {set(_SOURCES)}")
        message = {"role": role, "content": step.get("message"), "reasoning_content": step.get("reasoning_content")}
        if step.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call, f"{where}: step {number}") for call in step["tool_calls"]]
        if step.get("is_copied_context") or step.get("llm_call_count") == 0:
            untrained.add(len(messages))
        messages += [message, *_results(step.get("observation"), f"{where}: step {number}")]
    extra = document.get("extra")
    facts = (extra.get("treadle") if isinstance(extra, Mapping) else None) or _harbor_result(path)
    tools = agent.get("tool_definitions") if isinstance(agent, Mapping) else None
    row = {**facts, "messages": messages, "tools": tools}
    return logged(row, where, untrained)


def _results(observation: Any, where: str) -> Iterator[dict[str, Any]]:
    results = observation.get("results") if isinstance(observation, Mapping) else ()
    if not isinstance(results, Sequence) or not all(isinstance(result, Mapping) for result in results):
        raise DataError(f"{where}: observation.results must be a list of objects, got {results!r:.80}")
    for result in results:
        call = result.get("source_call_id")
        role = (result.get("extra") or {}).get("role") or ("tool" if call else "user")
        yield {"role": role, "content": result.get("content") or "", "tool_call_id": call}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or "function_name" not in call:
        raise DataError(f"{where}: a tool call needs function_name and arguments, got {call!r:.80}")
    function = {"name": call["function_name"], "arguments": json.dumps(call.get("arguments") or {})}
    return {"id": str(call.get("tool_call_id", "")), "type": "function", "function": function}


def _harbor_result(path: Path) -> dict[str, Any]:
    """Return task and reward of the trial that contains `path`; empty if missing."""
    try:
        result = read_json((path.parent.parent / "result.json").read_text("utf-8"))
        return {"task_id": result["task_name"], "reward": result["verifier_result"]["rewards"]["reward"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
