"""Generated databases and questions for `sql-small`, learnable from scratch by a model of 0.4M parameters.

Every question has its own database: two tables, one of which refers to the other. The prompt has the schema, each
column with its table, in drawn order; the rows can only be read by queries.

    system     Answer with SQL.
    user       Columns: city farms, id clubs, food clubs, farms clubs, hobby clubs, id farms, product farms, ...
               What is the city of 'Anna' in clubs?
    assistant  <think> city farms</think><sql> select farms from clubs where id='Anna'</sql>
    user       <observation>  0
               Bob
               <reminder>You have 2 turns left to complete the task.</reminder></observation>
    assistant  <think>Bob</think><solution> select city from farms where id='Bob'</solution>

This question takes two hops. With one hop, the column is in the table named by the question, and the first reply is the
solution. Half of the questions take one, half two. Two hops also fit into one query, with a join; demonstrations never
show that.

The split is over pairs of tables: the pairs in held-out questions occur in no training task. Demonstrations have all
pairs, so that the model does not learn which pairs exist.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from treadle.core.types import Message, Task
from treadle.envs.lookup import CITIES, COMPANIES, COUNTRIES, FOODS, HOBBIES, PERSONS, PRODUCTS
from treadle.envs.sql.environment import observation, render_table
from treadle.envs.tasks import check_share, contents, exchange, is_drill, opening, split_key, words

SYSTEM = "Answer with SQL."
MAX_TURNS = 3
"""Turns in demonstrations, and in the recipe: a tokenizer has no words for a reminder that is never shown."""

PLACES = words("shops farms banks parks inns mills")
GROUPS = words("clubs teams crews bands labs camps")
TABLES = PLACES + GROUPS
"""A database has one table of each kind, and a table's name determines its possible columns. With uninformative names,
a warm start of 300 steps had not learned to look up the table of a column."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "city": CITIES,
    "country": COUNTRIES,
    "product": PRODUCTS,
    "hobby": HOBBIES,
    "food": FOODS,
    "company": COMPANIES,
}
"""Column -> its values; no two columns share one. The first three belong to places, the others to groups."""

_COLUMNS = tuple(VALUES)
_ROWS = 6  # rows per table
_HELD_OUT_PAIRS = 9  # of 36
_STRAY = 0.25  # share of blind episodes with the path of the other number of hops


def _split_pairs() -> dict[str, tuple[tuple[str, str], ...]]:
    pairs = list(product(PLACES, GROUPS))
    random.Random("sql_small/split").shuffle(pairs)
    return {"train": tuple(sorted(pairs[_HELD_OUT_PAIRS:])), "held_out": tuple(sorted(pairs[:_HELD_OUT_PAIRS]))}


PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = _split_pairs()
"""Split -> its own pairs of a place and a group: 27 for `train`, 9 for `held_out`."""
ALL_PAIRS = tuple(product(PLACES, GROUPS))


@dataclass(frozen=True, slots=True)
class World:
    """One drawn database.

    tables: the first refers to the second, by a column of the second's name. columns: columns of each table, `id`
    first.
    listed: every (column, table), in the order of the prompt. rows: table -> its rows, with cells in order of
    `columns`.
    """

    tables: tuple[str, str]
    columns: Mapping[str, tuple[str, ...]]
    listed: Sequence[tuple[str, str]]
    rows: Mapping[str, Sequence[tuple[str, ...]]]

    def schema(self) -> str:
        return f"Columns: {', '.join(' '.join(pair) for pair in self.listed)}."

    def script(self) -> str:
        """Write the SQL to make the database. Names and cells are words, which need no quoting."""
        lines = []
        for table, columns in self.columns.items():
            lines.append(f"CREATE TABLE {table} ({', '.join(f'{column} TEXT' for column in columns)});")
            lines.append(f"INSERT INTO {table} VALUES {', '.join(map(str, self.rows[table]))};")
        return "\n".join(lines)

    def table_of(self, column: str) -> str:
        """Return the table with this column of `VALUES`."""
        return next(table for table in self.tables if column in self.columns[table])

    def linked(self, name: str) -> str:
        """Return the row of the second table that the row `name` of the first one refers to."""
        at = self.columns[self.tables[0]].index(self.tables[1])
        return next(row[at] for row in self.rows[self.tables[0]] if row[0] == name)


