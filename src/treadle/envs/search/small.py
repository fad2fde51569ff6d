"""`search-small`: Search-R1's task on a made-up corpus of short passages, for a small model trained from scratch.

    Anna Lopez works at Acme Motors and likes chess.        Acme Motors is in Rome and makes lamps.

Questions take one search (a person's likes or employer, a company's product or place) or two (product or place of a
person's company). The corpus is always the same; one half of its people and companies is asked about in training, the
other half held out, and no passage of one half names anybody of the other. Both halves' names consist of the same
words, so that only searching can be learned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from treadle.core.types import Message, Task
from treadle.envs.lookup import CITIES, COMPANIES, HOBBIES, PERSONS, PRODUCTS
from treadle.envs.search.environment import PROTOCOLS, Search
from treadle.envs.tasks import SPLITS, check_hops, check_share, contents, exchange, is_drill, opening, split_key, words
from treadle.retrieval.corpus import Retriever

SYSTEM = "Search, then answer."

FIRST_NAMES = PERSONS[:32]
LAST_NAMES = words(
    "Lopez Rossi Klein Novak Silva Moore Weber Costa Dubois Jensen Kim Tanaka Singh Okafor Haddad Petrov Larsen Nagy "
    "Moreno Fischer Walsh Santos Ito Berg Castro Duarte Fontana Garnier Hansen Iqbal Jones Kowal"
)
BRANDS = COMPANIES + words("Cobalt Ember Falcon Granite")
TRADES = words("Motors Foods Labs Works Media Mills Tools Trading Press Energy Systems Logistics")

_PEOPLE = {"likes": "What does {} like?", "works at": "Where does {} work?"}
_COMPANIES = {"makes": "What does {} make?", "is in": "Where is {}?"}
_OF_COMPANIES = {"makes": "What does the company of {} make?", "is in": "Where is the company of {}?"}


class World(NamedTuple):
    """The people and companies of one split: name -> fact -> value.

    {"Anna Lopez": {"works at": "Acme Motors", "likes": "chess"}}, {"Acme Motors": {"is in": "Rome", "makes": "lamps"}}
    """

    people: dict[str, dict[str, str]]
    companies: dict[str, dict[str, str]]

    def passage(self, name: str) -> str:
        facts = self.people.get(name) or self.companies[name]
        return f"{name} " + " and ".join(f"{fact} {value}" for fact, value in facts.items()) + "."


class Question(NamedTuple):
    """A question's text, the names to search for, in order, and the answer, contained in the last passage."""

    text: str
    names: tuple[str, ...]
    answer: str


@cache
def world(split: str) -> World:
    """Return the half of the corpus's world used by a split."""

    # every other pair, so that both halves use all words
    def half(first: Sequence[str], second: Sequence[str]) -> list[str]:
        pairs = product(enumerate(first), enumerate(second))
        return [f"{a} {b}" for (i, a), (j, b) in pairs if (i + j) % 2 == SPLITS.index(split)]

    return _world(half(FIRST_NAMES, LAST_NAMES), half(BRANDS, TRADES), random.Random(f"search_small/{split}"))


def _world(people: Sequence[str], companies: Sequence[str], draws: random.Random) -> World:
    values = {"is in": CITIES, "makes": PRODUCTS, "works at": companies, "likes": HOBBIES}

    def facts(*kinds: str) -> dict[str, str]:
        # A fact's position must not reveal its kind.
        order = draws.sample(kinds, len(kinds))
        return {kind: draws.choice(values[kind]) for kind in order}

    return World({n: facts("works at", "likes") for n in people}, {n: facts("is in", "makes") for n in companies})


def _drawn(first: Sequence[str], second: Sequence[str], count: int, draws: random.Random) -> list[str]:
    return [f"{a} {b}" for a, b in zip(draws.sample(first, count), draws.sample(second, count), strict=True)]


@cache
def passages() -> tuple[str, ...]:
    """Return the corpus: a passage for every person and company of both splits."""
    return tuple(
        town.passage(name) for town in map(world, SPLITS) for names in (town.people, town.companies) for name in names
    )


@cache
def questions(split: str, hops: int) -> tuple[Question, ...]:
    """Return all questions of a split with one or two searches, in a drawn order."""
    shuffled = _questions(world(split), hops)
    random.Random(f"search_small/questions/{split}/{hops}").shuffle(shuffled)
    return tuple(shuffled)


def _questions(town: World, hops: int) -> list[Question]:
    if hops == 2:
        return [
            Question(text.format(name), (name, facts["works at"]), town.companies[facts["works at"]][fact])
            for name, facts in town.people.items()
            for fact, text in _OF_COMPANIES.items()
        ]
    return [
        Question(text.format(name), (name,), facts[fact])
        for entities, texts in ((town.people, _PEOPLE), (town.companies, _COMPANIES))
        for name, facts in entities.items()
        for fact, text in texts.items()
    ]


