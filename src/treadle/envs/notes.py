"""More pages than fit the context: an agent that has to write notes (docs/long-episodes.md).

A task names an attribute and a number of pages. The agent asks for one page after the other, each about another person
with nine fields, and is then asked about one of them. With `rollout.compaction` one episode is

    system     Search, then answer.
    user       What hobby? Read 4 pages.
    assistant  <search>page</search>
    tool       page Anna, city Rome, hobby chess, boss Zoe, food rice, ...
    assistant  <search>page</search>
    tool       page Bob, mayor Max, company Acme, hobby golf, ...
    user       What is found?
    assistant  page Anna chess, Bob golf

    system     Search, then answer.
    user       What hobby? Read 4 pages.
    user       (the summary) page Anna chess, Bob golf
    assistant  <search>page</search>
    tool       page Carl, ...
    user       What is found?
    assistant  page Anna chess, Bob golf, Carl yoga

and so on until

    tool       What is the hobby of Bob?
    assistant  <answer> golf</answer>

The reward is 1 for the exact answer, at the end only. Names and values are those of `lookup`, and each task has freshly
drawn pages, so that nothing can be known by heart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import INTRODUCTION, Environment, EnvStep
from treadle.envs.lookup import PERSONS, SYSTEM, VALUES
from treadle.envs.tasks import check_share, exchange, is_drill, opening, split_key

PAGES = (4, 5, 6)
MAX_PAGES = 8
ASKED = ("hobby", "product", "food")
"""Attributes that tasks name."""
FIELDS = (*ASKED, "company", "city", "country")
"""What a page says about a person."""
PROMPT = "What is found?"
"""What asks for a summary, in demonstrations: `rollout.compaction.prompt` must be the same."""

_SEARCH = "<search>page</search>"
_ACTION = re.compile(r"<answer>([^<]*)</answer>")
_KEPT = 0.8  # share of facts that a demonstrated summary notes

Facts = Mapping[str, str]
"""Person -> what is noted about her, in order."""


@dataclass(frozen=True, slots=True)
class Book:
    """The pages of one task. persons: whom they are about, in order."""

    seed: str
    persons: tuple[str, ...]

    def fields(self, person: str) -> Mapping[str, str]:
        """Return what a page says, in drawn order: a field's place must not tell what it is."""
        draws = random.Random(f"notes/page/{self.seed}/{person}")
        return {field: draws.choice(VALUES[field]) for field in draws.sample(FIELDS, len(FIELDS))}

    def page(self, person: str) -> str:
        return f"page {person}, " + ", ".join(f"{field} {value}" for field, value in self.fields(person).items())


def draw_book(seed: str, pages: int, draws: random.Random) -> Book:
    return Book(seed, tuple(draws.sample(PERSONS, pages)))


def question(attribute: str, person: str) -> str:
    return f"What is the {attribute} of {person}?"


class Notes(Environment):
    """Shows the next page for each `<search>page</search>`, then asks; `<answer> V</answer>` ends the episode.

    Needs a task of `tasks`. Searching on after the last page repeats the question. An answer before the question was
    asked is worth nothing, and neither is any other text. The last step's `info["ended"]` says how it ended: `right`,
    `wrong`, `early` or `format`.
    """

    metrics = (
        Metric("pages_read", "trajectory", "mean", "pages", "pages read"),
        Metric("invalid", "trajectory", "mean", "share", "ended by a reply that is neither search nor answer"),
    )

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.shown = task, 0
        needs = {"seed": str, "persons": Sequence, "attribute": str, "asked": str}
        if wrong := [key for key, kind in needs.items() if not isinstance(task.extras.get(key), kind)]:
            raise DataError(f"task {task.task_id} of environment notes needs {', '.join(wrong)} in extras, see `tasks`")
        self.book = Book(task.extras["seed"], tuple(task.extras["persons"]))
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        persons, extras = self.book.persons, self.task.extras
        if text == _SEARCH and self.shown < len(persons):
            self.shown += 1
            page = self.book.page(persons[self.shown - 1])
            return EnvStep([Message(role="tool", content=page)], info={"pages_read": 1, "invalid": False})
        if text == _SEARCH:
            self.shown += 1
            content = question(extras["attribute"], extras["asked"])
            return EnvStep([Message(role="tool", content=content)], info={"pages_read": 0, "invalid": False})
        action, how = _ACTION.fullmatch(text), "format"
        if action is not None:
            right = action[1].strip() == self.task.ground_truth
            how = "early" if self.shown <= len(persons) else "right" if right else "wrong"
        info = {"ended": how, "pages_read": 0, "invalid": how == "format"}
        return EnvStep(reward=float(how == "right"), done=True, info=info)


