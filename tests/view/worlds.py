"""A recorded run with all that a page can show: forks, breaks, failures, dropped and stale steps, hostile text."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.cli.worlds import TRAJECTORIES, ids
from tests.runs import recorded_run
from tests.worlds import END, PLAIN, chatml, make_group, make_step, plain_ids, tiny, tool, user
from treadle.core.errors import Cause
from treadle.core.outcomes import dropped_steps, leave_out, without_stale
from treadle.core.rewards import Reward
from treadle.core.trainer import StepTrace
from treadle.core.types import DropReason, Failure, Group, Message, Status, Step, Task, Trajectory
from treadle.record.ledger import Ledger, TrainedBatch
from treadle.record.ledger_reader import LoopState
from treadle.record.rollout_store import write_shard, write_traces
from treadle.record.run_directory import RunDirectory

UPDATES = 12
ESCAPES = "\x1b[31mred\x1b[0m"
TURNED = "abc\u202efed\u202c"
SCRIPT = '<script>document.title = "taken"</script><img src=x onerror="document.title=\'taken\'">'
LONG_LINE = "abc" * 333_334  # a megabyte
EMOJI = "🧵 naïve — 織機"


def attempt(group: int, number: int, steps: Sequence[Step], reward: float | None = 1.0) -> Trajectory:
    failure = None if reward is not None else Failure(Cause.ENVIRONMENT, f"step raised {SCRIPT}{LONG_LINE}", ESCAPES)
    status = Status.DONE if reward is not None else Status.FAILED
    return Trajectory(f"g{group:06d}.{number}", f"t{group}", number, tuple(steps), reward, status, failure, seconds=2.5)


def sampled(step: Step, seed: int) -> Step:
    """With log-probabilities of its own."""
    drawn = -np.random.default_rng(seed).exponential(0.6, len(step.completion_ids)).astype(np.float32)
    return replace(step, logprobs=drawn, seconds=0.2)


def turns(system: str, question: str, *replies: str) -> list[Step]:
    """A conversation that only appends, by the shipped tokenizer."""
    history = ids(chatml([Message(role="system", content=system), user(question)]))
    steps = []
    for number, reply in enumerate(replies):
        said = [*ids(reply), END]
        steps.append(sampled(make_step(history, said), number))
        history = [*history, *said, *ids("\n" + chatml([tool("page Acme, boss Zoe")]))]
    return steps


def parallel() -> list[Step]:
    """Calls of an agent that asks two helpers at once, each in a conversation of its own."""
    main = turns("Search, then answer.", "What city?", " page", " Rome")
    calls = [main[0], *turns("Is it a city?", "Rome", " Rome"), *turns("Is it a city?", "Oslo", " Oslo"), main[1]]
    return [replace(c, started=at, waited=0.05) for c, at in zip(calls, (900.0, 900.3, 900.4, 901.0), strict=True)]


def groups() -> list[Group]:
    broken = [attempt(0, n, [sampled(make_step(*call), i) for i, call in enumerate(calls)], float(n == 0))
              for n, calls in enumerate(TRAJECTORIES)]  # fmt: skip
    failed = attempt(0, 2, turns("Search, then answer.", "What city?", " page"), None)
    old = turns("Search, then answer.", "What boss?", " page", " Zoe")
    mixed = [replace(old[0], policy_versions=np.full(len(old[0].completion_ids), -0, np.int32)), old[1]]
    late = [
        replace(step, policy_versions=np.full(len(step.completion_ids), n, np.int32), started=800.0 + n)
        for n, step in enumerate(mixed)
    ]
    stale = make_group(1, attempt(1, 0, late, 1.0), attempt(1, 1, [late[1]], 0.0))
    asked = turns("Search, then answer.", "What lamp?", " page")
    same = make_group(2, *(attempt(2, n, asked, 0.0) for n in range(3)))
    *called, answered = parallel()
    graded = replace(answered, given=Reward({"answer": 0.5, "format": 0.25}))
    waiting = make_group(3, attempt(3, 0, [*called, graded], 0.75), attempt(3, 1, called[:1], 0.0))
    return [make_group(0, *broken, failed), stale, same, waiting]


def evaluated(update: int) -> list[Group]:
    made = []
    for position in range(3):
        steps = [replace(step, mask=np.zeros(len(step.completion_ids), np.bool_))
                 for step in turns("Search, then answer.", f"What is {position}?", " page", " Rome")]  # fmt: skip
        name = f"e{update:06d}-{position:04d}"
        own = Trajectory(f"{name}.0", f"h{position}", 0, tuple(steps), float(position < update), Status.DONE)
        made.append(
            replace(make_group(position, own, name=name), task=Task(f"h{position}", (user(f"What is {position}?"),)))
        )
    return made


def trace(group: Group, attempt: int, step: int, update: int) -> StepTrace:
    """What an update computed of a step."""
    trajectory = group.trajectories[attempt]
    tokens = np.arange(len(trajectory.steps[step].completion_ids), dtype=np.float32)
    names, values = (group.group_id, trajectory.trajectory_id), (-0.1 * (tokens + update), 0.5 + tokens)
    return StepTrace(update, *names, step, *values, 0.25 * (tokens + 1), 1 + 0.1 * tokens, tokens > 0)


def record_run(path: Path, *overrides: str, updates: int = UPDATES) -> Path:
    """Record a run as training does, without training: an update is committed, later ones are only logged."""
    run = RunDirectory.create(path, tiny(f"orchestration.updates={updates + 3}", *overrides))
    run.close()
    first, stale, same, waiting = groups()
    with closing(Ledger(run.ledger_file)) as ledger:
        ledger.note_files(run.written)
        for update in (0, 1):
            played = evaluated(update)
            ledger.record(played, "held_out", update, write_shard(run.rollouts, f"evaluation-e{update:06d}", played))
        for number, group in enumerate((first, stale, same, waiting)):
            ledger.record([group], "train", number // 3, write_shard(run.rollouts, f"train-{group.group_id}", [group]))
        advantages = {"g000000.0": 0.7, "g000000.1": -0.7, "g000001.0": 0.5, "g000001.1": -0.5}
        ledger.note_trained(0, [first.group_id, stale.group_id], advantages)
        ledger.note_dropped(leave_out(same, DropReason.FILTERED))
        taken = [first, without_stale(stale, 1)]
        traces = write_traces(run.traces, 0, [trace(stale, 0, 1, update) for update in (1, 2)])
        batch = TrainedBatch(tuple(dropped_steps(taken)), traces)
        ledger.commit_checkpoint("step-000001", LoopState(update=1, version=1, cursor=3), [batch])
    for update in range(updates + 1):
        log_update(run, update)
    return path


def log_update(run: RunDirectory, update: int) -> None:
    """Log one more update, and an evaluation at every sixth."""
    began = 6.0 * (update - 1)
    evaluated = [("evaluation", 5.2, 0.5)] if update % 6 == 0 else []
    if update == 0:
        run.log_interval({"update": 0, "phase": "warm start", "started": 4940, "seconds": 50.0})
    for phase, after, seconds in (("rollout", 0.0, 3.0), ("update", 3.0, 2.0), ("publish", 5.0, 0.1), *evaluated):
        if update:
            started = 5000 + began + after
            run.log_interval({"update": update, "phase": phase, "started": started, "seconds": seconds})
    if update:
        share = 1 - np.exp(-update / 5)
        run.log({
            "kind": "update", "update": update, "version": update - 1, "reward_mean": share, "success": share,
            "entropy": 2.0 / update, "steps_mean": 2.0, "completion_tokens_mean": 20.0 + update, "clip_fraction": 0.01,
            "logprob_gap_mean": 1e-6, "logprob_gap_lag_1": 2e-6, "staleness_mean": 0.5, "dropped_stale": 1.0,
            "packed_tokens": 900, "trainable_tokens": 300, "gradient_norm": 1.0, "learning_rate": 1e-3, "failed": 1,
            "seconds_rollout": 3.0, "seconds_update": 2.0, "seconds_publish": 0.1, "wall_seconds": 6.0 * update,
            "zero_advantage_groups": 0.25, "engine_share": 0.75, "env/pages": 1.5, "odd": 0.1 * update,
        })  # fmt: skip
    if update % 6 == 0:
        run.log({
            "kind": "evaluation", "update": update, "temperature": 1.0, "tasks": 3, "failed": 0, "attempts": 1,
            "success": update / 15, "reward_mean": update / 15, "steps_mean": 2.0, "by": {}, "by_tasks": {},
            "metrics": {}, "pass_at": {},
        })  # fmt: skip


def record_calls(path: Path, tokenizer: Path) -> Path:
    """Record a group of two attempts whose calls of a tool differ in the last digit of a number, a token of its own."""
    PLAIN.save_pretrained(str(tokenizer))
    prompt, rows = plain_ids(chatml([user("How many?")])), [f"row {n}" for n in range(300)]
    calls = [json.dumps({"sum": number, "rows": rows}) for number in (478, 471)]
    replies = [f"<think>Count.</think><tool_call>{call}</tool_call>" for call in calls]
    played = [attempt(0, n, [make_step(prompt, [*plain_ids(r), END])]) for n, r in enumerate(replies)]
    return recorded_run(path, tiny(f"model.tokenizer={tokenizer}"), *played).path


def record_hostile(path: Path, tokenizer: Path) -> Path:
    """Record a run in which everything that was written tries to take the page over."""
    PLAIN.save_pretrained(str(tokenizer))
    prompt = plain_ids(chatml([user(f"{SCRIPT} {ESCAPES} {TURNED}")]))
    reply = f"<think>{EMOJI}</think>{SCRIPT}<tool_call>{TURNED}</tool_call><|im_start|"
    texts = (reply, ESCAPES + "\x00\x08", LONG_LINE[:100_000])
    steps = [make_step(prompt, [*plain_ids(text), 5 + 0xE2, END]) for text in texts]  # 0xE2: half a character
    task = Task(f"../../{SCRIPT}{TURNED}", (user(f"{SCRIPT}{TURNED}{LONG_LINE}"),), extras={"evil": ESCAPES})
    played = (attempt(0, 0, steps), attempt(0, 1, steps[:1], None))
    run = recorded_run(path, tiny(f"model.tokenizer={tokenizer}"), *played, task=task)
    row = {"kind": "update", "update": 1, "version": 0, "reward_mean": float("nan"), f"env/{SCRIPT}": 1.0}
    run.log({**row, "odd\ud800": 2.0})
    return path
