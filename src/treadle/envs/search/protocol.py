"""How a reply asks, what the model reads then, and which answers count, as published with SkyRL and with Search-R1."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Protocol

INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""What Search-R1 shows after a reply that neither searches nor answers."""

_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OBSERVED = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for what the environment wrote, so that no answer spans it


class SearchProtocol(Protocol):
    """What replies mean. extra_calls: calls of the model after its last turn, in which it can only answer."""

    extra_calls: int

    def cut(self, reply: str) -> str:
        """Return the part of a reply that counts."""
        ...

    def is_final(self, reply: str) -> bool: ...

    def query(self, reply: str) -> str | None:
        """Return what the reply searches for; None if it does not search."""
        ...

    def observation(self, contents: Sequence[str] | None) -> str:
        """Return what the model reads: the contents of passages, or None after a reply that did not search."""
        ...


class SkyRL(SearchProtocol):
    """Protocol of SkyRL's environment `search`: results as JSON, and nothing said of replies that do neither."""

    extra_calls = 0

    def cut(self, reply: str) -> str:
        return reply

    def is_final(self, reply: str) -> bool:
        return "<answer>" in reply and "</answer>" in reply

    def query(self, reply: str) -> str | None:
        match = _QUERY.search(reply)
        return None if match is None else match[1].strip()

    def observation(self, contents: Sequence[str] | None) -> str:
        result = ""
        if contents is not None:
            documents = "".join(f"Doc {n}: {text.strip()}\n" for n, text in enumerate(contents, start=1))
            result = json.dumps({"result": documents})
        return f"\n<information>{result}</information>\n"


class SearchR1(SearchProtocol):
    """Protocol of Search-R1: titles apart, a message after invalid replies, one call more to answer.

    What follows the first `</search>` of a reply, or else the first `</answer>`, does not count.
    """

    extra_calls = 1

    def cut(self, reply: str) -> str:
        for end in ("</search>", "</answer>"):
            if end in reply:
                return reply.partition(end)[0] + end
        return reply

    def is_final(self, reply: str) -> bool:
        match = _ACTION.search(reply)
        return match is not None and match[1] == "answer"

    def query(self, reply: str) -> str | None:
        match = _ACTION.search(reply)
        return match[2].strip() if match is not None and match[1] == "search" else None

    def observation(self, contents: Sequence[str] | None) -> str:
        if contents is None:
            return INVALID
        documents = ""
        for number, passage in enumerate(contents, start=1):
            title, _, text = passage.partition("\n")
            documents += f"Doc {number}(Title: {title}) {text}\n"
        return f"\n\n<information>{documents.strip()}</information>\n\n"


PROTOCOLS: Mapping[str, SearchProtocol] = {"skyrl": SkyRL(), "search_r1": SearchR1()}
"""By the name that the option `protocol` of the environment has."""


def answer_of(replies: Sequence[str]) -> str | None:
    """Return the last answer that the model wrote, between `<answer>` and `</answer>`; None if there is none.

    As published, an answer begins at the first open tag, in whatever reply. One that was closed only after an
    observation holds a character in place of that, and is no answer to anything.
    """
    answers = _ANSWER.findall(_OBSERVED.join(replies))
    return answers[-1].strip() if answers else None


def normalize_answer(text: str) -> str:
    """Return the text as answers are compared: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_exact_match(answer: str, golden: Sequence[str]) -> bool:
    """Return whether the answer is one of the golden ones, both normalized (Rajpurkar et al. 2016)."""
    return normalize_answer(answer) in map(normalize_answer, golden)
