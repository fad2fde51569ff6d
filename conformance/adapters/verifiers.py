"""verifiers: turns committed to the message graph of a trace, whose branches are the training samples.

Prompts become messages at the ids that open turns, with the spans that a renderer reports. A discarded turn is
abandoned. Advantages and reductions belong to the trainer that reads the traces.
"""

from importlib.metadata import version
from typing import Any

from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Message, Response, TurnTokens, UserMessage

from conformance import reference
from conformance.check import NotExpressible, Row
from conformance.generate import END, REPLY, USER

TRAINER, VERSION = "verifiers", version("verifiers")
ADVANTAGES, REDUCTIONS = (), ()
LACKS = "advantages, reductions (the trainer's), masks of sampled tokens"


def text(ids: list[int]) -> str:
    """Return the message of a turn: its ids without those that the template writes around it."""
    return " ".join(str(i) for i in ids if i not in (END, USER))


def messages(prompt: list[int]) -> tuple[list[Message], list[tuple[int, int]]]:
    """Return the messages of a prompt and their spans: turns end where the other side's begins."""
    made: list[Message] = []
    spans, start, replies = [], 0, False
    for at, ident in enumerate(prompt):
        if ident == (USER if replies else REPLY):
            body = text(prompt[start:at])
            if body or replies:
                made.append(AssistantMessage(content=body) if replies else UserMessage(content=body))
                spans.append((start, at))
            start, replies = at + (not replies), not replies
    return made, spans


def commit(trace: Trace, s: dict[str, Any]) -> None:
    if not all(s["mask"]):
        raise NotExpressible("a mask of sampled tokens")
    prompt, spans = messages(s["prompt"])
    turn = prepare_turn(trace, prompt)
    if s["discarded"]:
        turn.abandon()
        return
    tokens = TurnTokens(
        prompt_ids=s["prompt"],
        completion_ids=s["completion"],
        completion_logprobs=list(s["logprobs"]),
        message_spans=spans,
    )
    reply = AssistantMessage(content=text(s["completion"]))
    turn.commit(Response(id="", created=0, model="", message=reply, finish_reason="stop", tokens=tokens))


def rows(case: dict[str, Any], advantage: str, reduction: str) -> list[Row]:
    made = []
    for a in reference.graded(case):
        trace = Trace.model_construct()
        for s in a.steps:
            commit(trace, s)
        for branch in trace.branches:
            trained = [at for at, sampled in enumerate(branch.sampled_mask) if sampled and branch.trainable]
            old = [branch.logprobs[at] for at in trained]
            made.append(Row(a.number, branch.token_ids, trained, old, old))
    return made


VARIANTS = {"": rows}
