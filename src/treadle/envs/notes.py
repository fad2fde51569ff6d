"""More pages than fit the context: an agent has to write notes (docs/long-episodes.md).

Each page has one fact that may be asked for later, among six that never are. The agent reads page after page, and is
then asked for one of those facts. With `rollout.compaction` one episode is

    system     Search, then answer.
    user       Read 4 pages.
    assistant  <search>page</search>
    tool       page friend Zoe, boss Max, city Rome, friend Bob, mayor Pia, ...
    assistant  <search>page</search>
    tool       page hobby chess, mayor Ella, boss Gus, ...
    assistant  <search>page</search>
    tool       page boss Carl, friend Nora, food rice, ...
    user       What is found?
    assistant  page city Rome, hobby chess, food rice

    system     Search, then answer.
    user       Read 4 pages.
    user       (the summary) page city Rome, hobby chess, food rice
    assistant  <search>page</search>
    tool       page friend Gina, product lamps, mayor Hugo, ...
    user       What is found?
    assistant  page city Rome, hobby chess, food rice, product lamps

and so on. After the last page

    tool       What is the hobby?
    assistant  <answer> chess</answer>

The reward is 1 for the exact answer, given only at the end. Names and values are `lookup`'s, and each task has freshly
drawn pages, so that nothing can be memorized.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Task
from treadle.envs.base import INTRODUCTION, Environment, EnvStep
from treadle.envs.lookup import SYSTEM, VALUES
from treadle.envs.tasks import check_share, exchange, is_drill, opening, split_key

PAGES = (4, 5, 6)
ASKED = ("hobby", "product", "food", "company", "city", "country")
"""Attributes that may be asked for; a page has one of them."""
FILLERS = ("friend", "boss", "mayor")
"""Attributes that are never asked for; a page has each of them twice."""
PROMPT = "What is found?"
"""Request for a summary in demonstrations: `rollout.compaction.prompt` must be the same."""

_SEARCH = "<search>page</search>"
_ACTION = re.compile(r"<answer>([^<]*)</answer>")
_KEPT = 0.8  # share of facts noted in a demonstrated summary

Fact = tuple[str, str]
"""Attribute and value."""


def page_of(seed: str, attribute: str) -> list[Fact]:
    """Return the facts of the page with this attribute, in drawn order: positions must not reveal attributes."""
    draws = random.Random(f"notes/page/{seed}/{attribute}")
    facts = [(name, draws.choice(VALUES[name])) for name in (attribute, *FILLERS, *FILLERS)]
    draws.shuffle(facts)
    return facts


def text_of(facts: Sequence[Fact]) -> str:
    """Return a page, or notes: `page city Rome, hobby chess`."""
    return "page " + ", ".join(f"{name} {value}" for name, value in facts)


def question(attribute: str) -> str:
    return f"What is the {attribute}?"


class Notes(Environment):
    """Shows the next page for each `<search>page</search>`, then asks; `<answer> V</answer>` ends the episode.

    Needs a task of `tasks`. Further searches after the last page repeat the question. An answer before the question is
    worth nothing, and neither is any other text. The last step's `info["ended"]` is `right`, `wrong`, `early` or
    `format`.
    """

    metrics = (
        Metric("pages_read", "trajectory", "mean", "pages", "pages read"),
        Metric("invalid", "trajectory", "mean", "share", "ended by a reply that is neither search nor answer"),
    )

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.shown = task, 0
        needs = {"seed": str, "attributes": Sequence, "asked": str}
        if wrong := [key for key, kind in needs.items() if not isinstance(task.extras.get(key), kind)]:
            raise DataError(f"task {task.task_id} of environment notes needs {', '.join(wrong)} in extras, see `tasks`")
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        extras, before = self.task.extras, self.shown
        if text == _SEARCH:
            self.shown += 1
            is_page = before < len(extras["attributes"])
            shown = text_of(page_of(extras["seed"], extras["attributes"][before])) if is_page else ""
            message = Message(role="tool", content=shown or question(extras["asked"]))
            return EnvStep([message], info={"pages_read": int(is_page), "invalid": False})
        action, how = _ACTION.fullmatch(text), "format"
        if action is not None:
            right = action[1].strip() == self.task.ground_truth
            how = "early" if before <= len(extras["attributes"]) else "right" if right else "wrong"
        info = {"ended": how, "pages_read": 0, "invalid": how == "format"}
        return EnvStep(reward=float(how == "right"), done=True, info=info)


def tasks(split: str, count: int, seed: int = 0, pages: Sequence[int] = PAGES) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i has `pages[i % len(pages)]` pages.

    Held-out tasks ignore `seed`: every training seed is evaluated on the same ones. The split is part of the key of a
    task's pages, so no held-out pages are ever trained on. For example, task 0 of `tasks("train", 3)`:

        Task("notes-train-0-000000", prompt=(<system>, <user>), environment="notes", ground_truth="chess",
             extras={"seed": "train/0/0", "pages": 4, "attributes": ("city", "hobby", "food", "product"),
                     "asked": "hobby"})

    Raises DataError for another split, ConfigError for an impossible `count` or `pages`.
    """
    key, pages = split_key(split, count, seed), _check_pages(pages)
    made = []
    for index in range(count):
        of_task, number = f"{key}/{index}", pages[index % len(pages)]
        draws = random.Random(f"notes/task/{of_task}")
        attributes = tuple(draws.sample(ASKED, number))
        asked = draws.choice(attributes)
        answer = dict(page_of(of_task, asked))[asked]
        extras = {"seed": of_task, "pages": number, "attributes": attributes, "asked": asked}
        made.append(
            Task(f"notes-{key.replace('/', '-')}-{index:06d}", _opening(len(attributes)), "notes", answer, extras)
        )
    return made


