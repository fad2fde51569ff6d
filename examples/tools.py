"""Tools are functions: their schema comes from signature and docstring, and the model's calls are answered by them.

    python examples/tools.py

The model, from scratch, begins with random calls of the two tools, and learns when to use which; two minutes on a CPU.
"""

import random

from small import arguments, question

import treadle

CUSTOMERS, ITEMS = ["Anna", "Bob", "Carla", "David"], ["bread", "milk", "pear", "soap", "tea"]


class Shop(treadle.ToolEnvironment):
    """Two tools; a reply that calls none is the answer."""

    def bought(self, customer: str) -> str:
        """Look up what a customer buys."""
        return str(self.task.extras["baskets"][customer])

    def price(self, item: str) -> int:
        """Look up what an item costs."""
        return int(self.task.extras["prices"][item])

    tools = (bought, price)

    def answered(self, text: str) -> float:
        return float(text == self.task.ground_truth)


def task(number: int) -> treadle.Task:
    draw = random.Random(number)
    prices = {item: draw.randint(10, 99) for item in ITEMS}
    baskets = {customer: draw.choice(ITEMS) for customer in CUSTOMERS}
    customer = draw.choice(CUSTOMERS)
    text = f"What does {customer} pay?"
    return question(text, number, prices[baskets[customer]], prices=prices, baskets=baskets)


if __name__ == "__main__":
    options = arguments(updates=30, run="tools")
    summary = treadle.train(
        Shop,
        [task(number) for number in range(400)],
        held_out=[task(number) for number in range(400, 464)],
        recipe="tools-small",
        run=options.run,
        settings={"orchestration.updates": options.updates},
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
