"""Exact rendering, for two dozen model families: random conversations, sampled in random non-canonical tokens.

What is checked of every prompt does not rest on what the renderer says of itself: transformers renders the text, once
more with the structural strings of all messages made harmless to tell which ones the template wrote, the vocabulary
decodes the ids, and whether a family's template keeps the history is written down by hand.
"""

import copy
import json
import os
import random
import re
import sys
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer

from tests.rollout.families import FAMILIES, TOOLS, World, outside, small_vocabulary
from treadle.core.types import BreakCause, Message
from treadle.packing.breaks import Kind, relations
from treadle.packing.flat import PackedCall
from treadle.rendering.conversation import Conversation
from treadle.rendering.identity import Prompt

KEPT_BY_APPENDING = {
    BreakCause.THINKING_STRIPPED,
    BreakCause.END_TOKEN_REWRITTEN,
    BreakCause.REWRITTEN,
    BreakCause.TOOL_CALL_REWRITTEN,
}


@cache
def world(name: str, vocabulary: str = "small") -> World:
    return World(FAMILIES[name], small_vocabulary() if vocabulary == "small" else qwen_vocabulary())


@cache
def qwen_vocabulary() -> Tokenizer:
    root = Path(os.environ["TREADLE_TEST_DATA"])
    return Tokenizer.from_file(str(root / "tokenizers" / "qwen" / "tokenizer.json"))


DEFUSE = "\U00020000"  # a character that no conversation holds


def defused(value: Any, harmful: re.Pattern[str]) -> Any:
    """JSON data without structural strings: a character put into each."""
    if isinstance(value, str):
        return harmful.sub(lambda found: found[0][0] + DEFUSE + found[0][1:], value)
    if isinstance(value, dict):
        return {key: defused(item, harmful) for key, item in value.items()}
    return [defused(item, harmful) for item in value] if isinstance(value, list) else value


def returned(message: Message, rng: random.Random) -> Message:
    """The message as an agent sends it back: trimmed, without its thought, its arguments as JSON written anew."""
    message = copy.deepcopy(message)
    if rng.random() < 0.3:
        message["content"] = message["content"].strip()
    if rng.random() < 0.4:
        message.pop("reasoning_content", None)
    for call in message.get("tool_calls", ()):
        if rng.random() < 0.5:
            value = json.loads(call["function"]["arguments"])
            separators = rng.choice([(",", ":"), (", ", ": ")])
            text = json.dumps(
                value, sort_keys=rng.random() < 0.5, ensure_ascii=rng.random() < 0.5, separators=separators
            )
            call["function"]["arguments"] = text
        if rng.random() < 0.1:
            call["id"] = ""
    return message


def keeps_thoughts_of_this_question(known: list[Message]) -> bool:
    """Thoughts are dropped once a later question stands behind them."""
    questions = [n for n, message in enumerate(known) if message["role"] == "user"]
    if known[-1]["role"] != "user" or len(questions) < 2:
        return True
    return not any(m.get("reasoning_content", "").strip() for m in known[questions[-2] : questions[-1]])


def keeps_as_deepseek(known: list[Message]) -> bool:
    """Thoughts are dropped at once, and of tool calls after the first what stands before them."""
    *before, reply = known[: 1 + max(n for n, message in enumerate(known) if message["role"] == "assistant")]
    if reply.get("reasoning_content", "").strip():
        return False
    if reply.get("tool_calls"):
        return not any(message.get("tool_calls") for message in before)
    return before[-1]["role"] == "tool" or "</think>" not in reply["content"]


def last_reply(known: list[Message]) -> Message:
    return next(message for message in reversed(known) if message["role"] == "assistant")


KEEPS = {
    "all": lambda known: True,
    "thoughts": keeps_thoughts_of_this_question,
    "no thought": lambda known: not last_reply(known).get("reasoning_content", "").strip(),
    "no system message": lambda known: known[0]["role"] != "system",
    "deepseek": keeps_as_deepseek,
}


