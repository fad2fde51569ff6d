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
        "failures.retry_share": "lower retries in failures.causes; failures.max_failed_fraction ends a run of failures",
        "harbor": "set driver=harbor, and its settings in driver_options; tasks are data.train={source: harbor_tasks, "
        "options: {path: DIR}}, trial_file is part of driver_options.trial, and limits of agent and verifier are "
        "override_timeout_sec there",
    }
)
"""Full path of a key -> what to do instead, for errors."""
