"""`SampleRecorder`: what was sampled, as trajectories of a run directory, and a line of metrics per optimizer step.

A sequence whose prompt begins with an earlier sequence of its sampling session, prompt and tokens, continues that
trajectory; samples of one prompt are attempts at one task.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.core.files import sha256_of
from treadle.core.types import Ids, SamplingParams, Step, StopReason
from treadle.record.recording import Attempt, Recording
from treadle.tinker.data import Samples, Sampling

_OPEN = 4096
"""Sequences that may still be continued."""


class SampleRecorder:
    """Records samples into a run."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._ends: OrderedDict[tuple[str, int, str], Attempt] = OrderedDict()  # by owner, length and digest of ids

    def samples(
        self, owner: str, prompt: Ids, samples: Samples, sampling: Sampling, version: int, seconds: float
    ) -> None:
        """Record the sequences of one request. owner: its sampling session. Raises RunError if the disk refuses."""
        before = self._continued(owner, prompt)
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens or 2**31 - 1,
            seed=sampling.seed & (2**63 - 1),
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
        )
        task = f"{owner}:{sha256_of(prompt.tobytes())[:12]}"
        for sampled in samples.sequences:
            step = Step(
                prompt, sampled.ids, np.minimum(sampled.logprobs, 0), np.full(len(sampled.ids), version, np.int32),
                params, StopReason.LENGTH if sampled.stop_reason == "length" else StopReason.STOP,
                started=time.time() - seconds, seconds=seconds,
            )  # fmt: skip
            attempt, before = before or self._recording.begin(task), None
            number = len(attempt.steps)
            attempt.steps[number] = step
            self._recording.record(attempt, [number])
            self._recording.calls += 1
            self._ends[_end(owner, step.full_ids)] = attempt
        while len(self._ends) > _OPEN:
            self._ends.popitem(last=False)

    def _continued(self, owner: str, prompt: Ids) -> Attempt | None:
        """Return the trajectory that a prompt continues: the one with the longest beginning in common."""
        lengths = sorted({length for of, length, _ in self._ends if of == owner and length < len(prompt)}, reverse=True)
        for length in lengths:
            if (attempt := self._ends.pop(_end(owner, prompt[:length]), None)) is not None:
                return attempt
        return None

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record an optimizer step."""
        self._recording.log(metrics)

    def rewrite_steps(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Record these optimizer steps instead of those on record."""
        self._recording.rewrite_log(metrics)


def _end(owner: str, ids: Ids) -> tuple[str, int, str]:
    return owner, len(ids), sha256_of(np.ascontiguousarray(ids, np.int32).tobytes())
