"""Questions to answer with a search engine, with the protocol of SkyRL or of Search-R1.

    user       Answer the given question. ... Question: Where does Anna Lopez work?
    assistant  <search>Anna Lopez</search>
    user       <information>{"result": "Doc 1: \"Anna Lopez\"\nAnna Lopez works at Acme Motors.\n"}</information>
    assistant  <answer>Acme Motors</answer>

The reward, given at the end, is 1 if the normalized answer exactly equals a golden one, otherwise 0. Only the model's
own text is searched for an answer: one in a passage, which the published environments would grade, is worth nothing.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.envs.tasks import check_positive
from treadle.retrieval.client import RetrievalClient

INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Search-R1's message after a reply that neither searches nor answers."""

_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OBSERVED = "\N{OBJECT REPLACEMENT CHARACTER}"  # replaces the environment's text, so that no answer spans it


class SkyRL:
    """Protocol of SkyRL's environment `search`: results as JSON, and no message after replies that do neither.

    extra_calls: model calls after its last turn, which can only answer.
    """

    extra_calls = 0

    def cut(self, reply: str) -> str:
        """Return the part of a reply that counts."""
        return reply

    def is_final(self, reply: str) -> bool:
        return "<answer>" in reply and "</answer>" in reply

    def query(self, reply: str) -> str | None:
        """Return the reply's query; None if it does not search."""
        match = _QUERY.search(reply)
        return None if match is None else match[1].strip()

    def observation(self, contents: Sequence[str] | None) -> str:
        """Return the message to the model. contents: passages, or None after a reply that did not search."""
        result = ""
        if contents is not None:
            documents = "".join(f"Doc {n}: {text.strip()}\n" for n, text in enumerate(contents, start=1))
            result = json.dumps({"result": documents})
        return f"\n<information>{result}</information>\n"


class SearchR1(SkyRL):
    """Protocol of Search-R1: separate titles, a message after invalid replies, one extra call for the answer.

    Text after the first `</search>` of a reply, or otherwise the first `</answer>`, does not count.
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


PROTOCOLS: Mapping[str, SkyRL] = {"skyrl": SkyRL(), "search_r1": SearchR1()}
"""Protocols by the environment's option `protocol`."""


def answer_of(replies: Sequence[str]) -> str | None:
    """Return the last answer that the model wrote, between `<answer>` and `</answer>`; None without one.

    As published, an answer begins at the first open tag, in any reply. One closed only after an observation contains a
    placeholder for it, and never matches.
    """
    answers = _ANSWER.findall(_OBSERVED.join(replies))
    return answers[-1].strip() if answers else None


def normalize_answer(text: str) -> str:
    """Return the text normalized for comparing answers (Rajpurkar et al. 2016).

    Lower case, no ASCII punctuation, no articles, single spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class Search(Environment):
    """Plays one question. Its options are a recipe's `environment_options`.

    url, timeout, patience: parameters of `RetrievalClient`. topk: passages shown per query. max_turns: replies of the
    model, the last of which can only answer. protocol: `skyrl`, or `search_r1`, which has one more reply.

    The task's ground truth is an answer, several, or the published `{"target": [...]}`. The recipe's `rollout.stop`
    must contain `</search>` and `</answer>`, and `rollout.max_steps` be at least the number of these replies.
    """

    metrics = (
        Metric("searches", "trajectory", "mean", "searches", "queries that were searched for"),
        Metric("empty_searches", "step", "mean", "share", "queries for which nothing was found"),
        Metric("invalid_replies", "trajectory", "mean", "replies", "replies that neither search nor answer"),
        Metric("answered", "trajectory", "mean", "share", "attempts that gave an answer, right or wrong"),
    )

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        max_turns: int = 4,
        protocol: str = "skyrl",
        timeout: float = 30.0,
        patience: float = 45.0,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(f"protocol is {protocol!r}; it must be one of {', '.join(PROTOCOLS)}")
        check_positive("topk", topk, whole=True)
        check_positive("max_turns", max_turns, whole=True)
        check_positive("timeout", timeout)
        check_positive("patience", patience)
        self._protocol = PROTOCOLS[protocol]
        self._topk, self._last_turn = topk, max_turns + self._protocol.extra_calls
        self._server = (url, timeout, patience)
        self.longest_wait = patience
        self._client: RetrievalClient | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self._golden, self._replies = task, golden_answers(task), list[str]()
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        """Search, or end. Raises InfrastructureError if the retrieval server is down."""
        reply = self._protocol.cut(text)
        self._replies.append(reply)
        if self._protocol.is_final(reply) or len(self._replies) >= self._last_turn:
            return EnvStep(done=True, info={"searches": 0, "invalid_replies": 0})
        query = self._protocol.query(reply)
        contents = None if query is None else await self.retrieve(query, self._topk)
        info: dict[str, Any] = {"searches": query is not None, "invalid_replies": query is None}
        if contents is not None:
            info["empty_searches"] = not contents
        return EnvStep([Message(role="user", content=self._protocol.observation(contents))], info=info)

    async def retrieve(self, query: str, topk: int) -> Sequence[str]:
        """Return the contents of at most `topk` passages. Override to use another source."""
        if self._client is None:
            self._client = RetrievalClient(*self._server)
        return await self._client.search(query, topk)

    async def finish(self, ended: Status) -> Finish:
        answer = answer_of(self._replies)
        right = answer is not None and normalize_answer(answer) in map(normalize_answer, self._golden)
        return Finish(float(right), {"answered": answer is not None})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def golden_answers(task: Task) -> list[str]:
    """Return the accepted answers. Raises DataError for an invalid ground truth."""
    truth = task.ground_truth
    answers = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            f"task {task.task_id} of environment search: its ground truth must be an answer, a list of them or "
            f'{{"target": [...]}}, got {truth!r:.100}; correct data.columns.ground_truth'
        )
    return answers
