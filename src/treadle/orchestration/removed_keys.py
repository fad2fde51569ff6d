"""Keys of a configuration that are gone, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from treadle.core.errors import Cause

REMOVED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "orchestration.late": "set orchestration.stale_policy",
        "orchestration.max_sampled": "set failures.max_sampled",
        "orchestration.max_failed_fraction": "set failures.max_failed_fraction",
        **{f"failures.{cause}": f"set failures.causes.{cause}" for cause in Cause},
        **{
            f"algorithm.{name}": f"set algorithm.advantage_options.{name.removeprefix('gigpo_')}"
            for name in ("norm_by_std", "gamma", "gae_lambda", "gigpo_weight")
        },
        **{
            f"algorithm.{name}": f"with algorithm.policy_loss={name}, set algorithm.policy_loss_options"
            for name in ("ppo_clip", "gspo", "cispo", "sapo", "dppo")
        },
        "warm_start.optimizer": "set warm_start.learning_rate; the rest of the schedule is fixed",
        "warm_start.max_tokens_per_microbatch": "set training.max_tokens_per_microbatch",
        "rollout.finish_timeout": "rollout.environment_timeout limits finish, too",
        "algorithm.entropy_coef_end": "set algorithm.entropy_coef to [from, to]",
        "placement.restarts": "leave it out: a run goes on three times between two checkpoints",
        "engine.vllm": "set engine.options, which are those of engine.kind",
        "evaluation.concurrency": "leave it out: as many attempts are played as keep the engines full, or as "
        "orchestration.max_concurrent_groups allows",
        "orchestration.log_every": "leave it out: every update is a line where there is no terminal",
        "placement.learner.collective_timeout": "leave it out: a rank that ends is noticed at once",
        **{
            f"placement.{name}.cpus": "leave it out: each process reserves one core"
            for name in ("learner", "engines", "rollout")
        },
        **{f"data.{split}.mixture": f"set data.{split} to a list of sources" for split in ("train", "held_out")},
        "failures.retry_share": "lower retries in failures.causes; failures.max_failed_fraction ends a run of failures",
        "harbor": "set driver=harbor, and its settings in driver_options; tasks are data.train={source: harbor_tasks, "
        "options: {path: DIR}}, trial_file is part of driver_options.trial, and limits of agent and verifier are "
        "override_timeout_sec there",
    }
)
"""Full path of a key -> what to do instead, for errors."""
