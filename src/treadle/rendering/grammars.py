"""Which tokens a grammar leaves: a function of grammar and tokens, by llguidance (also vLLM's `guidance` backend).

An engine asks it before every token that it samples (`Constraint`); the loop asks it again before a step is trained
(`with_supports`). Grammars are texts in llguidance's Lark, which contain JSON schemas; `forms.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError
from treadle.core.support import Support
from treadle.core.types import Group, Ids, SamplingParams, Step, Trajectory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer as Backend


def quoted(text: str) -> str:
    """Return text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


_LISTED = 1024  # possible ids up to which they are listed; the bits of a mask take as much as 5000 ids do


class Grammars:
    """Grammars over a tokenizer's vocabulary. Ids of a model beyond it are never possible."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.problem = lru_cache(maxsize=1024)(self._problem)
        self._compiled = lru_cache(maxsize=256)(self._compile)

    def __reduce__(self) -> tuple[Callable[..., Grammars], tuple[Any, ...]]:
        return Grammars, (self._backend,)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self._backend.to_str())

    def literal(self, text: str) -> str:
        """Return text as Lark: what the tokenizer knows as one added token is that token."""
        parts, at = [], 0
        for start, end, ident in self._added(text):
            parts += [quoted(text[at:start])] * (start > at) + [f"<[{ident}]>"]
            at = end
        return " ".join([*parts, quoted(text[at:])] if text[at:] or not parts else parts)

    def is_token(self, text: str) -> bool:
        """Return whether text is one added token, which free text of a grammar does not contain."""
        return [(start, end) for start, end, _ in self._added(text)] == [(0, len(text))]

    def _added(self, text: str) -> list[tuple[int, int, int]]:
        encoded = self._backend.encode(text, add_special_tokens=False)
        pieces = zip(encoded.offsets, encoded.ids, strict=True)
        return [(*offsets, ident) for offsets, ident in pieces if self._tokenizer.is_special_token(ident)]

    def _problem(self, grammar: str) -> str:
        """Return what is wrong with a grammar, with its place; "" if nothing is."""
        from llguidance import LLMatcher

        _, [*messages] = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return str(messages[0]) if messages else ""

    def constraint(self, sampling: SamplingParams) -> Constraint:
        """Return the constraint of a completion that begins now. Raises DataError for a wrong grammar."""
        matcher = self._compiled(sampling.grammar).deep_copy() if sampling.grammar else None
        return Constraint(matcher, self._tokenizer.vocab_size, sampling.forbidden)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        if problem := self.problem(grammar):
            raise DataError(f"the grammar cannot be used: {problem}")
        return LLMatcher(self._tokenizer, grammar, log_level=0)

    def support(self, sampling: SamplingParams, completion_ids: Ids) -> Support:
        """Return what could have been sampled at each token. Raises DataError where the tokens do not follow it."""
        constraint, masks = self.constraint(sampling), dict[bytes, bytes | NDArray[np.int32]]()
        supports = []
        for token in completion_ids.tolist():
            mask = constraint.mask()
            supports.append(masks[mask] if mask in masks else masks.setdefault(mask, _compact(mask)))
            constraint.take(token)
        return Support.of(supports)

    def check(self, sampling: SamplingParams, completion_ids: Ids) -> None:
        """Raise DataError where sampled tokens do not follow what they were to follow."""
        constraint = self.constraint(sampling)
        for token in completion_ids.tolist():
            constraint.take(token)


class Constraint:
    """What may come next in one completion."""

    def __init__(self, matcher: LLMatcher | None, vocabulary: int, forbidden: Sequence[int]) -> None:
        self._matcher, self._taken = matcher, 0
        allowed = np.ones(vocabulary, np.bool_)
        allowed[[ident for ident in forbidden if ident < vocabulary]] = False
        self._allowed = np.packbits(allowed, bitorder="little")

    def mask(self) -> bytes:
        """Return the possible ids as bits, little-endian. Raises DataError if there are none."""
        bits = self._allowed
        if self._matcher is not None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(bits)] & bits
            self._check()
        if not bits.any():
            raise DataError(f"no token can follow the first {self._taken}: all that the grammar allows are forbidden")
        return bits.tobytes()

    def take(self, token: int) -> None:
        """Go on by a sampled token. Raises DataError for one that was not possible."""
        byte, bit = divmod(token, 8)
        if byte >= len(self._allowed) or not self._allowed[byte] >> bit & 1:
            raise DataError(f"token {self._taken} is the forbidden id {token}")
        if self._matcher is not None:
            self._matcher.consume_token(token)
            self._check()
        self._taken += 1

    def _check(self) -> None:
        assert self._matcher is not None
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n<state>")[0]
            raise DataError(f"the grammar ends at token {self._taken}: {reason}")


def _compact(mask: bytes) -> bytes | NDArray[np.int32]:
    if int.from_bytes(mask).bit_count() > _LISTED:
        return mask
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).astype(np.int32)


def with_support(step: Step, grammars: Grammars) -> Step:
    """Return the step with the support that follows from its grammar and forbidden ids, unless one is recorded."""
    if not step.sampling.constrains or step.sampling.truncates or step.support is not None:
        return step
    return replace(step, support=grammars.support(step.sampling, step.completion_ids))


def with_supports(groups: Sequence[Group], grammars: Grammars) -> list[Group]:
    """Return the groups with the supports of all steps that can be trained."""

    def completed(step: Step) -> Step:
        return with_support(step, grammars) if step.mask.any() else step

    def of(trajectory: Trajectory) -> Trajectory:
        if not any(step.sampling.constrains for step in trajectory.steps) and not trajectory.copies:
            return trajectory
        return replace(
            trajectory, steps=tuple(map(completed, trajectory.steps)), copies=tuple(map(of, trajectory.copies))
        )

    return [replace(group, trajectories=tuple(map(of, group.trajectories))) for group in groups]
