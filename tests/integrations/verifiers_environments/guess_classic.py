"""Several turns, a stop condition and a metric, as verifiers' documentation writes a `MultiTurnEnv`."""

import verifiers as vf
from datasets import Dataset


def text_of(message):
    return (message["content"] if isinstance(message, dict) else message.content) or ""


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = int(text_of(messages[-1]))
        return [{"role": "user", "content": "higher" if guess < int(state["answer"]) else "lower"}]

    @vf.stop
    async def found(self, state):
        turns = state["trajectory"]
        return bool(turns) and text_of(turns[-1]["completion"][-1]).strip() == state["answer"]


async def right(completion, answer, **kwargs):
    return float(text_of(completion[-1]).strip() == answer)


async def quick(state, **kwargs):
    return 1 / len(state["trajectory"]) if state["trajectory"] else 0.0


def load_environment(max_turns=6):
    rows = [{"question": f"Guess a number, row {n}", "answer": str(n)} for n in range(3, 7)]
    rubric = vf.Rubric(funcs=[right, quick], weights=[1.0, 0.5])
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