def tasks(split: str, count: int, seed: int = 0, pages: Sequence[int] = PAGES) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i has `pages[i % len(pages)]` pages.

    Held-out tasks ignore `seed`: every training seed is evaluated on the same ones. The split is part of each book's
    key, so no held-out book is ever trained on. Task 0 of `tasks("train", 3)`, for example:

        Task("notes-train-0-000000", prompt=(<system>, <user>), environment="notes", ground_truth="golf",
             extras={"seed": "train/0/0", "pages": 4, "persons": ("Anna", "Bob", "Carl", "Dora"),
                     "attribute": "hobby", "asked": "Bob"})

    Raises DataError for another split, ConfigError for an impossible `count` or `pages`.
    """
    key, pages = split_key(split, count, seed), _check_pages(pages)
    made = []
    for index in range(count):
        draws, number = random.Random(f"notes/task/{key}/{index}"), pages[index % len(pages)]
        book = draw_book(f"{key}/{index}", number, draws)
        attribute, asked = draws.choice(ASKED), draws.choice(book.persons)
        extras = {"seed": book.seed, "pages": number, "persons": book.persons, "attribute": attribute, "asked": asked}
        answer = book.fields(asked)[attribute]
        name = f"notes-{key.replace('/', '-')}-{index:06d}"
        made.append(Task(name, _opening(attribute, number), "notes", answer, extras))
    return made


def demonstration(
    index: int, seed: int, expert: float = 0.0, drill: float = 0.4, pages: Sequence[int] = PAGES
) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are what to learn.

    A share `drill` are reading drills, a stand-in for pretraining: "What hobby?" and a page -> " chess", or notes and
    questions about them. The others are parts of episodes, from one summary to the next, or to the answer. Their
    summaries have the form of notes, but what they note is random: of a new page any attribute that a task may ask for,
    whatever this one asks, and of facts, new or noted before, each with probability .8. A share `expert` of these parts
    notes what is asked, and all of it.

    Raises ConfigError if a share lies outside [0, 1], or for impossible `pages`.
    """
    check_share("expert", expert)
    pages = _check_pages(pages)
    draws, key = random.Random(f"notes/demonstration/{seed}/{index}"), f"demonstration/{seed}/{index}"
    if is_drill(index, drill):
        return _read_page(key, draws) if draws.random() < 0.5 else _read_notes(key, draws)
    book, attribute = draw_book(key, draws.choice(pages), draws), draws.choice(ASKED)
    read = draws.choice((0, *range(2, len(book.persons) + 1)))  # pages that the notes are of
    is_expert = draws.random() < expert

    def note(persons: Sequence[str], noted: Facts = MappingProxyType({})) -> Facts:
        facts = {**noted, **_facts(book, persons, draws, attribute if is_expert else "")}
        return facts if is_expert else _some(facts, draws)

    facts = note(book.persons[:read]) if read else {}
    messages = [*_opening(attribute, len(book.persons)), *([_summary(facts)] if read else [])]
    if read == len(book.persons):
        asked = draws.choice(list(facts))
        search, answer = exchange(question(attribute, asked), f"<answer> {facts[asked]}</answer>")
        return (*messages, Message(role="assistant", content=_SEARCH), {**search, "role": "tool"}, answer)
    new = book.persons[read : read + draws.randint(1, 2)] if read else book.persons[: draws.randint(2, 3)]
    for person in new:
        messages += [Message(role="assistant", content=_SEARCH), Message(role="tool", content=book.page(person))]
    return (*messages, *exchange(PROMPT, _text(note(new, facts))))


def _facts(book: Book, persons: Sequence[str], draws: random.Random, attribute: str = "") -> Facts:
    """Return an attribute of each of the persons; without one, each time any that a task may ask for."""
    return {person: book.fields(person)[attribute or draws.choice(ASKED)] for person in persons}


def _some(facts: Facts, draws: random.Random) -> Facts:
    """Return each of the facts with probability `_KEPT`, one at least."""
    kept = {person: value for person, value in facts.items() if draws.random() < _KEPT}
    return kept or dict([draws.choice(list(facts.items()))])


def _read_page(key: str, draws: random.Random) -> tuple[Message, ...]:
    """Two pages, each after a question, `What hobby?\\npage Anna, ...` -> ` chess`, and three more questions."""
    book = draw_book(key, 2, draws)
    messages: list[Message] = []
    for person in book.persons:
        (field, value), *more = draws.sample(list(book.fields(person).items()), 4)
        messages += exchange(f"What {field}?\n{book.page(person)}", f" {value}")
        for field, value in more:
            messages += exchange(f"What {field}?", f" {value}")
    return tuple(messages)


def _read_notes(key: str, draws: random.Random) -> tuple[Message, ...]:
    """Notes, and a question about each fact."""
    book = draw_book(key, draws.randint(2, MAX_PAGES), draws)
    facts = _facts(book, book.persons, draws)
    messages = [_summary(facts)]
    for person in draws.sample(list(facts), len(facts)):
        messages += exchange(question(draws.choice(ASKED), person), f"<answer> {facts[person]}</answer>")
    return tuple(messages)


def _text(facts: Facts) -> str:
    return "page " + ", ".join(f"{person} {value}" for person, value in facts.items())


def _summary(facts: Facts) -> Message:
    return Message(role="user", content=INTRODUCTION + _text(facts))


def _opening(attribute: str, pages: int) -> tuple[Message, Message]:
    return opening(SYSTEM, f"What {attribute}? Read {pages} pages.")


def _check_pages(pages: Sequence[int]) -> tuple[int, ...]:
    allowed = range(2, MAX_PAGES + 1)
    if not isinstance(pages, Sequence) or not pages or any(number not in allowed for number in pages):
        raise ConfigError(f"pages must be a list out of 2 to {MAX_PAGES}; got {pages!r}")
    return tuple(pages)