@dataclass(frozen=True, slots=True)
class Question:
    """The column in question, from `VALUES`, of a row of the first table or of the row it refers to."""

    world: World
    start: str
    column: str

    @property
    def hops(self) -> int:
        """1 if the column is in the first table, otherwise 2."""
        return 1 + self.world.tables.index(self.world.table_of(self.column))

    def prompt(self) -> tuple[Message, ...]:
        text = f"{self.world.schema()}\nWhat is the {self.column} of '{self.start}' in {self.world.tables[0]}?"
        return opening(SYSTEM, text)

    def gold(self) -> str:
        first, second = self.world.tables
        if self.hops == 1:
            return f"SELECT {self.column} FROM {first} WHERE id = '{self.start}'"
        joined = f"{first} JOIN {second} ON {first}.{second} = {second}.id"
        return f"SELECT {second}.{self.column} FROM {joined} WHERE {first}.id = '{self.start}'"


def draw_question(key: str, pairs: Sequence[tuple[str, str]], hops: int) -> Question:
    """Draw a database of one of the pairs of tables, and a question about it. All draws come from `key`."""
    draws = random.Random(f"sql_small/{key}")
    kinds = list(zip(draws.choice(pairs), (_COLUMNS[:3], _COLUMNS[3:]), strict=True))
    (first, near), (second, far) = draws.sample(kinds, 2)
    names = draws.sample(PERSONS, 2 * _ROWS)
    columns = {first: ("id", *near, second), second: ("id", *far)}
    pools = {**VALUES, second: names[_ROWS:]}
    rows = {
        table: [(name, *(draws.choice(pools[column]) for column in columns[table][1:])) for name in ids]
        for table, ids in ((first, names[:_ROWS]), (second, names[_ROWS:]))
    }
    listed = [(column, table) for table in columns for column in columns[table]]
    draws.shuffle(listed)
    world = World((first, second), columns, listed, rows)
    return Question(world, draws.choice(names[:_ROWS]), draws.choice(near if hops == 1 else far))


def tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return the first `count` tasks of a split (`train`, `held_out`), of one and two hops in turn.

    Held-out tasks ignore `seed`. `extras` have `hops` and the database's `script`. Raises DataError for another split,
    ConfigError for an impossible `count`.
    """
    key = split_key(split, count, seed)
    made = []
    for index in range(count):
        hops, name = 1 + index % 2, f"{key}/{index}"
        question = draw_question(name, PAIRS[split], hops)
        extras = {"hops": hops, "script": question.world.script()}
        task_id = f"sql_small-{name.replace('/', '-')}"
        made.append(Task(task_id, question.prompt(), "text_to_sql", question.gold(), extras))
    return made


def demonstration(index: int, seed: int, expert: float = 0.2, drill: float = 0.3) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start; its assistant messages are the training targets.

    A share `drill` are drills of one sub-skill: finding the table of a column. The others are attempts. A share
    `expert` of them solve their question. The rest are blind to it: they look up a column drawn at random, and a
    quarter of them use the other number of hops, so that their queries are well formed, but seldom right.

    Drills are placed by index (`is_drill`); everything else is drawn from (seed, index). Raises ConfigError for a share
    outside [0, 1].
    """
    check_share("expert", expert)
    draws = random.Random(f"sql_small/demonstration/{seed}/{index}")
    question = draw_question(f"demonstration/{seed}/{index}", ALL_PAIRS, draws.choice((1, 2)))
    if is_drill(index, drill):
        messages: list[Message] = []
        for column in draws.sample(_COLUMNS, len(_COLUMNS)):
            schema = "" if messages else f"{question.world.schema()}\n"
            table = question.world.table_of(column)
            messages += exchange(f"{schema}What is the {column}?", f"<think> {column} {table}</think>")
        return tuple(messages)
    column, strays = question.column, False
    if draws.random() >= expert:
        column, strays = draws.choice(_COLUMNS), draws.random() < _STRAY
    in_second = question.world.table_of(column) == question.world.tables[1]
    return _attempt(question, column, through_link=in_second is not strays)


def _attempt(question: Question, column: str, through_link: bool) -> tuple[Message, ...]:
    """Return an attempt that looks up `column`, of the row in question or of the row it refers to."""
    world, name = question.world, question.start
    first, second = world.tables
    table = world.table_of(column)
    messages, thought = [*question.prompt()], f" {column} {table}"
    if through_link:
        query = f"<think>{thought}</think><sql>{_select(second, first, name)}</sql>"
        name = world.linked(name)
        messages += [Message(role="assistant", content=query), observation(_shown(name), MAX_TURNS - 1)]
        thought = name
    solution = f"<think>{thought}</think><solution>{_select(column, table, name)}</solution>"
    return (*messages, Message(role="assistant", content=solution))


def _select(column: str, table: str, name: str) -> str:
    return f" select {column} from {table} where id='{name}'"


@cache
def _shown(name: str) -> str:
    return render_table([(name,)])


def corpus(count: int) -> Iterator[str]:
    """Yield the messages of `count` demonstrations, for training a tokenizer; they never change."""
    return contents(demonstration(index, seed=0, expert=0.2, drill=0.3) for index in range(count))
