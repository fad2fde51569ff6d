"""Names of settings in other libraries, for errors about unknown keys; docs/from-trl.md has them by library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("lr", "actor_lr", "learning_rate"), "optimizer.learning_rate, warm_start.learning_rate"),
        **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "num_warmup_steps", "warmup_ratio"), "optimizer.warmup"),
        "lr_scheduler_type": "optimizer.decay_from",
        **dict.fromkeys(("adam_beta1", "adam_beta2"), "optimizer.betas"),
        **dict.fromkeys(
            ("total_training_steps", "num_train_steps", "num_steps", "num_train_epochs"), "orchestration.updates"
        ),
        "max_steps": "orchestration.updates, rollout.max_steps",
        "batch_size": "training.tasks_per_update, training.group_size, warm_start.batch_size",
        **dict.fromkeys(
            ("per_device_train_batch_size", "gradient_accumulation_steps"),
            "training.tasks_per_update, training.max_tokens_per_microbatch",
        ),
        "steps_per_generation": "training.updates_per_batch",
        "save_total_limit": "orchestration.keep_last",
        **dict.fromkeys(("output_dir", "run_name"), "(--runs and --name choose the directory, in Python run=)"),
        "logging_steps": "(every update is logged: leave it out)",
        "report_to": "callbacks",
        "train_dataset": "data.train",
        "eval_dataset": "data.held_out",
        **dict.fromkeys(("save_steps", "save_freq", "ckpt_interval"), "orchestration.checkpoint_every"),
        **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), "evaluation.every"),
        **dict.fromkeys(("max_off_policy_steps", "async_level", "max_lag"), "orchestration.max_staleness"),
        **dict.fromkeys(("model_name", "model_name_or_path", "pretrained", "model_path"), "model.path"),
        **dict.fromkeys(("lora_r", "lora_rank", "r"), "lora.rank"),
        "peft_config": "training.lora",
        "lora_alpha": "lora.alpha",
        **dict.fromkeys(("target_modules", "lora_target_modules"), "lora.targets"),
        **dict.fromkeys(("bf16", "mixed_precision", "torch_dtype"), "training.precision"),
        **dict.fromkeys(("entropy_coeff", "entropy_bonus", "ent_coef"), "entropy_coef"),
        **dict.fromkeys(("reward_funcs", "reward_fn", "reward_function"), "reward"),
        "reward_weights": "rewards.weights",
        "mask_truncated_completions": "rewards.overlong",
        **dict.fromkeys(("use_vllm", "vllm_mode", "inference_engine"), "engine.kind"),
        **dict.fromkeys(("max_num_seqs", "rollout_batch_size"), "engine.batch"),
        **dict.fromkeys(("grad_clip", "clip_grad", "max_norm"), "max_grad_norm"),
        **dict.fromkeys(
            ("n", "num_generations", "rollouts_per_prompt", "n_samples", "n_samples_per_prompt"), "group_size"
        ),
        **dict.fromkeys(("train_batch_size", "prompts_per_step", "num_prompts"), "tasks_per_update"),
        **dict.fromkeys(("num_epochs", "ppo_epochs", "num_iterations", "mu"), "epochs_per_batch"),
        **dict.fromkeys(("max_new_tokens", "max_response_length", "max_completion_length"), "max_completion_tokens"),
        **dict.fromkeys(("max_prompt_length", "max_prompt_tokens", "max_model_len"), "max_input_tokens"),
        **dict.fromkeys(("max_turns", "max_assistant_turns"), "max_steps"),
        **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), "kl.coef"),
        "sync_ref_model": "kl.reset_every",
        **dict.fromkeys(
            ("epsilon", "clip_range", "cliprange", "clip_ratio", "clip_eps", "eps_clip"),
            "policy_loss_options.eps_low, policy_loss_options.eps_high",
        ),
        **dict.fromkeys(("eps_low", "clip_ratio_low"), "policy_loss_options.eps_low"),
        **dict.fromkeys(("eps_high", "epsilon_high", "clip_ratio_high"), "policy_loss_options.eps_high"),
        "delta": "policy_loss_options.dual_clip",
        "scale_rewards": "advantage_options.norm_by_std",
        **dict.fromkeys(("lam", "gae_lam", "lambda_", "gae_lambda", "gamma"), "advantage_options"),
        **dict.fromkeys(("adv_estimator", "advantage_estimator"), "advantage"),
        **dict.fromkeys(("loss", "policy_loss_type", "importance_sampling_level"), "policy_loss"),
        "loss_type": "policy_loss, algorithm.reduction, length_norm",
    }
)
"""Setting of another library -> its name here: ends of paths, the likeliest first, or a remark."""
