"""Invalid combinations in the `algorithm` section, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from treadle.algorithms import estimators, losses
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, ValueConfig
from treadle.algorithms.estimators import Advantage
from treadle.algorithms.losses import PolicyLoss
from treadle.core.config import Config
from treadle.core.errors import ConfigError


def check(config: AlgorithmConfig, filtered_sampling: bool = False) -> None:
    """Raise ConfigError with every problem, one per line."""
    if lines := problems(config, filtered_sampling):
        raise ConfigError("\n".join(f"algorithm.{line}" for line in lines))


def problems(config: AlgorithmConfig, filtered_sampling: bool = False) -> list[str]:
    """Return the section's problems, each naming the value and the fix. Raises ConfigError for an unknown name.

    filtered_sampling: completions are sampled with top-k, top-p or min-p by an engine that does not report which tokens
    were left (`Step.support`), so that `logp_rollout` refers to an unknown distribution and rho is biased.
    """
    advantage, loss = estimators.by_name(config.advantage), losses.by_name(config.policy_loss)
    return [
        *_options(config, estimators.options_of),
        *_options(config, losses.options_of),
        *_value(config, advantage),
        *_correction(config, loss),
        *_centered(config, loss),
        *_kl(config),
        *_distillation(config, advantage),
        *_reduction(config),
        *_dynamic_sampling(config, advantage),
        *(_filtered(config, loss) if filtered_sampling else ()),
    ]


def _options(config: AlgorithmConfig, build: Callable[[AlgorithmConfig], Config]) -> list[str]:
    try:
        build(config)
    except ConfigError as error:
        return [line.removeprefix("algorithm.") for line in str(error).splitlines()]
    return []


def _value(config: AlgorithmConfig, advantage: Advantage) -> Iterator[str]:
    if config.value != ValueConfig() and not advantage.needs_values:
        yield f"value is set, but advantage {config.advantage!r} needs no value head; leave it out or choose gae"


def _correction(config: AlgorithmConfig, loss: PolicyLoss) -> Iterator[str]:
    correction = config.correction
    if correction.token_tis is not None and correction.sequence_tis is not None:
        yield "correction: token_tis and sequence_tis both weight by the same rho; keep one"
    if loss.anchor == "rollout" and correction.weighs:
        yield (
            f"correction: policy_loss {config.policy_loss!r} already compares with the engine's log-probabilities; "
            "token_tis or sequence_tis would count rho twice. Leave it out or choose ppo_clip"
        )
    if correction.renormalize and not correction.masks:
        yield "correction.renormalize is true, but no mask leaves anything out; add one or leave it out"
    if correction.scope != "trajectory" and not correction.by_unit:
        yield f"correction.scope is {correction.scope!r}, but nothing is corrected over a sequence; leave it out"


def _centered(config: AlgorithmConfig, loss: PolicyLoss) -> Iterator[str]:
    if config.centered_scores == "off":
        return
    weighs = f"centered_scores is {config.centered_scores!r}, but"
    if loss.anchor == "rollout":
        yield (
            f"{weighs} policy_loss {config.policy_loss!r} weighs by the ratio to the sampler, which leaves no drift to "
            "subtract; set centered_scores=off"
        )
    if config.correction.sequence_tis is not None:
        yield (
            f"{weighs} correction.sequence_tis weighs by tokens that no alternative was sampled with; use token_tis or "
            "masks, or set centered_scores=off"
        )


def _kl(config: AlgorithmConfig) -> Iterator[str]:
    kl = config.kl
    if kl is None:
        return
    if kl.where == "loss" and kl.estimator == "k1":
        yield "kl: the gradient of k1 as a loss is 0 in expectation; choose k2 or k3, or where: reward"
    if kl.where == "reward" and config.advantage == "maxrl":
        yield "kl.where is 'reward' with advantage maxrl, which needs rewards >= 0; choose where: loss"
    if kl.target is None and kl.horizon != type(kl).model_fields["horizon"].default:
        yield "kl.horizon is set, but without kl.target the coefficient is fixed; set a target or leave it out"


def _distillation(config: AlgorithmConfig, advantage: Advantage) -> Iterator[str]:
    section = config.distillation
    if section is None:
        return
    yield from _turns(config, section, advantage)
    if section.teacher is None and section.context is None and section.form != "turns":
        yield (
            "distillation has neither teacher nor context, and the policy learns nothing from itself alone; "
            "name another model as teacher, or a function as context"
        )
    if not any(section.coefs):
        yield "distillation.coef is 0, so that the teacher would teach nothing; raise it, or leave distillation out"
    if section.teacher is not None and section.weights != "current":
        yield f"distillation.weights is {section.weights!r}, but the teacher is another model; leave one of them out"
    if section.weights != "ema" and section.ema_decay != type(section).model_fields["ema_decay"].default:
        yield f"distillation.ema_decay is {section.ema_decay:g}, but weights is {section.weights!r}; leave it out"
    if section.top_k != type(section).model_fields["top_k"].default and not section.by_top_k:
        yield f"distillation.top_k is {section.top_k}, but form {section.form!r} compares sampled tokens; leave it out"
    if section.rewards > 0:
        return
    unread = "but distillation.rewards is 0, which leaves rewards out"
    if advantage.needs_values:
        yield f"advantage is {config.advantage!r}, {unread} and nothing to learn values from; choose grpo"
    if config.kl is not None and config.kl.where == "reward":
        yield f"kl.where is 'reward', {unread}; choose where: loss"
    if config.dynamic_sampling != "off":
        yield f"dynamic_sampling is {config.dynamic_sampling!r}, {unread}; every group is taught: leave it off"


def _turns(config: AlgorithmConfig, section: DistillationConfig, advantage: Advantage) -> Iterator[str]:
    if section.form != "turns":
        if section.target is not None or not section.repaid:
            yield f"distillation: target and repaid are of form 'turns', the form is {section.form!r}; leave them out"
        return
    turns = "distillation.form is 'turns', which"
    if not advantage.by_step:
        yield (
            f"{turns} rewards single steps, but advantage {config.advantage!r} uses their sum alone; choose step_return"
        )
    if section.context is not None:
        yield f"{turns} scores the ground truth after the recorded prompts; leave distillation.context out"
    if section.rewards != 1:
        yield f"{turns} adds to rewards, but distillation.rewards is {section.rewards:g}; leave it out"
    if section.teacher is None and section.weights == "current":
        yield f"{turns} compares states by a frozen model; set distillation.weights to start, or name a teacher"


def _reduction(config: AlgorithmConfig) -> Iterator[str]:
    if config.scope != "trajectory" and config.reduction != "seq_mean_token_sum_norm":
        yield (
            f"scope is {config.scope!r}, but reduction {config.reduction!r} uses no unit; "
            "take step_mean or trajectory_mean, or seq_mean_token_sum_norm"
        )


def _dynamic_sampling(config: AlgorithmConfig, advantage: Advantage) -> Iterator[str]:
    if config.dynamic_sampling != "off" and not advantage.by_group:
        yield (
            f"dynamic_sampling is {config.dynamic_sampling!r}, but advantage {config.advantage!r} has no group "
            "baseline, so advantages are never all 0; leave it off or choose grpo"
        )


def _filtered(config: AlgorithmConfig, loss: PolicyLoss) -> Iterator[str]:
    reason = (
        "with top_k, top_p or min_p this engine's log-probabilities refer to a truncated distribution, of which it "
        "does not report the tokens (engine.kind=torch and vllm do)"
    )
    if loss.anchor == "rollout":
        yield f"policy_loss {config.policy_loss!r} compares with them, but {reason}; choose ppo_clip or drop the filter"
    if config.correction.active:
        yield f"correction compares with them, but {reason}; leave it out or drop the filter"
