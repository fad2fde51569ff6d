"""Rendering a long conversation's next prompt: CPU time a call, warm, against tokenizing the rendered text anew.

Qwen's vocabulary where TREADLE_TEST_DATA holds it (`tokenizers/qwen`), else the demo's. Simplified: Qwen 3's template
without the dropping of thoughts, random words.

    TREADLE_TEST_DATA=../shared python -m benchmarks.render
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.measure import Row, Table, cpu_seconds, make_parser, show
from treadle.core.types import Ids, Message
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation

_TEMPLATE = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_IDS = 250  # of a message


@dataclass(frozen=True, slots=True)
class _Work:
    """A conversation that has grown to `messages`, ready for its next call."""

    conversation: Conversation
    messages: list[Message]
    ids: Ids


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure CPU milliseconds of the next prompt for conversations of several lengths; print a table."""
    options = make_parser(__doc__, repeats=20).parse_args(arguments)
    tokenizer = _tokenizer()
    renderer = ChatRenderer(tokenizer, [int(tokenizer.eos_token_id)])
    rows: list[Row] = []
    for count in (4, 8) if options.small else (10, 20, 40, 80):
        work, growing = _grow(renderer, tokenizer, count)
        ways = {"exact": partial(_render, work), "anew": partial(_tokenize, tokenizer, work)}
        seconds = cpu_seconds(ways, options.repeats)
        rows.append(
            {
                "messages": count,
                "prompt ids": len(work.ids),
                "ms a call": seconds["exact"] * 1e3,
                "ms as it grew": growing * 1e3,
                "ms tokenizing anew": seconds["anew"] * 1e3,
                "us an id": seconds["exact"] / len(work.ids) * 1e6,
            }
        )
    note = (
        f"a vocabulary of {len(tokenizer)}; half of the messages sampled, each with a tool call; "
        "'as it grew': the last call, whose last message is new"
    )
    show(options.json, Table("render", note, rows))


def _tokenizer() -> Any:
    root = os.environ.get("TREADLE_TEST_DATA")
    path = Path(root, "tokenizers", "qwen") if root else Path(str(files("treadle.recipes") / "tokenizer"))
    return AutoTokenizer.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False, chat_template=_TEMPLATE
    )


def _grow(renderer: ChatRenderer, tokenizer: Any, count: int) -> tuple[_Work, float]:
    """Return a conversation of `count` messages, and the seconds that its last prompt took the first time."""
    rng = np.random.default_rng(count)
    conversation, messages, taken = Conversation(renderer), [Message(role="user", content=_words(tokenizer, rng))], 0.0
    while True:
        started = time.process_time()
        prompt = conversation.render(messages)
        taken = time.process_time() - started
        if len(messages) + 1 > count:
            return _Work(conversation, messages, prompt.ids), taken
        text = _words(tokenizer, rng)
        function = {"name": "search", "arguments": json.dumps({"n": len(messages)})}
        reply = Message(role="assistant", content=text)
        reply["tool_calls"] = [{"id": f"c{len(messages)}", "type": "function", "function": function}]  # type: ignore[typeddict-item]
        completion = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        conversation.record(prompt, np.array(completion, np.int32), reply)
        messages = [*messages, reply, Message(role="tool", content=_words(tokenizer, rng))]


def _words(tokenizer: Any, rng: np.random.Generator) -> str:
    """Return text of about `_IDS` ids."""
    return str(tokenizer.decode(rng.integers(300, len(tokenizer) - 10, _IDS).tolist(), skip_special_tokens=True))


def _render(work: _Work) -> None:
    """Render as for an agent, whose messages are new objects every time."""
    work.conversation.render(json.loads(json.dumps(work.messages)))


def _tokenize(tokenizer: Any, work: _Work) -> None:
    messages = json.loads(json.dumps(work.messages))
    tokenizer.encode(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )


if __name__ == "__main__":
    main()
