"""A small world for lookups: multi-turn, multi-hop, and impossible to memorize.

Pages of a typed knowledge base refer to each other,

    person -> company, hobby, friend      company -> city, product, boss      city -> country, food, mayor

and a question needs one, two or three of them. Every question has its own freshly drawn world (Anna may work at Acme in
this one and at Zeta in the next), so the agent has to search. One episode:

    system     Search, then answer.
    user       What product does the company of Anna make?
    assistant  <search> Anna</search>
    tool       page Anna, hobby chess, company Acme, friend Bob
    assistant  <search> Acme</search>
    tool       page Acme, boss Zoe, city Rome, product lamps
    assistant  <answer> lamps</answer>

The reward is 1 for the exact answer, given only at the end, unless a task also pays for pages. Pages, questions and
demonstrations are functions of their keys, so a world needs no storage and any index can be generated separately.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.core.errors import ConfigError, DataError
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward, is_finite
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import check_hops, check_share, contents, exchange, is_drill, opening, split_key, words

SYSTEM = "Search, then answer."
MAX_TURNS = 6
NOTHING = "nothing found"

PERSONS = words(
    "Anna Bob Carl Dora Emil Fay Gus Hana Ivan Jane Karl Lena Max Nora Otto Pia Quin Rosa Sam Tina "
    "Umar Vera Wim Xena Yuri Zoe Abel Bea Cora Dan Ella Finn Gina Hugo Iris Jack Kira Leo Maya Nils"
)
COMPANIES = words("Acme Zeta Nova Orbit Delta Omega Vertex Pixel Quark Fusion Atlas Titan Lumen Radix Sonic Argon")
CITIES = words("Paris Rome Oslo Cairo Lima Tokyo Berlin Quito Delhi Milan Turin Vienna Prague Dublin Madrid Lisbon")
COUNTRIES = words("France Italy Norway Egypt Peru Japan Kenya Chile India Spain Ghana Cuba")
HOBBIES = words("chess golf yoga tennis music dance judo rugby sewing poker skiing hiking")
PRODUCTS = words("shoes cars phones chairs clocks lamps boats bikes pens tents guitars mirrors")
FOODS = words("pizza soup rice cheese bread sushi curry noodles tacos salad honey olives")

ENTITIES = PERSONS + COMPANIES + CITIES + COUNTRIES + HOBBIES + PRODUCTS + FOODS
"""Every name of the world, pages and values alike, once each."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "company": COMPANIES,
    "hobby": HOBBIES,
    "friend": PERSONS,
    "city": CITIES,
    "product": PRODUCTS,
    "boss": PERSONS,
    "country": COUNTRIES,
    "food": FOODS,
    "mayor": PERSONS,
}
"""Field of a page -> its possible values."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(PERSONS, ("company", "hobby", "friend")),
    **dict.fromkeys(COMPANIES, ("city", "product", "boss")),
    **dict.fromkeys(CITIES, ("country", "food", "mayor")),
}
"""Name of a page -> its fields."""

HOPS: Mapping[str, int] = {"hobby": 1, "product": 2, "city": 2, "country": 3, "food": 3}
"""Attribute in question -> number of searches needed."""

QUESTIONS: Mapping[str, str] = {
    "hobby": "What is the hobby of {}?",
    "product": "What product does the company of {} make?",
    "city": "In what city is the company of {}?",
    "country": "In what country does {} work?",
    "food": "What food is famous in the city where {} works?",
}

_ACTION = re.compile(r"<(search|answer)>([^<]*)</\1>")
_LINKS = ("company", "city")  # followed from a person, one per hop
_QUESTION_FIRST = 0.7  # share of reading drills with the question before the page


class World:
    """One drawn knowledge base. The same `seed` gives the same world, whatever was looked up before."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pages: dict[str, dict[str, str]] = {}  # a cache, to avoid drawing a page twice

    def page(self, name: str) -> Mapping[str, str]:
        """Return the fields of page `name` (a person, company or city) in drawn order."""
        if name not in self._pages:
            draws = random.Random(f"lookup/page/{self.seed}/{name}")
            items = [(field, draws.choice(VALUES[field])) for field in FIELDS[name]]
            # A field's position must not reveal its kind.
            draws.shuffle(items)
            self._pages[name] = dict(items)
        return self._pages[name]

    def search(self, name: str) -> str:
        """Return the agent's result: `page Anna, hobby chess, company Acme, friend Bob`, or `nothing found`."""
        if name not in FIELDS:
            return NOTHING
        return f"page {name}, " + ", ".join(f"{field} {value}" for field, value in self.page(name).items())


