"""The whole configuration of a run, composed of its layers' sections, and the shipped recipes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from treadle.algorithms import estimators
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.config import Config, apply_overrides, build, load_yaml, merge
from treadle.core.errors import ConfigError
from treadle.data.config import DataConfig, is_file
from treadle.engines.config import Device, EngineConfig
from treadle.loop.config import EvaluationConfig, LoopPlan, OrchestrationConfig, PlacementConfig, RuntimePlan
from treadle.loop.failures import FailuresConfig
from treadle.models.config import ModelConfig
from treadle.models.model_files import is_adapter, located
from treadle.plan.aliases import ALIASES
from treadle.plan.player import KINDS, Player
from treadle.record.address import find_address
from treadle.record.checkpoint_retention import Retention
from treadle.record.run_directory import RunDirectory, without_version
from treadle.report.callbacks import CallbackConfig
from treadle.report.rewards import Grading
from treadle.rollout.config import RolloutConfig
from treadle.rollout.other_models import POLICY, OtherModelConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.training.config import TrainerSpec, TrainingConfig, WarmStartConfig


def _check_scoring(setting: str, name: str, models: Mapping[str, OtherModelConfig]) -> None:
    """Raise ValueError if a setting names a model that cannot score the policy's tokens."""
    if name not in models:
        short = setting.rpartition(".")[2].replace("model", "reference")
        there = f"; there are {', '.join(models)}" if models else ""
        raise ValueError(
            f"{setting} is {name!r}, and models has none of that name{there}; for a directory write "
            f"models.{short}.path={name} and {setting}={short}"
        )
    model, where = models[name], f"{setting} is {name!r}, and models.{name}"
    if model.policy:
        raise ValueError(f"{where} is the policy in another role; leave {setting} out for the policy itself")
    if model.url is not None and setting == "algorithm.kl.model":
        raise ValueError(f"{where} is behind a url, and a reference is computed by the learner; give a path")
    if model.adapter is not None:
        raise ValueError(f"{where} has an adapter; export it with --merge, and give the path of that")
    if model.options:
        raise ValueError(f"{where}.options are for models that reply, and this one only scores; leave them out")


