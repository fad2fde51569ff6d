"""One reply, a weighted rubric and a parser, as verifiers' documentation writes a `SingleTurnEnv`."""

import verifiers as vf
from datasets import Dataset

TEXTS = ["abc", "hello there", "one two three"]


def load_environment(shift=0):
    texts = TEXTS[shift:] + TEXTS[:shift]
    rows = [{"question": f"Reverse: {text}", "answer": text[::-1]} for text in texts]
    parser = vf.XMLParser(["reversed"], answer_field="reversed")

    def exact(parser, completion, answer, **kwargs):
        return 1.0 if (parser.parse_answer(completion) or "").strip() == answer else 0.0

    rubric = vf.Rubric(funcs=[exact, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:1]),
        system_prompt="Write it backwards in <reversed> tags.",
        parser=parser,
        rubric=rubric,
    )