@dataclass(frozen=True, slots=True)
class Question:
    """The `attribute` in question (a key of `QUESTIONS`), the person (`start`), and the world."""

    world_seed: str
    start: str
    attribute: str

    @property
    def hops(self) -> int:
        """Number of searches for the answer: 1, 2 or 3."""
        return HOPS[self.attribute]

    def prompt(self) -> tuple[Message, ...]:
        return opening(SYSTEM, QUESTIONS[self.attribute].format(self.start))

    def solve(self, world: World) -> tuple[tuple[str, ...], str]:
        """Return the `hops` pages to search, in order, and the answer on the last one."""
        names = [self.start]
        for link in _LINKS[: self.hops - 1]:
            names.append(world.page(names[-1])[link])
        return tuple(names), world.page(names[-1])[self.attribute]


def draw_question(world_seed: str, hops: int, draws: random.Random) -> Question:
    """Draw a question of `hops` searches (1, 2 or 3): first the person, then the attribute, both uniform."""
    start = draws.choice(PERSONS)
    return Question(world_seed, start, draws.choice([kind for kind, count in HOPS.items() if count == hops]))


class Lookup(Environment):
    """Plays one question: `<search> X</search>` shows a page, `<answer> V</answer>` ends the episode.

    Needs a task of `tasks`, or one with `extras` {"world_seed", "start", "attribute"} and its `ground_truth`; the
    prompt is derived from those. At most `MAX_TURNS` replies; any other text ends the episode with reward 0. The last
    step's `info["ended"]` is `right`, `wrong`, `turns` (still searching at the last turn) or `format`.

    Extras may have `page_reward`: each page on the way to the answer then pays that much when it is first opened
    (component `page`), and the answer is the component `answer`.
    """

    metrics = (
        Metric("searches", "trajectory", "mean", "searches", "pages asked for"),
        Metric("found_nothing", "step", "mean", "share", "searches for what has no page"),
        Metric("invalid", "trajectory", "mean", "share", "ended by a reply that is neither search nor answer"),
    )

    def __init__(self) -> None:
        self.turns = 0
        self.unopened: set[str] = set()  # pages that still pay
        self.page_reward: float | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self.task, self.turns = task, 0
        question = question_of(task)
        self.world = World(question.world_seed)
        self.page_reward = task.extras.get("page_reward")
        if self.page_reward is not None:
            if not is_finite(self.page_reward):
                where = f"task {task.task_id} of environment lookup"
                raise DataError(f"{where}: page_reward must be a number, got {self.page_reward!r}")
            self.unopened = set(question.solve(self.world)[0])
        return question.prompt()

    async def step(self, text: str) -> EnvStep:
        self.turns += 1
        action = _ACTION.fullmatch(text)
        if action is None:
            return self._end("format")
        argument = action[2].strip()
        if action[1] == "answer":
            return self._end("right" if argument == self.task.ground_truth else "wrong")
        if self.turns >= MAX_TURNS:
            return self._end("turns")
        text = self.world.search(argument)
        reward: float | Reward = 0.0
        if self.page_reward is not None and argument in self.unopened:
            self.unopened.remove(argument)
            reward = Reward({"page": self.page_reward})
        info = {"searches": 1, "found_nothing": text == NOTHING, "invalid": False}
        return EnvStep([Message(role="tool", content=text)], reward, info=info)

    def _end(self, how: str) -> EnvStep:
        right = float(how == "right")
        reward = right if self.page_reward is None else Reward({"answer": right})
        info = {"ended": how, "searches": 0, "invalid": how == "format"}
        return EnvStep(reward=reward, done=True, info=info)


def question_of(task: Task) -> Question:
    """Return a task's question. Raises DataError, naming the task and its missing data."""
    where, keys = f"task {task.task_id} of environment lookup", ("world_seed", "start", "attribute")
    if missing := [key for key in keys if not isinstance(task.extras.get(key), str)]:
        raise DataError(f"{where} needs the strings {', '.join(missing)} in extras, has {dict(task.extras)}")
    question = Question(*(task.extras[key] for key in keys))
    if question.start not in PERSONS or question.attribute not in QUESTIONS:
        must = f"attribute must be one of {', '.join(QUESTIONS)} and start one of lookup.PERSONS"
        raise DataError(f"{where} asks for {question.attribute!r} of {question.start!r}; {must}")
    if not isinstance(task.ground_truth, str):
        raise DataError(f"{where} needs its answer as a string in ground_truth, got {task.ground_truth!r}")
    return question


