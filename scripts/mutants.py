"""Tests that cannot fail prove nothing: each of these changes to the code must make the tests named beside it fail.

    python scripts/mutants.py            # all of them, some minutes
    python scripts/mutants.py stale      # those whose file or text contains a word

A change is applied to a copy of `src`, which the tests then import in place of the installed package. Exit status 1:
one survived, or its text is no longer in the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/treadle")

MUTANTS = [  # file, text, what takes its place, the tests
    ("algorithms/advantages.py", "own.std(ddof=1)", "own.std()", "algorithms/test_advantages.py"),
    ("algorithms/advantages.py", "* len(own) / (len(own) - 1)", "", "algorithms/test_advantages.py"),
    ("algorithms/losses.py", "1 - eps_low", "1 - eps_high", "algorithms/test_losses.py"),
    ("envs/sql/child.py", 'allowed = (first or "").lower() in _PRAGMAS', "allowed = True", "envs/test_sql_sandbox.py"),
    ("envs/sql/child.py", "resource.RLIMIT_AS: address_space,", "", "envs/test_sql_sandbox.py"),
    ("envs/sql/child.py", "len(met) == len(expected)", "bool(met)", "envs/test_sql_sandbox.py"),
    ("envs/sql/sandbox.py", "_GRACE = 0.15", "_GRACE = 1.5", "envs/test_sql_sandbox.py"),
    ("integrations/skyrl_gym/environment.py", "\nguard_tools()", "", "integrations/test_skyrl_gym.py"),
    ("integrations/skyrl_gym/tools.py", "g(BaseException)", "g(Exception)", "integrations/test_skyrl_gym.py"),
    ("integrations/skyrl_gym/environment.py", "getattr(self._played, \"get_metrics\", dict)()", "{}",
     "integrations/test_skyrl_gym.py"),
    ("integrations/worker/driver.py", "if not isinstance(session.last_error, StepsExceeded | ContextExceeded):",
     "if True:", "integrations/test_verifiers.py"),
    ("integrations/verifiers/child/treadle_verifiers.py", "if found[\"digest\"] != payload[\"digest\"]:", "if False:",
     "integrations/test_verifiers.py"),
    ("integrations/openenv/child/treadle_openenv.py", "if not is_full and not", "if not",
     "integrations/test_openenv.py"),
    ("integrations/reasoning_gym/datasets.py", "(_SPLIT_SEEDS if", "(1 if", "integrations/test_reasoning_gym.py"),
    ("envs/sql/environment.py", '"<observation></observation>".join', '"".join', "envs/test_text_to_sql.py"),
    ("core/outcomes.py", "step.dropped not in NOT_PLAYED", "step.dropped is None", "core/test_outcomes.py"),
    ("core/outcomes.py", "< oldest).any()", "< oldest).all()", "orchestration/test_replay_buffer.py"),
    ("core/outcomes.py", "dropped=t.dropped or reason", "dropped=reason", "core/test_outcomes.py"),
    ("core/draws.py", "(epoch, task, attempt, step)", "(epoch, task, step, attempt)", "core/test_draws.py"),
    (
        "orchestration/sampling/replay_buffer.py",
        "(self._ready[index][0], index)",
        "index",
        "orchestration/test_replay_buffer.py",
    ),
    (
        "orchestration/sampling/replay_buffer.py",
        'self._stale_policy == "drop_group" or not',
        "not",
        "orchestration/test_replay_buffer.py",
    ),
    (
        "orchestration/store/resume.py",
        'row["newest_version"] <= newest',
        "True",
        "orchestration/test_restore.py",
    ),
    ("orchestration/store/ledger.py", "AND name NOT IN ({trained})", "AND 0", "orchestration/test_trace_store.py"),
    ("training/traces.py", "step=number[step]", "step=step", "training/test_traces.py"),
    ("algorithms/losses.py", "ratio=_to_rollout", "ratio=_to_old", "training/test_traces.py"),
    ("rendering/spans.py", " or text.find(wanted, start + 1, end) >= 0", "", "rollout/test_spans.py"),
    ("training/sharding.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)",
     "training/ranks/test_parity.py"),
    ("training/sharding.py", "dist.broadcast(buffer, src=0)", "pass", "training/ranks/test_parity.py"),
    ("packing/slots.py", "passes = max(needed", "passes = min(needed", "packing/test_slots.py"),
    ("orchestration/loop/loop.py", "self.scheduler.trained()", "pass", "orchestration/test_loop.py"),
    ("orchestration/loop/loop.py", "weight_sync.publish(before.version + 1)",
     "weight_sync.publish(before.version)", "orchestration/test_loop.py"),
    ("rollout/drivers/outcome.py", "ContextExceeded() if not answered", "ContextExceeded()",
     "rollout/test_driver_outcomes.py"),
    ("rollout/gateway/memory_limit.py", "if not self._queue and size", "if size", "rollout/gateway/test_limits.py"),
    ("rollout/gateway/app.py", "if size > limit:", "if False:", "rollout/gateway/test_fuzz.py"),
    ("core/manifest.py", "if found != self.sha256[name]:", "if False:", "core/test_manifest.py"),
    ("orchestration/get_model.py", "if found != model.sha256:", "if False:", "orchestration/test_get_model.py"),
    ("orchestration/get_model.py", '"--no-deps", ', "", "orchestration/test_get_model.py"),
    ("orchestration/get_model.py", "manifest.prove(manifest.sha256)", "pass", "orchestration/test_get_model.py"),
    ("models/gguf.py", "individual_digits=True", "individual_digits=False", "orchestration/test_get_model.py"),
    ("models/hub.py", "return _snapshot(name, weights, local_files_only=True)",
     "return download(name, setting, weights)", "training/test_hub.py"),
    ("packing/tree.py", "if call.keys is not None:", "if False:", "packing/test_tree.py"),
    ("rollout/gateway/retries.py", "if found.origin.body != origin.body:", "if False:",
     "rollout/gateway/test_retries.py"),
    ("rollout/gateway/retries.py", "e.retry < origin.retry", "True", "rollout/gateway/test_retries.py"),
    ("envs/search/protocol.py", "_OBSERVED.join(replies)", '"".join(replies)', "envs/test_search.py"),
    ("envs/search/protocol.py", "answers[-1]", "answers[0]", "envs/test_search.py"),
    ("envs/search/environment.py", "or len(self._replies) >= self._last_turn", "", "envs/test_search.py"),
    ("retrieval/retriever.py", "np.flatnonzero(scores > 0)", "np.arange(len(scores))", "retrieval/test_bm25.py"),
    ("retrieval/retriever.py", "scores[found] >= least", "scores[found] > least", "retrieval/test_bm25.py"),
    ("retrieval/client.py", "max(pause, least)", "pause", "retrieval/test_client.py"),
    ("retrieval/queue.py", "if not one.answer.done()]", "]", "retrieval/test_server.py"),
    ("retrieval/flat.py", "hidden.masked_fill(mask == 0, 0.0)", "hidden", "retrieval/test_flat.py"),
]  # fmt: skip


def survives(file: str, before: str, after: str, tests: str) -> str:
    """Return why this mutant lives on, in words, or an empty string if the tests fail for it."""
    with tempfile.TemporaryDirectory(prefix="treadle-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "treadle" / file
        text = path.read_text(encoding="utf-8")
        if before not in text:
            return "its text is not in the file"
        path.write_text(text.replace(before, after), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, str(ROOT / "tests" / tests)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
        )
    if done.returncode == 1:
        return ""
    return "no test fails" if done.returncode == 0 else f"pytest exits with {done.returncode}: {done.stdout[-500:]}"


def main() -> int:
    """Run the chosen mutants; return the exit status."""
    words, alive = sys.argv[1:], 0
    for mutant in MUTANTS:
        if words and not any(word in part for word in words for part in mutant[:2]):
            continue
        why = survives(*mutant)
        alive += bool(why)
        print(f"{'LIVES' if why else 'dies '}  {mutant[0]}: {mutant[1]!r} -> {mutant[2]!r}  {why}", flush=True)
    print(f"{alive} live")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