class SearchSmall(Search):
    """Plays one question like `Search`; passages come from BM25 in this process. `topk` is 1 by default."""

    def __init__(self, topk: int = 1, max_turns: int = 4, protocol: str = "skyrl") -> None:
        super().__init__(topk=topk, max_turns=max_turns, protocol=protocol)
        self.longest_wait = 0.0  # there is no server

    async def retrieve(self, query: str, topk: int) -> Sequence[str]:
        return find(query, topk)


def find(query: str, topk: int) -> list[str]:
    """Return at most `topk` passages of the corpus, best first."""
    [hits] = _retriever().search([query], topk)
    return [passages()[hit.passage] for hit in hits]


@cache
def _retriever() -> Retriever:
    from treadle.retrieval.index import Bm25  # bm25s comes with an extra

    return Bm25.build(passages(), len(passages()))


def tasks(split: str, count: int, seed: int = 0, hops: Sequence[int] = (1, 2)) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`); task i takes `hops[i % len(hops)]` searches.

    Training tasks come in an order drawn from `seed`; held-out tasks ignore it. A larger `count` only appends tasks;
    after all 1264 questions of one hop, or 1024 of two, they repeat. `extras`: `hops`, and `names`, the names to search
    for.

    Raises DataError for another split, ConfigError for an impossible `count` or `hops`.
    """
    key, hops = split_key(split, count, seed), check_hops(hops, 2)
    # Early, so that a missing package is an error before anything is played.
    _retriever()
    pools: dict[int, Sequence[Question]] = {number: questions(split, number) for number in set(hops)}
    pools = {n: random.Random(f"search_small/order/{key}").sample(pool, len(pool)) for n, pool in pools.items()}
    made = []
    for index in range(count):
        number, place = hops[index % len(hops)], index // len(hops)
        question = pools[number][place % len(pools[number])]
        extras = {"hops": number, "names": list(question.names)}
        task_id = f"search_small-{key.replace('/', '-')}-{index:06d}"
        made.append(Task(task_id, opening(SYSTEM, question.text), "search_small", question.answer, extras))
    return made


def demonstration(
    index: int, seed: int, expert: float = 0.2, drill: float = 0.4, topk: int = 1, hops: Sequence[int] = (1, 2)
) -> tuple[Message, ...]:
    """Return conversation `index` of a warm start: it teaches form and reading, and leaves searching to be learned.

    A share `drill` are reading drills (a question of one search with its passage, and the answer), a stand-in for
    pretraining. The others are episodes: a share `expert` of them correct, the rest blind to the question: they search
    for the person, or also for a company that they read of, and answer with any value from the last passage. Each
    conversation has its own world, drawn together with its names and unrelated to the corpus: only reading can be
    learned.

    Drills are placed by index (`is_drill`); everything else is drawn from (seed, index). topk: number of passages
    shown. Raises ConfigError for a share outside [0, 1] or impossible `hops`.
    """
    check_share("expert", expert)
    hops = check_hops(hops, 2)
    draws = random.Random(f"search_small/demonstration/{seed}/{index}")
    town = _world(_drawn(FIRST_NAMES, LAST_NAMES, 4, draws), _drawn(BRANDS, TRADES, 3, draws), draws)
    messages: list[Message] = []
    if is_drill(index, drill):
        for question in draws.sample(_questions(town, 1), 3):
            shown = _observation(question.names[0], town, topk)
            messages += exchange(question.text + shown, f" {question.answer}")
        return tuple(messages)
    question = draws.choice(_questions(town, draws.choice(hops)))
    if draws.random() >= expert:
        question = _blind(question, town, draws)
    messages += opening(SYSTEM, question.text)
    for name in question.names:
        messages.append(Message(role="assistant", content=f"<search> {name}</search>"))
        messages.append(Message(role="user", content=_observation(name, town, topk)))
    return (*messages, Message(role="assistant", content=f"<answer> {question.answer}</answer>"))


def _blind(question: Question, town: World, draws: random.Random) -> Question:
    """Return the question with searches and an answer that depend only on the name, not on the attribute."""
    name = question.names[0]
    names: tuple[str, ...] = (name,)
    if name in town.people and draws.random() < 0.5:
        names = (name, town.people[name]["works at"])
    facts = town.people.get(names[-1]) or town.companies[names[-1]]
    return Question(question.text, names, draws.choice(list(facts.values())))


def _observation(name: str, town: World, topk: int) -> str:
    others = [other for other in (*town.people, *town.companies) if other != name]
    return PROTOCOLS["skyrl"].observation([town.passage(each) for each in (name, *others)[:topk]])


def corpus(count: int) -> Iterator[str]:
    """Yield the contents of `count` demonstrations, and all passages, for training a tokenizer. They never change."""
    yield from contents(demonstration(index, seed=0, topk=3) for index in range(count))
    yield from (f" {passage}" for passage in passages())
