"""A run that was recorded, not trained, in which agents write their conversations anew."""

from pathlib import Path

from tokenizers import Tokenizer

import treadle.recipes
from tests.worlds import END, chatml, make_group, make_step, tiny, tool, user
from treadle.core.types import Message, Status, Trajectory
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.rollout_store import write_shard
from treadle.orchestration.store.run_directory import RunDirectory

_TOKENIZER = Tokenizer.from_file(str(Path(treadle.recipes.__file__).parent / "tokenizer" / "tokenizer.json"))
Call = tuple[list[int], list[int]]  # (prompt, completion)
Calls = list[Call]


def ids(text: str) -> list[int]:
    """By the shipped tokenizer."""
    return [int(i) for i in _TOKENIZER.encode(text, add_special_tokens=False).ids]


def text_of(tokens: list[int]) -> str:
    return str(_TOKENIZER.decode(tokens, skip_special_tokens=False))


def whole(call: Call) -> list[int]:
    return [*call[0], *call[1]]


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


SYSTEM = Message(role="system", content="Search, then answer.")
QUESTION = [SYSTEM, user("What city?")]
SPELLED = [i for letter in "page" for i in ids(letter)]  # sampled as four tokens, written as one
READ = tool("page Acme, boss Zoe, city Rome, product lamps")


def tokenizing_again() -> Calls:
    """Extends; is tokenized again; asks a sub-agent; goes on; forgets its first turn; asks about something else."""
    opening = ids(chatml(QUESTION))
    calls = [(opening, [*SPELLED, END])]
    calls.append(([*opening, *SPELLED, END, *ids("\n" + chatml([READ]))], [*ids(" Rome"), END]))
    calls.append((ids(text_of(whole(calls[1])) + "\n" + chatml([READ])), [*ids(" Oslo"), END]))
    calls.append((ids(chatml([SYSTEM, user("Is Rome a city?")])), [*ids(" Acme"), END]))
    calls.append(([*whole(calls[2]), *ids("\n" + chatml([tool("nothing found")]))], [*ids(" Lima"), END]))
    rest = [said(" Oslo"), tool("nothing found"), said(" Lima"), tool("nothing found")]
    calls.append((ids(chatml([SYSTEM, READ, *rest])), [END]))
    calls.append(([700, 701], [702]))
    return calls


def editing() -> Calls:
    """Extends, then replaces what it read."""
    opening = ids(chatml(QUESTION))
    calls = [(opening, [*ids(" Rome"), END])]
    calls.append(([*whole(calls[0]), *ids("\n" + chatml([READ]))], [*ids(" Oslo"), END]))
    edited = [*QUESTION, said(" Rome"), tool("page Acme, gone"), said(" Oslo"), READ]
    calls.append((ids(chatml(edited)), [*ids(" Lima"), END]))
    return calls


TRAJECTORIES = (tokenizing_again(), editing())


def record(path: Path) -> Path:
    """One group with both trajectories, as training records it before the first checkpoint."""
    made = [
        Trajectory(f"g000000.{n}", "t0", n, tuple(make_step(*call) for call in calls), 1.0, Status.DONE)
        for n, calls in enumerate(TRAJECTORIES)
    ]
    run = RunDirectory.create(path, tiny())
    run.close()
    group = make_group(0, *made)
    ledger = Ledger(run.ledger_file)
    ledger.record([group], "train", 0, write_shard(run.rollouts, "train-g000000", [group]))
    ledger.close()
    return path
