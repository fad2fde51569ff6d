"""Tools are functions: their schema comes from signature and docstring, and the model's calls are answered by them.

    python examples/tools.py

The model learns to look something up before it answers; half a minute on a CPU.
"""

from small import MODEL, PAGE, SETTINGS, arguments, question

import treadle


class Library(treadle.ToolEnvironment):
    """One tool; a reply that calls none is the answer."""

    def search(self, name: str) -> str:
        """Look up a page.

        name: of the page
        """
        return f"{name} {self.task.ground_truth}"

    tools = (search,)

    def answered(self, text: str) -> float:
        return float(text == f"<answer> {self.task.ground_truth}</answer>")


if __name__ == "__main__":
    options = arguments(updates=20, run="tools")
    summary = treadle.train(
        Library,
        [question(PAGE, number, number % 10) for number in range(160)],
        held_out=[question(PAGE, number, number % 10) for number in range(200, 240)],
        model=MODEL,
        run=options.run,
        settings={
            **SETTINGS,
            "orchestration.updates": options.updates,
            # How this small model writes a call. A model that was trained on tools needs no such line.
            "rollout.reply_parser": "treadle.recipes.agents.questions:parse_reply",
        },
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