class Talk:
    """One random conversation, checked prompt by prompt."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.calling = bool(world.family.calls) and rng.random() < 0.7
        self.tools: list[Any] = TOOLS if self.calling and world.family.tools else []
        self.conversation = Conversation(world.renderer)
        self.sent: list[Message] = []  # as the agent sends it
        self.known: list[Message] = []  # the same with replies as they were handed out
        if world.family.system and rng.random() < 0.8:
            self._say(Message(role="system", content=world.text(rng, 8)))
        self._say(Message(role="user", content="Q " + world.text(rng)))
        self.calls: list[PackedCall] = []
        self.causes: list[BreakCause | None] = []
        self.counts: Counter[str] = Counter()
        self._naive: list[int] = []  # the call before, had all been tokenized anew

    def _say(self, message: Message) -> None:
        self.sent.append(message)
        self.known.append(message)

    def turn(self) -> None:
        """A call, its reply and what follows."""
        prompt = self.conversation.render(self.sent, self.tools)
        text = self._oracle(self.known, self.tools)
        harmless = self._oracle(*(defused(data, self.world.structural) for data in (self.known, self.tools)))
        self._check_text(prompt, text)
        self._check_structure(prompt, text, harmless)
        anew = list(self.world.tokenizer.encode(text or "", add_special_tokens=False).ids)
        if self.calls:
            self._check_history(prompt)
            self.counts["naive breaks"] += anew[: len(self._naive)] != self._naive
        completion, message = self._reply()
        while not (self.world.family.blank or message["content"] or message.get("reasoning_content")):
            completion, message = self._reply()
        self.conversation.record(prompt, np.array(completion, np.int32), message)
        self.calls.append(PackedCall(np.concatenate([prompt.ids, np.array(completion, np.int32)]), len(prompt.ids), 0))
        self.causes.append(prompt.break_cause)
        self._naive = anew + completion
        self.known.append(message)
        self.sent.append(returned(message, self.rng))
        for call in message.get("tool_calls", ()):
            observation = "T " + self.world.text(self.rng)
            self._say(Message(role="tool", content=observation, tool_call_id=call["id"]))
        if not message.get("tool_calls"):
            self._say(Message(role="user", content="Q " + self.world.text(self.rng)))

    def _reply(self) -> tuple[list[int], Message]:
        completion = self.world.sample(self.rng, self.calling)
        return completion, self.world.message(self.rng, completion, self.calling)

    def _oracle(self, known: list[Message], tools: list[Any]) -> str | None:
        """The text as transformers renders it; None where the template refuses the conversation."""
        messages: list[Any] = copy.deepcopy(known)
        for message in messages:
            if message["role"] == "assistant":
                message.setdefault("reasoning_content", "")
                for call in message.get("tool_calls", ()):
                    if self.world.family.calls != "deepseek":
                        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            return str(
                self.world.hf.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.world.family.options,
                )
            )
        except TemplateError:
            return None

    def _check_text(self, prompt: Prompt, expected: str | None) -> None:
        """Recorded ids within spans; outside, ids of what the template writes."""
        assert prompt.rendering is not None
        text = prompt.rendering.text
        if expected is not None:
            assert self.world.renderer.structure.plain(text) == expected
        for part, ids in outside(prompt):
            assert unicodedata.normalize("NFC", self.world.decode(ids)) == unicodedata.normalize(
                "NFC", self.world.renderer.structure.plain(part)
            )
        completions = [call.token_ids[call.prompt_length :].tolist() for call in self.calls]
        for _start, _end, first, last in prompt.rendering.spans:  # each is a turn, in order of time
            turn = prompt.ids[first:last].tolist()
            while completions:
                sampled = completions.pop(0)
                if turn[-len(sampled) :] == sampled or turn[1 - len(sampled) :] == sampled[:-1]:
                    break
            else:
                raise AssertionError("a span holds no recorded completion")

    def _check_structure(self, prompt: Prompt, text: str | None, harmless: str | None) -> None:
        """Outside recorded replies, the structural ids are those of the tokens that the template writes."""
        if text is None or harmless is None or harmless.replace(DEFUSE, "") != text:
            self.counts["structure unchecked"] += 1
            return
        assert prompt.rendering is not None
        written = {}
        for found in self.world.structural.finditer(harmless):
            written[found.start() - harmless.count(DEFUSE, 0, found.start())] = found[0]
        at = 0
        ends = [end for _start, end, _first, _last in prompt.rendering.spans]
        for (part, ids), end in zip(outside(prompt), [*ends, None], strict=True):
            stop = at + len(self.world.renderer.structure.plain(part))
            expected = [written[place] for place in sorted(written) if at <= place < stop]
            assert [self.world.special[i] for i in ids.tolist() if i in self.world.special] == expected
            at = len(self.world.renderer.structure.plain(prompt.rendering.text[:end]))

    def _check_history(self, prompt: Prompt) -> None:
        """Appended where the template keeps the history, and a known cause where it does not."""
        previous = self.calls[-1].token_ids
        extends = prompt.ids[: len(previous)].tolist() == previous.tolist()
        self.counts["appended"] += 1
        self.counts["extends" if extends else str(prompt.break_cause)] += 1
        assert (prompt.break_cause is None) == extends
        if self.world.family.keeps:
            assert extends == KEEPS[self.world.family.keeps](self.known)
        if not extends:
            assert prompt.break_cause in KEPT_BY_APPENDING

    def finish(self) -> Counter[str]:
        """No step that breaks does so without a recorded cause, and none has the same text in other tokens."""
        told = relations(self.calls, self.world.decode, self.causes)
        assert [r.cause for r in told] == [
            c if r.kind is not Kind.EXTENDS else None for c, r in zip(self.causes, told, strict=True)
        ]
        assert BreakCause.TOKENIZATION not in [relation.cause for relation in told]
        return self.counts


def talk(world: World, seed: int, turns: int) -> Counter[str]:
    conversation = Talk(world, random.Random(seed))
    for _ in range(turns):
        conversation.turn()
    return conversation.finish()


# Gemma 4's template takes thoughts out of content, even those that only spell their tokens.
SPOKEN = [name for name in FAMILIES if name != "gemma4"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SPOKEN)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), turns=st.integers(2, 7))
def test_every_prompt_carries_the_sampled_ids_on(name: str, seed: int, turns: int) -> None:
    talk(world(name), seed, turns)


def play(conversations: int) -> tuple[Counter[str], Counter[str]]:
    """Counts of prompts, and of conversations, with the same number of each family; prints how they went.

    Every fifth family has a vocabulary of 150,000 tokens, if there is one: a renderer of it takes seconds to make.
    """
    total, played = Counter[str](), Counter[str]()
    for number, name in enumerate(SPOKEN):
        counts = Counter[str]()
        vocabulary = "small" if number % 5 or "TREADLE_TEST_DATA" not in os.environ else "qwen"
        for seed in range(conversations // len(SPOKEN)):
            found = talk(world(name, vocabulary), seed, 2 + seed % 6)
            counts += found
            played["all"] += 1
            played["broken if tokenized anew"] += found["naive breaks"] > 0
            played["broken"] += found["extends"] < found["appended"]
        print(f"{name}, {vocabulary} vocabulary: {dict(counts)}", flush=True)
        total += counts
    print(f"\nconversations {dict(played)}\nprompts {dict(total)}")
    return total, played


@pytest.mark.slow
def test_hundreds_of_conversations() -> None:
    """Most of which would be broken had all been tokenized anew. As a module, this file plays as many as it is told."""
    total, conversations = play(200)
    assert conversations["broken if tokenized anew"] > conversations["all"] / 2
    assert total["naive breaks"] > total["appended"] / 2 < total["extends"]
    assert total["structure unchecked"] < total["appended"] / 100


if __name__ == "__main__":
    play(int(sys.argv[1]))
