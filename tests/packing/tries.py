"""Random calls, and the slow, obvious way to say what sharing their prefixes must give."""

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st

from treadle.packing.flat import Indices, PackedCall
from treadle.packing.layout import MicroBatch
from treadle.packing.tree import PrefixTree

Word = tuple[int, tuple[int, ...] | None]  # a token's id and keys
Node = tuple[int, tuple[Word, ...]]  # a root, and the words from there to the node's own
Readings = dict[int, tuple[int, list[int]]]  # flat -> (the token asked for, the tokens seen before it)


def call(
    ids: Sequence[int],
    prompt_length: int,
    first: int = 0,
    trajectory: int = 0,
    group: int = 0,
    keys: Sequence[Sequence[int]] | None = None,
) -> PackedCall:
    return PackedCall(
        np.array(ids, np.int32),
        prompt_length,
        first,
        trajectory,
        group,
        None if keys is None else np.array(keys, np.int32).reshape(len(ids), -1),
    )


def calls_of(*prompts_and_completions: tuple[Sequence[int], Sequence[int]], trajectory: int = 0) -> list[PackedCall]:
    made, first = [], 0
    for prompt, completion in prompts_and_completions:
        made.append(call([*prompt, *completion], len(prompt), first, trajectory))
        first += len(completion)
    return made


@st.composite
def some_calls(draw: st.DrawFn, max_calls: int = 7, keyed: bool = False) -> list[PackedCall]:
    """Fresh, forked anywhere, continued and equal calls of three trajectories in two groups; 1-token prompts, empty
    completions; if `keyed`, some with 1 or 2 keys a token."""
    sequences: list[list[tuple[int, int]]] = []
    made: list[PackedCall] = []
    first = 0
    for _ in range(draw(st.integers(0, max_calls))):
        past = draw(st.sampled_from([[], *sequences]))
        kept = len(past) if draw(st.booleans()) else draw(st.integers(0, len(past)))
        fresh = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=4))
        sequence = past[:kept] + fresh or [(0, 0)]
        width = draw(st.integers(0, 2)) if keyed else 0
        trajectory = draw(st.integers(0, 2))
        made.append(
            call(
                [token for token, _ in sequence],
                draw(st.integers(1, len(sequence))),
                first,
                trajectory,
                trajectory // 2,
                [[key] * width for _, key in sequence] if width else None,
            )
        )
        sequences.append(sequence)
        first += len(sequence) - made[-1].prompt_length
    return made


def trained(calls: Iterable[PackedCall]) -> list[PackedCall]:
    return [c for c in calls if len(c.token_ids) > c.prompt_length]


# What must be


def agreement(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading items agree, one by one."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def words(call: PackedCall) -> list[Word]:
    keys = [None] * len(call.token_ids) if call.keys is None else [tuple(row) for row in call.keys.tolist()]
    return list(zip(call.token_ids.tolist(), keys, strict=True))


def nodes(calls: Sequence[PackedCall], roots: Sequence[int]) -> set[Node]:
    """The distinct prefixes."""
    return {
        (root, tuple(words(c)[:n])) for c, root in zip(calls, roots, strict=True) for n in range(1, 1 + len(words(c)))
    }


def parents_of_pairs(calls: Sequence[PackedCall], roots: Sequence[int]) -> dict[int, Node]:
    """For each completion token, everything before it."""
    return {
        c.first + n - c.prompt_length: (root, tuple(words(c)[:n]))
        for c, root in zip(calls, roots, strict=True)
        for n in range(c.prompt_length, len(c.token_ids))
    }


def readings(calls: Iterable[PackedCall]) -> Readings:
    made: Readings = {}
    for c in calls:
        ids = c.token_ids.tolist()
        made |= {c.first + n - c.prompt_length: (ids[n], ids[:n]) for n in range(c.prompt_length, len(ids))}
    return made


# What is, read token by token


def seen(subtree_end: Indices, at: int) -> list[int]:
    """What node `at` sees, itself last."""
    return [j for j in range(at + 1) if at < subtree_end[j]]


def readings_of_tree(tree: PrefixTree) -> Readings:
    made = {
        flat: (target, tree.token_ids[seen(tree.subtree_end, source)].tolist())
        for source, target, flat in zip(tree.source.tolist(), tree.target_ids.tolist(), tree.flat.tolist(), strict=True)
    }
    assert len(made) == len(tree.flat)  # none twice
    return made


def readings_of_chunk(tree: PrefixTree, chunk: MicroBatch) -> Readings:
    """By what the chunk itself says, and the tokens of its context."""
    ids = np.concatenate([tree.token_ids[chunk.context], chunk.token_ids])
    made = {
        flat: (target, ids[seen(chunk.subtree_end, len(chunk.context) + source)].tolist())
        for source, target, flat in zip(
            chunk.source.tolist(), chunk.target_ids.tolist(), chunk.flat.tolist(), strict=True
        )
    }
    assert len(made) == len(chunk.flat)
    return made