def tasks(
    split: str, count: int, seed: int = 0, hops: Sequence[int] = (1, 2, 3), page_reward: float | None = None
) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i takes `hops[i % len(hops)]` searches.

    Held-out tasks ignore `seed`: every training seed is evaluated on the same ones. The split is part of each world's
    key, so no held-out world is ever trained on. A larger `count` only appends tasks. For example task 1
    of `tasks("train", 3)`:

        Task("lookup-train-0-000001", prompt=(<system>, <user>), environment="lookup", ground_truth="lamps",
             extras={"world_seed": "train/0/1", "hops": 2, "attribute": "product", "start": "Anna"})

    page_reward: reward for each page on the way to the answer; with it, `evaluation.success_of=answer` shows success.

    Raises DataError for another split, ConfigError for an impossible `count`, `hops` or `page_reward`.
    """
    key, hops = split_key(split, count, seed), check_hops(hops, 3)
    name = f"lookup-{key.replace('/', '-')}"
    if page_reward is not None and not is_finite(page_reward):
        raise ConfigError(f"page_reward must be a finite number, got {page_reward!r}")
    paying = {} if page_reward is None else {"page_reward": page_reward}
    made = []
    for index in range(count):
        seed_of_world, number = f"{key}/{index}", hops[index % len(hops)]
        question = draw_question(seed_of_world, number, random.Random(f"lookup/question/{seed_of_world}"))
        _, answer = question.solve(World(seed_of_world))
        asked = {"attribute": question.attribute, "start": question.start}
        extras = {"world_seed": seed_of_world, "hops": number, **asked, **paying}
        made.append(Task(f"{name}-{index:06d}", question.prompt(), "lookup", answer, extras))
    return made


def right_answer(task: Task) -> str:
    """Return the reply with the right answer (`algorithm.distillation.target`)."""
    return f"<answer> {task.ground_truth}</answer>"


def demonstration(
    index: int, seed: int, expert: float = 0.2, drill: float = 0.4, hops: Sequence[int] = (1, 2, 3)
) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are the training targets.

    A share `drill` are reading drills ("What city?" and a page -> " Paris"), a stand-in for pretraining. The others are
    search episodes: a share `expert` of them correct, the rest random walks blind to the question. The latter show the
    format and copying from context, but not which links to follow or when to stop.

    Drills are placed by index (`is_drill`); everything else is drawn from (seed, index). Answers keep their leading
    space, to be single tokens. Raises ConfigError for a share outside [0, 1] or impossible `hops`.
    """
    check_share("expert", expert)
    hops = check_hops(hops, 3)
    world = World(f"demonstration/{seed}/{index}")
    draws = random.Random(f"lookup/demonstration/{seed}/{index}")
    if is_drill(index, drill):
        return _question_first(world, draws) if draws.random() < _QUESTION_FIRST else _page_first(world, draws)
    question = draw_question(world.seed, draws.choice(hops), draws)
    correct = draws.random() < expert
    names, answer = question.solve(world) if correct else _random_walk(world, question.start, draws)
    return _episode(question, world, names, answer)


def _random_walk(world: World, start: str, draws: random.Random) -> tuple[tuple[str, ...], str]:
    """Search `start`, then pages named on the last page, one to three in total; answer with a value from the last."""
    names = [start]
    for _ in range(draws.randint(0, 2)):
        names.append(draws.choice([value for value in world.page(names[-1]).values() if value in FIELDS]))
    return tuple(names), draws.choice([v for v in world.page(names[-1]).values() if v not in PERSONS])


def _episode(question: Question, world: World, names: Sequence[str], answer: str) -> tuple[Message, ...]:
    messages = [*question.prompt()]
    for name in names:
        messages.append(Message(role="assistant", content=f"<search> {name}</search>"))
        messages.append(Message(role="tool", content=world.search(name)))
    return (*messages, Message(role="assistant", content=f"<answer> {answer}</answer>"))


def _question_first(world: World, draws: random.Random) -> tuple[Message, ...]:
    """Return three questions, each followed by its own page: `What city?\\npage Acme, ...` -> ` Paris`."""
    messages: list[Message] = []
    for _ in range(3):
        name = draws.choice(draws.choice((PERSONS, COMPANIES, CITIES)))
        field, value = draws.choice(list(world.page(name).items()))
        messages += exchange(f"What {field}?\n{world.search(name)}", f" {value}")
    return tuple(messages)


def _page_first(world: World, draws: random.Random) -> tuple[Message, ...]:
    """Return one page, then a question for each of its three fields in random order."""
    name = draws.choice(list(FIELDS))
    items = list(world.page(name).items())
    draws.shuffle(items)
    messages: list[Message] = []
    for field, value in items:
        page = "" if messages else world.search(name) + "\n"
        messages += exchange(f"{page}What {field}?", f" {value}")
    return tuple(messages)


def corpus(count: int) -> Iterator[str]:
    """Yield the contents of `count` demonstrations for training a tokenizer. Fixed: word ids depend on it."""
    return contents(demonstration(index, seed=0, expert=0.2, drill=0.4, hops=(1, 2, 3)) for index in range(count))
