"""Tools, as verifiers' documentation writes a `ToolEnv`."""

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def exact(completion, answer, **kwargs):
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return float((content or "").strip() == answer)


def load_environment():
    rows = [{"question": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(4)]
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[exact]), max_turns=4)
