"""Attempts as text for trackers: which, what is in them, and what is not."""

from dataclasses import replace

import numpy as np
import pytest

from tests.worlds import PLAIN, make_group, make_step, plain_ids, tiny
from treadle.core.errors import Cause
from treadle.core.types import DropReason, Failure, Group, Ids, Status, Step, Trajectory
from treadle.report.samples import LONGEST, MOST, Sample, sample_attempts
from treadle.report.trackers import as_markdown
from treadle.training.objective import TracedGroups

EVERY = tiny("orchestration.traced_groups=1")


def decode(ids: Ids) -> str:
    return str(PLAIN.decode(ids.tolist()))


def group(index: int, *attempts: list[Step]) -> Group:
    made = [
        Trajectory(f"g{index:06d}.{n}", f"t{index}", n, tuple(steps), 0.5, Status.DONE)
        for n, steps in enumerate(attempts)
    ]
    return make_group(index, *made)


def said(prompt: str, reply: str) -> Step:
    return make_step(plain_ids(prompt), plain_ids(reply))


def only(*steps: Step) -> Sample:
    [sample] = sample_attempts([group(0, [*steps])], 0, 1.0, decode)
    return sample


def test_the_first_attempts_of_the_first_traced_group() -> None:
    groups = [group(n, *[[said("a", "b")]] * (MOST + 2)) for n in range(20)]
    traced = TracedGroups(5, 0.3).among(groups)
    assert 0 < traced.sum() < 20
    first = int(np.argmax(traced))
    names = [f"g{first:06d}.{n}" for n in range(MOST)]
    assert [sample.trajectory for sample in sample_attempts(groups, 5, 0.3, decode)] == names
    assert not sample_attempts([g for g, chosen in zip(groups, traced, strict=True) if not chosen], 5, 0.3, decode)
    assert not sample_attempts(groups, 0, 0.0, decode)


def test_each_step_adds_what_it_read_and_wrote() -> None:
    first, second = said("Q: 2+2?", " calls(2)"), said("Q: 2+2? calls(2) -> 4.", " 4!")
    assert only(first, second) == Sample("g000000.0", "t0", 0.5, "Q: 2+2?", " calls(2) -> 4. 4!")
    kept_back = replace(first, withheld=2)
    assert only(kept_back, second).completion == " calls(2)\n[not handed out: 2 tool calls]\n -> 4. 4!"
    rejected = replace(first, dropped=DropReason.REJECTED)
    assert "\n[rejected: its answer was not used]\n" in only(rejected, second).completion


def test_a_failed_attempt_says_why_and_one_without_steps_is_empty() -> None:
    failure = Failure(Cause.ENVIRONMENT, "no page")
    failed = Trajectory("g000000.0", "t0", 0, (), None, Status.FAILED, failure)
    [sample] = sample_attempts([make_group(0, failed)], 0, 1.0, decode)
    assert sample == Sample("g000000.0", "t0", None, "", "\n[environment: no page]")
    assert as_markdown([sample]).endswith("**g000000.0**: no reward\n\n    \n    [environment: no page]")


def test_texts_are_bounded_and_have_no_keys_or_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    long = only(said("Q" * 3 * LONGEST, f"{'a' * LONGEST}sk-0123456789{'z' * LONGEST}"))
    assert len(long.prompt) < LONGEST + 60 and f"[... {2 * LONGEST:,} characters left out ...]" in long.prompt
    assert long.completion.startswith("aaa") and long.completion.endswith("zzz")
    hidden = only(said("Use sk-0123456789", " ok \x1b[2J"))
    assert (hidden.prompt, hidden.completion) == ("Use [hidden]", " ok \\x1b[2J")
    cut = only(said("Q", f"{'a' * (LONGEST // 2 - 5)}sk-0123456789{'z' * LONGEST}"))
    assert "sk-0" not in cut.completion


def test_a_prompt_stands_once_and_no_text_can_leave_its_block_of_markdown() -> None:
    texts = [("a\n\n# b\n<script>", "c\n```"), ("a\n\n# b\n<script>", "d"), ("other", "e")]
    samples = [Sample(f"g0.{n}", "t0", n / 2, *pair) for n, pair in enumerate(texts)]
    lines = [line for line in as_markdown(samples).splitlines() if line]
    heads = [line for line in lines if not line.startswith("    ")]
    prompt = "Prompt of task t0:"
    assert heads == [prompt, "**g0.0**: reward 0", "**g0.1**: reward 0.5", prompt, "**g0.2**: reward 1"]
    assert lines.count("    # b") == 1 and lines[-1] == "    e"
