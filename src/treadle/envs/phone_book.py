"""A phone book with two tools, in natural language: small enough for a pretrained model of 135M parameters on a laptop.

    system     You answer questions with two tools. ...
    ...        four worked examples
    user       What is the phone number of the friend of Hanna?
    assistant  FRIEND Hanna
    user       Oskar
    assistant  PHONE Oskar
    user       4172
    assistant  ANSWER 4172

Every question has its own book of five people; half of the questions take one tool call, half take two. The names of
the two splits and of the examples are disjoint, so that only the use of the tools can be learned.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from treadle.core.errors import DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import exchange, split_key, words

SYSTEM = """You answer questions with two tools. Write one line and nothing else.
FRIEND name   tells who the friend of a person is.
PHONE name    tells the phone number of a person.
ANSWER value  gives the final answer."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "train": words(
        "Maria Ahmed Olga Pedro Fatima Lars Nina Omar Priya Tom Sofia Ivan Grace Henry Zoe Ravi Elena Jack Clara Felix "
        "Marta Simon Paul Lucy Oscar Irene Victor Rosa Peter Julia"
    ),
    "held_out": words(
        "Anna Boris Carmen David Eva Frank Gina Hassan Ines Jonas Karin Liam Mona Noah Paula Quentin Rita Samuel Tara "
        "Ulrich Vera Walter Yara Zack Alice Bruno Diana Emil Hanna Oskar"
    ),
}
"""Split -> its names, disjoint."""

_PEOPLE = 5
_CALL = re.compile(r"\s*(FRIEND|PHONE|ANSWER) (\w+)\.?\s*")
_EXAMPLES = (("Bella", "", "5031"), ("Hugo", "Ada", "7264"), ("Leo", "", "3942"), ("Ruth", "Milo", "8150"))


class PhoneBook(Environment):
    """Plays one question: `FRIEND name` and `PHONE name` look something up, `ANSWER value` ends the episode.

    Needs a task of `tasks`. The reward is 1 for the right number, given at the end. A reply without a call ends the
    episode with 0; `info["ended"]` is `right`, `wrong` or `format`.
    """

    metrics = (
        Metric("tool_calls", "trajectory", "mean", "calls", "questions to the phone book"),
        Metric("invalid", "trajectory", "mean", "share", "ended by a reply that is no call"),
    )

    async def reset(self, task: Task) -> Sequence[Message]:
        if not isinstance(task.extras.get("people"), Mapping):
            raise DataError(f"task {task.task_id} of environment phone_book needs `people` in extras, see `tasks`")
        self.people = task.extras["people"]
        self.task = task
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        call = _CALL.fullmatch(text)
        if call is None:
            return EnvStep(done=True, info={"ended": "format", "tool_calls": 0, "invalid": True})
        tool, value = call[1], call[2]
        if tool == "ANSWER":
            right = value == self.task.ground_truth
            info = {"ended": "right" if right else "wrong", "tool_calls": 0, "invalid": False}
            return EnvStep(reward=float(right), done=True, info=info)
        person = self.people.get(value)
        answer = person[tool.lower()] if person else f"There is no {value}."
        return EnvStep([Message(role="user", content=answer)], info={"tool_calls": 1, "invalid": False})


def tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return the first `count` tasks of a split (`train` or `held_out`), one and two hops in turn.

    Held-out tasks ignore `seed`. `extras`: `people`, name -> `friend` and `phone`; `hops`, 1 or 2; `name`, the person
    in question. Raises DataError for another split, ConfigError for an impossible `count`.
    """
    key = split_key(split, count, seed)
    return [_task(key, split, index) for index in range(count)]


def _task(key: str, split: str, index: int) -> Task:
    draws, hops = random.Random(f"phone_book/{key}/{index}"), 1 + index % 2
    names = draws.sample(NAMES[split], _PEOPLE)
    phones = draws.sample(range(1000, 10_000), _PEOPLE)
    people = {
        name: {"friend": draws.choice([other for other in names if other != name]), "phone": str(phone)}
        for name, phone in zip(names, phones, strict=True)
    }
    name = draws.choice(names)
    whose = name if hops == 1 else people[name]["friend"]
    return Task(
        f"phone_book-{key.replace('/', '-')}-{index:06d}",
        (Message(role="system", content=SYSTEM), *_examples(), Message(role="user", content=_question(name, hops))),
        "phone_book",
        people[whose]["phone"],
        {"people": people, "hops": hops, "name": name},
    )


def _examples() -> list[Message]:
    messages: list[Message] = []
    for name, friend, phone in _EXAMPLES:
        shown = _question(name, 2 if friend else 1)
        calls = [(f"FRIEND {name}", friend), (f"PHONE {friend}", phone)] if friend else [(f"PHONE {name}", phone)]
        for call, answer in calls:
            messages += exchange(shown, call)
            shown = answer
        messages += exchange(shown, f"ANSWER {phone}")
    return messages


def _question(name: str, hops: int) -> str:
    return f"What is the phone number of {name if hops == 1 else f'the friend of {name}'}?"