class RunConfig(Config):
    """The configuration of a run."""

    aliases = ALIASES

    recipe: str = Field("custom", description="name of the recipe; run directories start with it")
    about: str = Field("", description="description of the recipe in one line")
    seed: int = Field(0, ge=0, lt=2**48, description="seed of every random draw of the run")
    device: Device = Field(
        "auto",
        description="device of the learner and of Treadle's own engine: cuda is one GPU per rank of the learner, mps "
        "Apple's; auto: cuda if this machine has it, else cpu (on a cluster cpu)",
    )
    environment: str = Field("", description="default environment, for tasks that name none")
    environment_options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the environment's constructor"
    )
    reward: str = Field(
        "",
        description="instead of an environment: function to grade one reply, a registered name or module:function",
    )
    agent: str = Field("", description="instead of an environment: agent program, module:function")
    driver: str = Field("", description="instead of either: attempt driver, a registered name or module:Class")
    driver_options: dict[str, Any] = Field(default_factory=dict, description="options of the driver")
    data: DataConfig = Field(description="tasks")
    model: ModelConfig = Field(description="the trained model")
    models: dict[str, OtherModelConfig] = Field(
        default_factory=dict,
        description="other models, by name: environments, agents and judges call them, reference and teacher score "
        "(docs/other-models.md)",
    )
    warm_start: WarmStartConfig | None = Field(None, description="supervised learning before RL")
    rollout: RolloutConfig = Field(RolloutConfig(), description="how an agent plays")
    rewards: RewardsConfig = Field(RewardsConfig(), description="from given rewards to trained ones")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="from rewards to a loss")
    training: TrainingConfig = Field(TrainingConfig(), description="the learner")
    engine: EngineConfig = Field(EngineConfig(), description="what samples")
    failures: FailuresConfig = Field(FailuresConfig(), description="handling of failed attempts")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="held-out evaluation")
    orchestration: OrchestrationConfig = Field(OrchestrationConfig(), description="the loop")
    placement: PlacementConfig = Field(PlacementConfig(), description="processes")
    callbacks: tuple[CallbackConfig, ...] = Field((), description="trackers and callbacks of the run")

    @model_validator(mode="after")
    def _players_fit(self) -> RunConfig:
        named = {kind: name for kind in KINDS if (name := getattr(self, kind))}
        if len(named) > 1:
            both = " and ".join(f"{kind} {name!r}" for kind, name in named.items())
            raise ValueError(f"{both} are both set; leave one out (single tasks may name another)")
        for kind in ("environment", "driver"):
            options = getattr(self, f"{kind}_options")
            if options and kind not in named:
                raise ValueError(
                    f"{kind}_options ({', '.join(options)}) are for the recipe's {kind}, and none is set; remove them, "
                    f"or set {kind}"
                )
        for name in self.models:
            if name == POLICY or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"models: {name!r} is not a valid name for a model beside the policy; use letters, digits, . _ -"
                )
        for setting, model in self.scoring.items():
            _check_scoring(setting, model, self.models)
        if self.algorithm.advantage == "maxrl" and self.rewards.length_penalty is not None:
            raise ValueError(
                "algorithm.advantage 'maxrl' needs rewards >= 0, and rewards.length_penalty takes some away; "
                "remove it, or choose grpo or rloo"
            )
        return self

    @model_validator(mode="after")
    def _training_fits(self) -> RunConfig:
        training, updates, per_batch = (
            self.training,
            self.orchestration.updates,
            self.training.updates_between_publications,
        )
        if updates % per_batch:
            raise ValueError(
                f"orchestration.updates is {updates}, not a multiple of the {per_batch} updates of a batch "
                f"(training.updates_per_batch {training.updates_per_batch} x epochs_per_batch "
                f"{training.epochs_per_batch}); try {updates + per_batch - updates % per_batch}"
            )
        if training.precision == "bfloat16_pure" and self.placement.learner.ranks == 1 and training.lora is None:
            raise ValueError(
                "training.precision 'bfloat16_pure' applies to weights gathered by several ranks, or "
                "to the base of adapters, but placement.learner.ranks is 1 and training.lora is not set; set "
                "training.precision to bfloat16"
            )
        least, size = training.min_group_size, training.group_size
        if least is not None and least > size:
            raise ValueError(f"training.min_group_size is {least}, training.group_size {size}; lower the first")
        staleness, policy = self.orchestration.max_staleness, self.orchestration.stale_policy
        if staleness and self.engine.lock_step:
            raise ValueError(
                f"engine.lock_step is true with orchestration.max_staleness {staleness}: waves would wait for every "
                "agent; leave engine.lock_step out"
            )
        if not staleness and policy != "mask_steps":
            raise ValueError(
                f"orchestration.stale_policy is {policy!r}, but with max_staleness 0 nothing becomes stale; leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> RunConfig:
        if self.placement.learner.loading == "sharded" and (self.training.lora or self.model.adapter):
            name = "training.lora" if self.training.lora else "model.adapter"
            raise ValueError(
                f"{name} and placement.learner.loading 'sharded' cannot be combined yet; set loading to broadcast"
            )
        if self.training.lora is None:
            return self
        if self.model.build is not None:
            raise ValueError(
                "training.lora needs a trained model: give model.path, and null for model.build "
                "(`treadle sft RECIPE --out DIR` makes one of a recipe's warm start)"
            )
        if self.training.lora.pin_attempts and not self.orchestration.max_staleness:
            raise ValueError(
                "training.lora.pin_attempts is for asynchronous runs, and orchestration.max_staleness is 0, so that "
                "weights never change during an attempt; leave it out"
            )
        if self.engine.kind == "vllm" and self.engine.vllm.transfer == "collective":
            raise ValueError(
                "engine.options.transfer 'collective' is for weights, and training.lora is published by files in the "
                "run's directory; leave it out, and put runs where all servers see them (--runs)"
            )
        return self

    @property
    def player(self) -> Player:
        """Return the player of tasks that name none."""
        kind = next((kind for kind in KINDS if getattr(self, kind)), "environment")
        options = {"environment": self.environment_options, "driver": self.driver_options}
        return Player(kind, getattr(self, kind), options.get(kind, {}))

    @property
    def scoring(self) -> dict[str, str]:
        """Return the names of models that score the policy's tokens, by the setting that names them."""
        kl, distillation = self.algorithm.kl, self.algorithm.distillation
        named = {
            "algorithm.kl.model": None if kl is None else kl.model,
            "algorithm.distillation.teacher": None if distillation is None else distillation.teacher,
        }
        return {setting: name for setting, name in named.items() if name is not None}

    @property
    def reference(self) -> OtherModelConfig | None:
        """Return the model that `algorithm.kl.model` names."""
        return self.models.get(self.scoring.get("algorithm.kl.model", ""))

    @property
    def teacher(self) -> OtherModelConfig | None:
        """Return the model that `algorithm.distillation.teacher` names."""
        return self.models.get(self.scoring.get("algorithm.distillation.teacher", ""))

    @property
    def called_models(self) -> dict[str, OtherModelConfig]:
        """Return the other models that environments, agents and judges may call."""
        return {name: model for name, model in self.models.items() if name not in self.scoring.values()}

    @property
    def trainer(self) -> TrainerSpec:
        return TrainerSpec(
            self.model,
            self.training,
            self.algorithm,
            self.warm_start,
            self.orchestration.updates,
            self.orchestration.max_staleness,
            self.seed,
            self.placement.learner,
            self.orchestration.traced_groups,
            self.rollout.longest_call,
            "cpu" if self.device == "auto" else self.device,
            reference=None if self.reference is None else self.reference.path,
            teacher=self.teacher,
        )

    @property
    def runtime(self) -> RuntimePlan:
        adapters = self.training.lora is not None
        return RuntimePlan(self.placement, self.device, self.engine, self.rollout.gateway, adapters)

    @property
    def grading(self) -> Grading:
        return Grading(
            self.algorithm.advantage,
            tuple(self.rewards.weights),
            self.rewards.group is not None,
            self.training.group_size,
            self.training.tasks_per_update,
            self.evaluation.attempts,
            self.evaluation.success_at,
            self.evaluation.success_of,
            self.data.held_out is not None,
        )

    @property
    def loop(self) -> LoopPlan:
        """The loop's plan, without tasks."""
        section, training, lora = self.orchestration, self.training, self.training.lora
        batch, staleness = training.updates_between_publications, section.max_staleness
        capacity = self.engine.capacity * self.placement.engines.count
        groups, enough = section.max_concurrent_groups, max(256, capacity)
        return LoopPlan(
            seed=self.seed,
            updates=section.updates,
            batch=batch,
            groups_per_batch=training.groups_per_batch,
            group_size=training.group_size,
            min_group_size=training.least_graded(estimators.needs_group(self.algorithm)),
            max_staleness=staleness,
            stale_policy=section.stale_policy,
            pinned=staleness if lora is not None and lora.pin_attempts else None,
            max_concurrent_groups=groups,
            engine_capacity=capacity,
            evaluated_together=enough if groups is None else min(enough, groups * training.group_size),
            checkpoint_every=section.checkpoint_every,
            retention=Retention(
                section.keep_last, section.keep_every, section.keep_best, batch, self.evaluation.temperature
            ),
            shuffle=self.data.shuffle,
            table_by=self.data.table_by,
            algorithm=self.algorithm,
            failures=self.failures,
            evaluation=self.evaluation,
            grading=self.grading,
            starts=self.rollout.starts,
            forks=self.rollout.forks,
            curriculum=self.data.curriculum,
        )


def recipe_names() -> list[str]:
    return sorted(Path(str(f)).stem for f in files("treadle.recipes").iterdir() if f.name.endswith(".yaml"))


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a shipped recipe by name or any by path, with `key.path=value` overrides. Raises ConfigError.

    A recipe with `extends: OTHER` contains only its differences from that one, a shipped name or a path relative to the
    recipe's directory (`core.config.merge`; null removes a key). A file of tasks, there or in an override, drops the
    `options` of the source it replaces. The returned, and saved, configuration is complete.
    """
    return build(RunConfig, without_source_options(recipe_data(recipe), overrides), recipe, overrides)


def recipe_data(recipe: str) -> dict[str, Any]:
    """Return the data of a recipe, with its name, not validated. Raises ConfigError."""
    return {"recipe": Path(recipe).stem, **read_recipe(recipe)}


def config_of(run: RunDirectory, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a run's resolved configuration, as last changed. Raises as `RunDirectory.config_data`, and ConfigError."""
    return build(RunConfig, run.config_data(), str(run.config_file), overrides)


def with_model_of_run(config: RunConfig) -> RunConfig:
    """Resolve `model.path` if it addresses a checkpoint (`RUN`, `RUN@best`, `RUN@40`).

    Raises RunError for a missing one.
    """
    address = None if config.model.path is None or config.model.adapter else find_address(config.model.path)
    if address is None or (Path(config.model.path or "") / "config.json").is_file():
        return config
    directory = address.model()
    base = config_of(RunDirectory.open(address.run)).model.path if is_adapter(directory) else None
    model = ModelConfig.model_validate({**config.model.model_dump(), **located(directory, base)})
    return config.model_copy(update={"model": model})


def without_source_options(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the data without the options of task sources that the overrides replace by files."""
    named = [o for o in overrides if o.partition("=")[0].strip() in ("data.train.source", "data.held_out.source")]
    return _without_source_options(data, apply_overrides({}, named))


def _without_source_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` without the options of sources that are files in `above`, which take none.

    `{"data": {"train": {"source": "lookup", "options": {"count": 9}}}}` below `{"data": {"train": {"source":
    "my.jsonl"}}}` loses the count.
    """
    sections, others = below.get("data"), above.get("data")
    if not isinstance(sections, Mapping) or not isinstance(others, Mapping):
        return dict(below)

    def replaced(section: Any, other: Any) -> bool:
        named = other.get("source") if isinstance(section, Mapping) and isinstance(other, Mapping) else None
        return isinstance(named, str) and named != section.get("source") and is_file(named)

    kept = {
        name: {key: value for key, value in section.items() if key != "options"}
        if replaced(section, others.get(name))
        else section
        for name, section in sections.items()
    }
    return {**below, "data": kept}


def read_recipe(recipe: str) -> dict[str, Any]:
    """Return the plain data of a recipe and those it extends. Raises ConfigError."""
    return _read(_recipe_path(recipe), ())


def _read(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    data = load_yaml(path)
    if "schema_version" in data:  # a run's config.yaml
        return without_version(data, str(path))
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: got {base!r}, expected one recipe: a shipped name or a path")
    chain, base_path = (*below, path.resolve()), _recipe_path(base, path)
    if base_path.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, base_path))
        raise ConfigError(f"{path}: extends: {names} is a cycle; remove one of them")
    extended = _without_source_options(_read(base_path, chain), data)
    return merge({key: value for key, value in extended.items() if key != "recipe"}, data)


def _recipe_path(recipe: str, extending: Path | None = None) -> Path:
    """Find a recipe. extending: the recipe that extends it; paths are relative to its directory."""
    names = recipe_names()
    if recipe in names:
        return Path(str(files("treadle.recipes") / f"{recipe}.yaml"))
    where, folder = (f"{extending}: extends: ", extending.parent) if extending else ("", Path())
    path, shipped = folder / recipe, f"shipped: {', '.join(names)}"
    if (path / "config.yaml").is_file():
        saved = path / "config.yaml"
        raise ConfigError(
            f"{where}{recipe!r} is a run, not a recipe: continue it with --resume, or give its recipe, {saved}"
        )
    if path.suffix not in (".yaml", ".yml"):
        near = difflib.get_close_matches(recipe, names, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{where}no recipe {recipe!r}; {meant}{shipped}; or give the path of a .yaml file")
    if not path.is_file():
        beside = {file.stem: file for file in path.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(path.stem, beside, n=1)
        meant = f"; did you mean {str(beside[near[0]])!r}?" if near else ""
        raise ConfigError(f"{where}no file {recipe!r} (it is relative to {folder.absolute()}){meant}; {shipped}")
    return path
