"""The data of `treadle report`: counted in the ledger, and token by token in the rollout shards."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from treadle.core.errors import DamageError, TreadleError
from treadle.core.types import role_of
from treadle.packing.breaks import Decode, Kind, Relation, relations
from treadle.packing.compactions import CompactionPrice, RecordedCall
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing, arrange
from treadle.record.record import Record
from treadle.rendering.texts import TokenTexts
from treadle.report.stalls import stalls

_EXAMPLES = 3  # per cause of breaks
Track = Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]]


def report_of(record: Record, track: Track = iter) -> dict[str, Any]:
    """Return all data of the report. track: shows the progress of reading. Raises TreadleError."""
    run, ledger = record.directory, record.ledger
    ledger.prove()
    config, log, latest = run.config_data(), run.metrics_log(), ledger.latest_checkpoint()
    try:
        decode, no_tokenizer = TokenTexts(record.tokenizer()).decode, None
    except TreadleError as error:
        decode, no_tokenizer = None, str(error)
    updates, state = [row for row in log.rows if row["kind"] == "update"], run.state()
    saved = latest[1].update if latest else 0
    return {
        "run": str(run.path),
        "recipe": config["recipe"],
        "seed": config["seed"],
        "state": state,
        "update": max([saved, *(row["update"] for row in updates)]),
        "updates": config["orchestration"]["updates"],
        "last_update": updates[-1] if updates else None,
        "splits": ledger.splits(),
        "steps": ledger.step_states(),
        "statuses": ledger.statuses(),
        "stop_reasons": ledger.stop_reasons(),
        "starts": ledger.starts(),
        "failures": _by_cause(ledger.failures()),
        "blocked": ledger.blocked(),
        "warnings": ledger.warnings(),
        "stalls": stalls(log.rows),
        **count_tokens(record, decode, no_tokenizer, track),
        "metrics_problem": log.problem(saved),
        "evaluations": [row for row in log.rows if row["kind"] == "evaluation"],
        "optimizer_steps": _by_model(row for row in log.rows if row["kind"] == "optim_step"),
        "table_by": config["data"]["table_by"],
        "checkpoints": sorted(n for n in ledger.checkpoint_names() if (run.checkpoints / n).is_dir()),
        "latest_checkpoint": latest[0] if latest else None,
    }


def _by_model(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the steps of each model of a Tinker server trained, in all, and their last figures."""
    models: dict[str, dict[str, Any]] = {}
    for row in rows:
        before = models.get(row["model"], {})
        sums = {name: before.get(name, 0) + row[name] for name in ("datums", "tokens", "targets", "attributed")}
        models[row["model"]] = {"model": row["model"], "steps": row["step"], **sums, "grad_norm": row["grad_norm"]}
    return list(models.values())


