"""A shop with two tools, and its tasks: the price of an item, and the amount a customer pays."""

from __future__ import annotations

import random

import treadle

CUSTOMERS = ["Alice", "Anna", "Bob", "Carla", "David", "Emma", "Frank", "Hanna", "Jack", "Olga", "Paul", "Rita"]
ITEMS = ["apple", "bread", "cheese", "coffee", "milk", "pear", "soap", "tea"]


class Shop(treadle.ToolEnvironment):
    """A reply without a tool call is the answer, worth 1 if it is right."""

    def bought(self, customer: str) -> str:
        """Look up what a customer buys."""
        return str(self.task.extras["baskets"][customer])

    def price(self, item: str) -> int:
        """Look up what an item costs."""
        return int(self.task.extras["prices"][item])

    def answered(self, text: str) -> float:
        return float(text == self.task.ground_truth)

    tools = (bought, price)


def tasks(split: str, count: int) -> list[treadle.Task]:
    """Return the tasks of a split, `train` or `held_out`: every other one needs both tools."""
    return [_task(split, index) for index in range(count)]


def _task(split: str, index: int) -> treadle.Task:
    draw = random.Random(f"{split} {index}")
    prices = {item: draw.randint(10, 99) for item in ITEMS}
    baskets = {customer: draw.choice(ITEMS) for customer in CUSTOMERS}
    item, customer = draw.choice(ITEMS), draw.choice(CUSTOMERS)
    question = f"What does {item} cost?" if index % 2 else f"What does {customer} pay?"
    answer = prices[item if index % 2 else baskets[customer]]
    return treadle.Task(
        f"{split}-{index}",
        [{"role": "user", "content": question}],
        ground_truth=str(answer),
        extras={"prices": prices, "baskets": baskets, "tools": 1 if index % 2 else 2},
    )
