"""Questions that a search engine helps to answer, with the protocol of SkyRL or that of Search-R1.

    user       Answer the given question. ... Question: Where does Anna Lopez work?
    assistant  <search>Anna Lopez</search>
    user       <information>{"result": "Doc 1: \"Anna Lopez\"\nAnna Lopez works at Acme Motors.\n"}</information>
    assistant  <answer>Acme Motors</answer>

The reward, given at the end, is 1 if the answer is exactly a golden one, normalized, else 0. Only what the model wrote
is searched for an answer: one in a passage, which the published environments would grade, is worth nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.envs.search.protocol import PROTOCOLS, answer_of, is_exact_match
from treadle.envs.tasks import check_positive
from treadle.retrieval.client import RetrievalClient


class Search(Environment):
    """Plays one question. Its options are a recipe's `environment_options`.

    url, timeout, patience: of the retrieval server, as `RetrievalClient` has them. topk: passages shown for a query.
    max_turns: replies of the model, the last of which can only answer. protocol: `skyrl` or `search_r1`, which has one
    reply more.

    The task's ground truth is an answer, several, or the published `{"target": [...]}`. The recipe's `rollout.stop` has
    `</search>` and `</answer>`, and `rollout.max_steps` is at least the number of these replies.
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
        """Search, or end. Raises TrajectoryFailure (environment) if the retrieval server is out."""
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
        """Return the contents of at most `topk` passages; a subclass may take them from elsewhere."""
        if self._client is None:
            self._client = RetrievalClient(*self._server)
        return await self._client.search(query, topk)

    async def finish(self, ended: Status) -> Finish:
        answer = answer_of(self._replies)
        right = answer is not None and is_exact_match(answer, self._golden)
        return Finish(float(right), {"answered": answer is not None})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def golden_answers(task: Task) -> list[str]:
    """Return the answers that count. Raises DataError for a ground truth that is none."""
    truth = task.ground_truth
    answers = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            f"task {task.task_id} of environment search: its ground truth must be an answer, a list of them or "
            f'{{"target": [...]}}, got {truth!r:.100}; correct data.columns.ground_truth'
        )
    return answers
