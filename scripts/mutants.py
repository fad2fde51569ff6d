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

MUTANTS = [  # file, text, what takes its place, the quick tests of a file, or one test
    ("algorithms/advantages.py", ".std(ddof=1)", ".std()", "algorithms/test_advantages.py"),
    ("algorithms/advantages.py", "* len(members) / (len(members) - 1)", "", "algorithms/test_advantages.py"),
    ("algorithms/losses.py", ".minimum(ratio.clamp(1 - eps_low,", ".minimum(ratio.clamp(1 - eps_high,",
     "algorithms/test_losses.py"),
    ("models/multimodal.py", "if name not in taken}", "}", "training/test_towers.py"),
    ("models/weights.py", "name if rest is None else rest.names[name]", "name", "training/test_towers.py"),
    ("models/weights.py", "if rest is None or adapter_weights(model) else", "if rest is None else",
     "training/test_towers.py"),
    ("models/lora.py", 'settings["exclude_modules"] = _excluded(model)', "pass", "training/test_towers.py"),
    ("training/checkpoint.py", "{**saved(model), **rest}\n        return", "saved(model)\n        return",
     "training/test_towers.py"),
    ("training/checkpoint.py", "if not _same_bits(tensor, there[name])]", "if False]", "training/test_towers.py"),
    ("envs/sql/child.py", 'allowed = (first or "").lower() in _PRAGMAS', "allowed = True", "envs/test_sql_sandbox.py"),
    ("envs/sql/child.py", "resource.RLIMIT_AS: address_space,", "", "envs/test_sql_sandbox.py"),
    ("envs/sql/child.py", "len(met) == len(expected)", "bool(met)", "envs/test_sql_sandbox.py"),
    ("integrations/skyrl_gym/environment.py", "\nguard_tools()", "", "integrations/test_skyrl_gym.py"),
    ("integrations/skyrl_gym/environment.py", "g(BaseException)", "g(Exception)", "integrations/test_skyrl_gym.py"),
    ("integrations/skyrl_gym/environment.py", "getattr(self._played, \"get_metrics\", dict)()", "{}",
     "integrations/test_skyrl_gym.py"),
    ("integrations/worker_driver.py", "if not isinstance(session.last_error, StepsExceeded | ContextExceeded):",
     "if True:", "integrations/test_verifiers.py::test_a_limit_on_calls_ends_an_attempt_with_the_reward_so_far"),
    ("integrations/verifiers/child/treadle_verifiers.py", "if listed[\"digest\"] != payload[\"digest\"]:", "if False:",
     "integrations/test_verifiers.py"),
    ("integrations/openenv/child/treadle_openenv.py", "if not is_full and not", "if not",
     "integrations/test_openenv.py::test_the_template_of_openenv_init_with_more_attempts_than_sessions"),
    ("integrations/reasoning_gym/datasets.py", "(_SPLIT_SEEDS if", "(1 if", "integrations/test_reasoning_gym.py"),
    ("envs/sql/environment.py", '"<observation></observation>".join', '"".join', "envs/test_text_to_sql.py"),
    ("plan/inputs.py", "if player is not None and tasks and player not in (others := players(tasks)):",
     "if False and player not in (others := players(tasks)):", "api/test_api.py"),
    ("api/public.py", "    player = _player(environment)\n    given = {",
     "    player = _player(\"lookup\")\n    given = {", "test_docs_code.py"),
    ("core/outcomes.py", "step.dropped not in NOT_PLAYED", "step.dropped is None", "core/test_outcomes.py"),
    ("core/outcomes.py", "< oldest).any()", "< oldest).all()", "loop/test_groups.py"),
    ("core/outcomes.py", "dropped=t.dropped or reason", "dropped=reason", "core/test_outcomes.py"),
    ("core/draws.py", "(epoch, task, attempt, step)", "(epoch, task, step, attempt)", "core/test_draws.py"),
    (
        "loop/groups.py",
        "(tracked.version, tracked.group.index)",
        "tracked.group.index",
        "loop/test_groups.py",
    ),
    (
        "loop/groups.py",
        'self._stale_policy == "drop_group" or not',
        "not",
        "loop/test_groups.py",
    ),
    (
        "record/resume.py",
        "last <= newest",
        "True",
        "record/test_damage.py",
    ),
    ("record/ledger.py", "AND name NOT IN (SELECT value", "AND name IN (SELECT value",
     "record/test_rollout_store.py"),
    ("training/attention/tiles.py", "if sinks is not None:\n            total", "if False:\n            total",
     "training/attention/test_tiles.py"),
    ("training/attention/tiles.py", "return -((sinks", "return ((sinks", "training/attention/test_tiles.py"),
    ("training/attention/capped.py", "* block.slope *", "*", "training/attention/test_tiles.py"),
    ("training/attention/capped.py", ".clamp_min(torch.finfo(lse.dtype).min)", "", "training/attention/test_tiles.py"),
    ("training/attention/capped.py", ".triu_(first + 1)", ".triu_(1)", "training/attention/test_tiles.py"),
    ("training/attention/flex.py", "torch.sigmoid(statistics.lse - sinks[:, None])",
     "torch.sigmoid(statistics.lse.detach() - sinks[:, None])", "training/attention/test_flex.py"),
    ("training/attention/flex.py", "None if softcap is None else _capped(softcap, query)", "None",
     "training/attention/test_flex.py"),
    ("training/attention/select.py", "flash and plain and few", "flash and few", "training/attention/test_kernels.py"),
    ("models/attention.py", "if sinks is not None:", "if False:",
     "engines/test_torch_engine.py::test_recorded_logprobs_are_the_learners[gpt-oss-half-sliding]"),
    ("models/attention.py", "if softcap is not None:", "if False:",
     "engines/test_torch_engine.py::test_recorded_logprobs_are_the_learners[gemma2-half-sliding]"),
    ("training/objective.py", "step=number[step]", "step=step", "training/test_traces.py"),
    ("algorithms/losses.py", "clipped=_dppo_clipped, ratio=_ratio_to_rollout",
     "clipped=_dppo_clipped, ratio=_ratio_to_old", "training/test_traces.py"),
    ("training/sharding.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)",
     "training/ranks/test_parity.py"),
    ("training/sharding.py", "dist.broadcast(buffer, src=0)", "pass",
     "training/ranks/test_parity.py::test_the_gradient_of_every_family_is_that_of_one_process[deepseek-latent]"),
    ("packing/layout.py", "passes = max(needed", "passes = min(needed", "packing/test_layout.py"),
    ("loop/loop.py", "self.scheduler.groups.trained()", "pass", "loop/test_loop.py"),
    ("loop/loop.py", "weight_sync.publish(before.version + 1)",
     "weight_sync.publish(before.version)", "loop/test_loop.py"),
    ("rollout/drivers/outcome.py", "ContextExceeded() if not answered", "ContextExceeded()",
     "rollout/test_drivers.py"),
    ("rollout/gateway/serving.py", "attached.bytes_in_flight -= size", "pass", "rollout/gateway/test_limits.py"),
    ("rollout/gateway/serving.py", "if size > gateway.max_body:", "if False:", "rollout/gateway/test_fuzz.py"),
    ("core/files.py", "if digest != self.sha256[name]:", "if False:", "core/test_files.py"),
    ("api/get_model.py", "if sha256 != model.sha256:", "if False:", "api/test_get_model.py"),
    ("api/get_model.py", '"--no-deps", ', "", "api/test_get_model.py"),
    ("api/get_model.py", "manifest.prove(manifest.sha256)", "pass", "api/test_get_model.py"),
    ("models/gguf.py", "individual_digits=True", "individual_digits=False", "api/test_get_model.py"),
    ("models/hub.py", "return download(name, setting, weights) if _missing(cached, weights) else cached",
     "return download(name, setting, weights)", "training/test_model.py"),
    ("packing/tree.py", "if call.keys is not None:", "if False:", "packing/test_tree.py"),
    ("rollout/gateway/retries.py", "if exchange.origin.body != origin.body:", "if False:",
     "rollout/gateway/test_retries.py"),
    ("rollout/session.py", "if self._steps[number].dropped is None:", "if True:", "rollout/gateway/test_answers.py"),
    ("rollout/gateway/answers.py", "last >= a.later", "True", "rollout/gateway/test_answers.py"),
    ("rollout/gateway/answers.py", "a.place not in self._continued", "True", "rollout/gateway/test_answers.py"),
    ("rollout/gateway/retries.py", "e.retry < origin.retry", "True", "rollout/gateway/test_retries.py"),
    ("envs/search/environment.py", "_OBSERVED.join(replies)", '"".join(replies)', "envs/test_search.py"),
    ("envs/search/environment.py", "answers[-1]", "answers[0]", "envs/test_search.py"),
    ("envs/search/environment.py", "or len(self._replies) >= self._last_turn", "", "envs/test_search.py"),
    ("retrieval/corpus.py", "np.flatnonzero(scores > 0)", "np.arange(len(scores))", "retrieval/test_index.py"),
    ("retrieval/corpus.py", "scores[matches] >= least", "scores[matches] > least", "retrieval/test_index.py"),
    ("retrieval/client.py", "max(pause, least)", "pause", "retrieval/test_client.py"),
    ("retrieval/server.py", "if not one.answer.done()]", "]", "retrieval/test_server.py"),
    ("retrieval/flat.py", "hidden.masked_fill(mask == 0, 0.0)", "hidden", "retrieval/test_flat.py"),
    ("core/outcomes.py", "return step.dropped or attempt_drop_reason(trajectory)",
     "return attempt_drop_reason(trajectory) or step.dropped", "core/test_outcomes.py"),
    ("core/rewards.py", "weights.get(name, 1.0) * value", "value", "core/test_rewards.py"),
    ("core/draws.py", "dtype=np.uint64), epoch, source, 0)", "dtype=np.uint64), epoch, 0, 0)",
     "data/test_mixture.py::test_sources_of_one_size_have_shuffles_of_their_own"),
    ("core/text.py", "\\u2066-\\u2069", "", "core/test_text.py"),
    ("core/types.py", "np.full(length, self.sampling.temperature > 0)", "np.full(length, True)", "core/test_types.py"),
    ("envs/gsm8k.py", "FORMAT_SHARE / self.max_turns", "FORMAT_SHARE", "envs/test_gsm8k.py"),
    ("envs/arithmetic.py", "_ANSWER.fullmatch(text)", "_ANSWER.search(text)", "envs/test_small_worlds.py"),
    ("rollout/session.py", "if text.startswith(decoded):", "if True:", "rollout/test_session.py"),
    ("rendering/splices.py", " and text[start:end] != wanted", " and False", "rollout/test_conversation.py"),
    ("rollout/rewards.py", "enumerate(trajectory.steps) if was_played(step)), default=None)",
     "enumerate(trajectory.steps)), default=None)", "rollout/test_rewards.py"),
    ("rollout/session.py", "a.position, a.attempt, number)", "a.position, a.attempt, 0)", "rollout/test_session.py"),
    ("rollout/drivers/environment.py", "else [math.fsum(values)]", "else values", "rollout/test_finish.py"),
    ("rollout/config.py", '.removesuffix("/v1")', "", "rollout/gateway/test_limits.py"),
    ("rollout/gateway/request.py", "self.seed % 2**63", "abs(self.seed)",
     "rollout/gateway/test_clients.py::test_what_clients_write_of_sampling_is_brought_within_its_bounds"),
    ("core/outcomes.py", "rewards[-1] += whole - math.fsum(rewards)", "pass", "packing/test_flat.py"),
    ("packing/tree.py", "path[call.prompt_length - 1 : length - 1]", "path[call.prompt_length : length]",
     "packing/test_tree.py"),
    ("packing/flat.py", "(versions == step.policy_versions[0]).all()", "(versions == step.policy_versions[0]).any()",
     "packing/test_flat.py"),
    ("packing/layout.py", "context = keys[tree.subtree_end[keys] > end]",
     "context = keys[tree.subtree_end[keys] > end + 1]", "packing/test_layout.py"),
    ("packing/checks.py", "length > context", "length >= context", "packing/test_flat.py"),
    ("algorithms/advantages.py", "(0.0 if last else gamma * running)", "gamma * running",
     "algorithms/test_advantages.py"),
    ("algorithms/corrections.py", "reduction(mask & keep)", "reduction(keep)", "algorithms/test_corrections.py"),
    ("algorithms/reductions.py", "max(int((count > 0).sum()), 1)", "max(len(count), 1)",
     "algorithms/test_corrections.py"),
    ("algorithms/kl.py", "kl / self.target - 1", "1 - kl / self.target",
     "algorithms/test_corrections.py::test_an_adaptive_coefficient_goes_by_the_clipped_relative_error"),
    ("algorithms/estimators.py", "numbers.setdefault(key, len(numbers))",
     "numbers.setdefault((0, key[1]), len(numbers))",
     "algorithms/test_advantages.py::test_states_are_equal_states_within_a_group"),
    ("training/sft.py", "-1 / tokens))", "-1 / len(scores.logp)))",
     "training/test_sft.py::test_no_micro_batches_change_what_is_learned"),
    ("training/objective.py", "torch.where(tokens.mask, logp, now)", "logp",
     "training/test_algorithms.py::test_an_untrained_token_may_be_as_improbable_as_it_likes"),
    ("training/lm_head.py", " / temperature[:, None]", "",
     "training/test_families.py::test_a_tree_with_forks_trains_as_each_step_alone"),
    ("training/scorer.py", "None if call.support is None else call.support.take(part.flat)", "None",
     "training/test_support.py"),
    ("training/lm_head.py", "logits = logits.masked_fill(_outside(support, logits), -torch.inf)", "pass",
     "training/test_support.py"),
    ("training/lm_head.py", "padded = logits.new_full((len(counts), int(counts.max())), -torch.inf)",
     "padded = logits.new_full((len(counts), int(counts.max())), 0.0)", "training/test_support.py"),
    ("rollout/session.py", "support=completion.support", "support=None",
     "loop/test_loop.py::test_with_filters_ratios_compare_one_distribution"),
    ("training/optimizer.py", "(update + 1) / config.warmup", "update / config.warmup",
     "training/test_learner.py::test_the_learning_rates_course"),
    ("training/frozen.py", "updates % self._reset_every == 0", "updates % self._reset_every == 1",
     "training/test_learner.py::test_it_may_become_the_policy_from_time_to_time"),
    ("training/learner.py", "lag = self.version - batch.version", "lag = self.updates_done - batch.version",
     "training/test_learner.py::test_between_sampling_and_training_versions_count_not_updates"),
    ("engines/sampling.py", "rank - 1)", "rank - 2)", "engines/test_sampling.py"),
    ("engines/torch/batch.py", "row.starts.append((version, len(row.tokens)))",
     "row.starts.append((version, len(row.tokens) + 1))", "engines/test_continuous.py::"
     "test_calls_in_flight_go_on_with_new_weights_over_their_cache"),
    ("engines/torch/batch.py", " - (waits and number not in entering)", "",
     "engines/test_continuous.py::test_a_call_gives_what_it_gives_alone"),
    ("engines/torch/kv_cache.py", "sequence.exact &= keep_busy", "pass",
     "engines/test_continuous.py::test_calls_in_flight_go_on_with_new_weights_over_their_cache"),
    ("engines/torch/kv_cache.py", "deepcopy(other.pasts[source])", "other.pasts[source]",
     "engines/test_floor.py::test_it_says_why_once_and_reports_what_the_learner_computes"),
    ("engines/torch/floor.py", "len(ids) - len(fed)", "0",
     "engines/test_floor.py::test_a_cache_that_computes_otherwise_is_not_used"),
    ("engines/torch/kv_cache.py", "sequences[sequence.session, sequence.salt]", "sequences[sequence.session, None]",
     "engines/test_continuous.py::test_salts_share_nothing"),
    ("engines/remote.py", "key=lambda item: order[item[1].session]", "key=lambda item: item[0]",
     "engines/test_engine_process.py::test_waves_have_the_same_bits_in_either_process"),
    ("engines/remote.py", "for number in (*answers, *wave)", "for number in wave",
     "engines/test_engine_process.py::test_waves_have_the_same_bits_in_either_process"),
    ("engines/remote.py", "if not gap <= self._tolerance", "if False",
     "engines/test_remote.py::test_a_process_that_scores_otherwise_does_not_serve"),
    ("models/routing.py", "self.wanted < 0", "self.wanted <= 0",
     "training/test_routing.py::test_even_if_its_own_routers_would_choose_others"),
    ("models/tensor_file.py", "file.seek(8 + len(text) + start)", "pass",
     "training/test_checkpoint.py::test_tensors_of_several_types_may_come_in_any_order"),
    ("models/weights.py", "{name} {tensor.dtype} {tuple(tensor.shape)}", "{tensor.dtype} {tuple(tensor.shape)}",
     "engines/test_staging.py"),
    ("data/tasks.py", "* size // 100 if", "* size // 100 + 1 if", "data/test_load.py::test_parts_of_a_file"),
    ("data/table.py", "number - self._part_starts[part]", "number",
     "data/test_parquet.py::test_a_directory_is_one_data_set_or_several_splits"),
    ("retrieval/corpus.py", " + offset)", ")", "retrieval/test_index.py::test_a_row_across_two_blocks"),
    ("retrieval/index.py", ", path.stat().st_mtime_ns)", ")",
     "retrieval/test_index.py::test_another_corpus_of_the_same_size_has_an_index_of_its_own"),
    ("integrations/harbor/outcomes.py", "if report.reward_valid is False:", "if False:",
     "integrations/harbor/test_outcomes.py::test_every_row_of_the_table"),
    ("integrations/harbor/tasks.py", 'or ".." in name.parts ', "",
     "integrations/harbor/test_tasks.py::test_what_would_write_elsewhere_writes_nothing"),
    ("integrations/reasoning_gym/environment.py", " and _BLOCK.search(text, match.end()) is None", "",
     "integrations/test_reasoning_gym.py::test_the_format_of_a_reply"),
    ("loop/config.py", "update % (every or 1) < self.batch",
     "update % (every or 1) == 0", "record/test_checkpoint_retention.py::"
     "test_evaluations_are_due_after_a_batch_that_steps_over_a_multiple_and_at_both_ends"),
    ("loop/task_queue.py", "position = self._starts[source] + place", "position = place",
     "data/test_mixture.py::test_every_task_comes_up_within_the_longest_wait"),
    ("loop/task_queue.py", 'f"r{times}" if times', 'f"r{times}" if times > 1',
     "loop/test_rollout_scheduler.py::"
     "test_a_group_that_is_sampled_again_comes_first_and_has_a_name_of_its_own"),
    ("loop/stopping.py", "window.discarded.total() <= (limit - 1) * batch", "False",
     "loop/test_groups.py"),
    ("loop/failures.py", "t.failure.cause in _BLAMELESS", "False",
     "loop/test_groups.py"),
    ("record/rollout_store.py", '"reward": pa.float64(),', '"reward": pa.float32(),',
     "record/test_rollout_store.py"),
    ("record/ledger_reader.py", 'if any(sha256_of(row["tokens"]) != row["sha256"] for row in rows):', "if False:",
     "record/test_open_calls.py::test_tokens_that_are_in_no_shard_yet_are_compared"),
    ("record/ledger_reader.py", "(idx >= ? OR", "(idx > ? OR",
     "record/test_ledger.py::test_states_of_a_batch_from_recording_to_checkpoint"),
    ("record/recording.py", "first if attempt.ident in self._open else 0", "first",
     "record/test_recording.py::test_a_server_goes_on_with_a_run_and_shards_lose_nothing"),
    ("record/ledger_reader.py", "(SELECT max(rowid) FROM groups h", "(SELECT min(rowid) FROM groups h",
     "record/test_damage.py"),
    ("record/resume.py", "oldest <= first", "oldest < first",
     "record/test_damage.py"),
    ("record/resume.py", "or not pinned", "or True", "record/test_damage.py"),
    ("loop/rollout_scheduler.py", "                if not self._synchronous:", "                if True:",
     "loop/test_rollout_scheduler.py"),
    ("loop/rollout_scheduler.py", "asyncio.sleep(max(pause", "asyncio.sleep(min(pause",
     "loop/test_rollout_scheduler.py"),
    ("loop/rollout_scheduler.py", "self._plan.pinned is not None", "False",
     "api/test_lora.py::test_an_attempt_of_two_versions_is_recorded_as_failed_and_never_trained"),
    ("rollout/session.py", "or versions <= earlier", "or versions", "rollout/test_replay.py"),
    ("engines/torch/pinned.py", "if version in self._engines:", "if False:", "engines/test_pinned.py"),
    ("record/checkpoint_retention.py", '-row["update"])', 'row["update"])',
     "record/test_checkpoint_retention.py::"
     "test_the_best_is_the_earliest_of_equals_at_the_evaluations_temperature"),
    ("report/metrics.py", "step.policy_versions[step.mask] for t", "step.policy_versions for t",
     "report/test_metrics.py::test_staleness_is_of_trajectories_and_of_trainable_tokens"),
    ("report/curve.py", "i - half) : i + half + 1]", "i - half) : i + half]",
     "report/test_curve.py::test_a_longer_run_has_both"),
    ("plan/validation.py", "fnmatchcase(path, changeable)", "fnmatchcase(path[:1], changeable[:1])",
     "plan/test_config_diff.py::test_what_may_not"),
    ("view/texts.py", "if calls[n].prompt_length <= depth", "if calls[n].prompt_length < depth",
     "view/test_texts.py::test_the_example"),
    ("rendering/texts.py", "if mark.start() not in is_mark:", "if False:", "view/test_texts.py"),
    ("cli/console.py", "self.rich.add_row(*(_styled(escape_line, [cell])", "self.rich.add_row(*(_styled(str, [cell])",
     "cli/test_main.py::test_what_is_shown_cannot_steer_a_terminal_in_tables_and_in_json_either"),
    ("testing/fakes.py", "0.0 if certain else self.logprob", "self.logprob", "engines/test_probe.py"),
    ("testing/virtual_time.py", "if self._busy:", "if False:",
     "loop/test_pace.py::test_time_stands_still_while_a_thread_computes"),
    ("placement/reserve.py", "fits[0][name] -= amount", "pass",
     "placement/test_reserve.py::test_the_first_shortage_is_named"),
    ("placement/reserve.py", "place.gpus < gpus", "place.gpus < gpus - 1",
     "placement/test_checks.py::test_each_problem_is_one_line"),
    ("placement/turns.py", "while self._whose != side and self._calls:", "while False:",
     "placement/test_turns.py::test_a_turn_waits_for_the_calls_of_the_other_side"),
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
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        if "::" not in tests:
            command += ["-m", "not slow"]
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