def _by_cause(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each cause once, with its most frequent message and an example trajectory."""
    causes: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: str(row["cause"])):
        first = causes.setdefault(row["cause"], {**row, "count": 0})
        first.pop("traceback", None)
        first["count"] += row["count"]
    return sorted(causes.values(), key=lambda row: -row["count"])


# --- token by token ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PackingCount:
    """Tokens that a forward pass computes for the same training steps, by scope of sharing."""

    groups: int = 0
    trajectories: int = 0
    step: int = 0
    chain: int = 0
    tree: int = 0  # within trajectories
    group_tree: int = 0

    def add_trajectory(self, calls: Sequence[PackedCall]) -> list[PackedCall]:
        """Count a trajectory's calls; return those that are no prefix of another one, which contain its whole tree."""
        tree = arrange(calls, Packing.TREE, Sharing.TRAJECTORY)
        self.trajectories += 1
        self.step += int(tree.lengths.sum())
        self.chain += arrange(calls, Packing.CHAIN).nodes
        self.tree += tree.nodes
        following = [*tree.shared[1:].tolist(), 0]
        return [call for call, shared in zip(tree.calls, following, strict=True) if shared < len(call.token_ids)]

    def add_group(self, ends: Sequence[PackedCall]) -> None:
        self.groups += bool(ends)
        self.group_tree += arrange(ends, Packing.TREE, Sharing.GROUP).nodes

    def facts(self) -> dict[str, Any]:
        """Return the counts, and each packing's saving factor over `step`."""
        ways = ("chain", "tree", "group_tree")
        return {**asdict(self), "ratios": {way: self.step / getattr(self, way) if self.step else None for way in ways}}


@dataclass(slots=True)
class RelationCount:
    """Relations of steps to the earlier ones of their trajectories, by split; breaks by cause."""

    kinds: dict[str, Counter[str]] = field(default_factory=dict)  # split -> kind -> steps
    extra_tokens: Counter[str] = field(default_factory=Counter)  # per split
    breaks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by cause

    def add(self, split: str, trajectory: str, steps: Mapping[int, Relation]) -> None:
        """Add a trajectory's played steps, by number."""
        self.kinds.setdefault(split, Counter()).update(relation.kind for relation in steps.values())
        for number, relation in steps.items():
            if relation.cause is not None:
                self.extra_tokens[split] += relation.extra_tokens
                row = self.breaks.setdefault(
                    relation.cause, {"cause": str(relation.cause), "count": 0, "extra_tokens": 0, "examples": []}
                )
                row["count"] += 1
                row["extra_tokens"] += relation.extra_tokens
                examples = [*row["examples"], {"trajectory_id": trajectory, "step": number, **asdict(relation)}]
                row["examples"] = sorted(examples, key=lambda example: -example["extra_tokens"])[:_EXAMPLES]

    def facts(self) -> dict[str, Any]:
        """Return counts by split, and breaks by cause, the costliest first, each with its costliest examples."""
        splits = [
            {"split": split, "steps": kinds.total(), **{str(kind): kinds[kind] for kind in Kind}}
            | {"extra_tokens": self.extra_tokens[split]}
            for split, kinds in sorted(self.kinds.items(), reverse=True)
        ]
        return {"splits": splits, "breaks": sorted(self.breaks.values(), key=lambda row: -row["extra_tokens"])}


def count_tokens(
    record: Record, decode: Decode | None, no_tokenizer: str | None, track: Track = iter
) -> dict[str, Any]:
    """Return the facts that require reading every token, group by group.

    Packing counts the training steps that were or will be trained, relations and compactions everything recorded;
    `by_version` has the first two for the groups trained by each policy version. decode: None if there is no tokenizer,
    for the reason `no_tokenizer`.
    """
    rows = record.ledger.trained_steps()
    packing, related = defaultdict[int | None, PackingCount](PackingCount), RelationCount()
    extra_tokens, prices = Counter[int | None](), defaultdict[str, CompactionPrice](CompactionPrice)
    shards, has_ids = _Shards(record, rows), not rows
    for _group, members in itertools.groupby(track(rows), lambda row: row["group_id"]):
        ends = defaultdict[str, list[PackedCall]](list)  # by role
        for row in members:
            calls = shards.take(row["shard"], row["trajectory_id"])
            version = row["trained_version"]
            has_ids |= bool(calls)
            if decode is not None and calls:
                each = relations([c.call for c in calls], decode, [c.cause for c in calls], [c.played for c in calls])
                prices[row["split"]].add(calls, each)
                steps = {c.number: relation for c, relation in zip(calls, each, strict=True) if c.played}
                related.add(row["split"], row["trajectory_id"], steps)
                extra_tokens[version] += sum(relation.extra_tokens for relation in steps.values())
            numbers = set(json.loads(row["trained"]))
            if trained := [step.call for step in calls if step.number in numbers]:
                ends[role_of(row["trajectory_id"])] += packing[version].add_trajectory(trained)
        for calls_of_role in ends.values():
            packing[version].add_group(calls_of_role)
    versions = sorted(version for version in packing if version is not None)
    totals = map(sum, zip(*map(astuple, packing.values()), strict=True))
    return {
        "packing": PackingCount(*totals).facts(),
        "relations": {**related.facts(), "no_tokenizer": no_tokenizer if has_ids else None},
        "compactions": [{"split": s, **asdict(p)} for s, p in sorted(prices.items(), reverse=True) if p.compactions],
        "by_version": [{"version": v, **asdict(packing[v]), "extra_tokens": extra_tokens[v]} for v in versions],
        "missing_shards": shards.missing,
        "damaged_shards": shards.damaged,
    }


class _Shards:
    """Calls of trajectories; `take` must be called in the order of `rows`.

    A shard contains attempts that finished together, and a group may span several: each is read once, and freed after
    its last use. missing, damaged: names of missing and damaged shards.
    """

    def __init__(self, record: Record, rows: Sequence[dict[str, Any]]) -> None:
        self._record = record
        self._untaken = Counter(row["shard"] for row in rows)
        self._read: dict[str, dict[str, list[RecordedCall]]] = {}
        self.missing: list[str] = []
        self.damaged: list[str] = []

    def take(self, shard: str, trajectory: str) -> list[RecordedCall]:
        """Return a trajectory's calls in order; empty if its shard is unreadable."""
        if shard not in self._read:
            try:
                self._read[shard] = self._record.calls(shard)
            except DamageError:
                self._read[shard] = {}
                (self.damaged if (self._record.directory.rollouts / shard).is_file() else self.missing).append(shard)
        self._untaken[shard] -= 1
        steps = self._read[shard].pop(trajectory, [])
        if not self._untaken[shard]:
            del self._read[shard]
        return steps