def demonstration(
    index: int, seed: int, expert: float = 0.0, drill: float = 0.5, pages: Sequence[int] = PAGES
) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are the training targets.

    A share `drill` are reading drills, a stand-in for pretraining: "What hobby?" and a page -> " chess", notes and
    questions about them, copies of a text. The others are parts of episodes, from one summary to the next, or to the
    answer. Their summaries have the form of notes, but random contents: any attribute of a new page, including fillers,
    and each fact, new or noted before, with probability .8. A share `expert` of these parts notes exactly the facts
    that may be asked for.

    Raises ConfigError if a share lies outside [0, 1], or for impossible `pages`.
    """
    check_share("expert", expert)
    pages = _check_pages(pages)
    draws, key = random.Random(f"notes/demonstration/{seed}/{index}"), f"demonstration/{seed}/{index}"
    if is_drill(index, drill):
        return draws.choice((_read_page, _read_notes, _copy_notes))(key, draws)
    attributes = draws.sample(ASKED, draws.choice(pages))
    read = draws.choice((0, *range(3, len(attributes) + 1)))  # pages covered by the notes
    is_expert = draws.random() < expert

    def note(names: Sequence[str], noted: Sequence[Fact] = ()) -> list[Fact]:
        shown = [dict(page_of(key, name)) for name in names]
        new = [
            (n := name if is_expert else draws.choice((name, *FILLERS)), f[n])
            for name, f in zip(names, shown, strict=True)
        ]
        return _sorted([*noted, *new] if is_expert else _some([*noted, *new], draws))

    facts = note(attributes[:read]) if read else []
    messages = [*_opening(len(attributes)), *([_summary(facts)] if read else [])]
    if read == len(attributes):
        name, value = draws.choice(facts)
        search, answer = exchange(question(name), f"<answer> {value}</answer>")
        return (*messages, Message(role="assistant", content=_SEARCH), {**search, "role": "tool"}, answer)
    new = attributes[read : read + 1] if read else attributes[:3]
    for name in new:
        messages += [Message(role="assistant", content=_SEARCH)]
        messages.append(Message(role="tool", content=text_of(page_of(key, name))))
    return (*messages, *exchange(PROMPT, text_of(note(new, facts))))


def _some(facts: Sequence[Fact], draws: random.Random) -> list[Fact]:
    """Return each of the facts with probability `_KEPT`, but at least one."""
    return [fact for fact in facts if draws.random() < _KEPT] or [draws.choice(facts)]


def _sorted(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts in the canonical order of notes, so that later ones do not depend on the order of arrival."""
    return sorted(facts, key=lambda fact: (*ASKED, *FILLERS).index(fact[0]))


def _facts(key: str, draws: random.Random) -> list[Fact]:
    """Return notes of one to six facts, of different attributes."""
    names = draws.sample(ASKED, draws.randint(1, len(ASKED)))
    return _sorted([(name, draws.choice(VALUES[name])) for name in names])


def _read_page(key: str, draws: random.Random) -> tuple[Message, ...]:
    """Return three times `What hobby?\\npage friend Bob, hobby chess, ...` -> ` chess`."""
    messages: list[Message] = []
    for name in draws.sample(ASKED, 3):
        facts = page_of(key, name)
        messages += exchange(f"What {name}?\n{text_of(facts)}", f" {dict(facts)[name]}")
    return tuple(messages)


def _read_notes(key: str, draws: random.Random) -> tuple[Message, ...]:
    """Return notes, and a question about each fact."""
    facts = _facts(key, draws)
    messages = [_summary(facts)]
    for name, value in draws.sample(facts, len(facts)):
        messages += exchange(question(name), f"<answer> {value}</answer>")
    return tuple(messages)


def _copy_notes(key: str, draws: random.Random) -> tuple[Message, ...]:
    """Return notes and a copy of them, three times."""
    texts = [text_of(_facts(key, draws)) for _ in range(3)]
    return tuple(message for text in texts for message in exchange(text, text))


def _summary(facts: Sequence[Fact]) -> Message:
    return Message(role="user", content=INTRODUCTION + text_of(facts))


def _opening(pages: int) -> tuple[Message, Message]:
    return opening(SYSTEM, f"Read {pages} pages.")


def _check_pages(pages: Sequence[int]) -> tuple[int, ...]:
    allowed = range(3, len(ASKED) + 1)
    if not isinstance(pages, Sequence) or not pages or any(number not in allowed for number in pages):
        raise ConfigError(f"pages must be a list out of 3 to {len(ASKED)}; got {pages!r}")
    return tuple(pages)
