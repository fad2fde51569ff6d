"""Handler of `treadle.workers.foreign`: plays Harbor trials, in a Python with Harbor.

    payload -> trial_config -> Trial.create -> run, the agent behind `Stoppable` -> report

All code that depends on Harbor's version is in this directory: this module configures and reads trials, `treadle_local`
is an environment, `treadle_terminus` an agent. Version-dependent attributes are read with `getattr`, exceptions are
passed on by class name, and options are offered to agents and environments that name them. No import of Treadle.

A payload has one key, the kind of request:

    trial  play a trial: config (of Harbor's TrialConfig, in part), task, name, directory, gateway, window, ...
    check  make such a trial without playing it; raises problems of its configuration
    probe  one call through Harbor's own LLM class; returns the token ids that arrive
    tasks  the directories of a Harbor data set's tasks, downloaded if missing
    remove Docker containers left by a killed process
"""

import array
import asyncio
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # neither is fetched or reported
os.environ.setdefault("HARBOR_TELEMETRY", "0")

import litellm
from harbor.agents.factory import AgentFactory
from harbor.environments.factory import EnvironmentFactory
from harbor.llms.lite_llm import LiteLLM
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial
from pydantic import BaseModel

Json = dict[str, Any]

AGENTS = {
    "terminus-2": {"import_path": "treadle_terminus:DeferredTerminus2"},
    "terminus-2-stock": {"name": "terminus-2"},
}
ENVIRONMENTS = {"local": {"import_path": "treadle_local:LocalEnvironment"}}
"""Our own names; all others are Harbor's, or `module:Class`."""

_WORD = 1.0  # seconds for the stop request to follow the answer to a refused call
_PHASES = ("environment_setup", "agent_setup", "agent_execution", "verifier")


def versions() -> dict[str, str]:
    """Return the versions of the libraries involved."""
    return {name: importlib.metadata.version(name) for name in ("harbor", "litellm")}


async def start(options: Json) -> Json:
    """Prepare for trials."""
    # A trial logs into its own directory, which its caller may keep.
    logging.disable(logging.CRITICAL)
    litellm.suppress_debug_info = True
    return {}


async def run(payload: Json, stop: asyncio.Event) -> Json:
    """Handle a request. stop: ends the agent's part of a trial early; its results are then verified."""
    [(what, order)] = payload.items()
    if what == "trial":
        return await _play(order, stop)
    return await {"check": _check, "probe": _probe, "tasks": _tasks, "remove": _remove}[what](order)


# --- configuration ----------------------------------------------------------------------------------------------------


def trial_config(order: Json) -> TrialConfig:
    """Return the configuration of one trial. Raises ValueError for values unknown to or refused by Harbor.

    order: made by `treadle.integrations.harbor.driver`, with name, directory, and gateway (base_url,
    anthropic_url, secret).
    """
    config: Json = json.loads(json.dumps(order["config"]))  # a copy
    task = {"path": order["task"]} if isinstance(order["task"], str) else order["task"]
    agent = {**_named(order["agent"], AGENTS, "name"), **config.pop("agent", {})}
    environment = {**_named(order["environment"], ENVIRONMENTS, "type"), **config.pop("environment", {})}
    parts = {"task": task, "agent": agent, "environment": environment}
    whole = {**config, **parts, "trial_name": order["name"], "trials_dir": order["directory"]}
    _refuse_unknown(whole, TrialConfig, "")
    checked = TrialConfig.model_validate(whole)
    _connect(checked, order)
    return checked


def _named(name: str, ours: dict[str, Json], key: str) -> Json:
    return dict(ours.get(name) or ({"import_path": name} if ":" in name else {key: name}))


def _refuse_unknown(config: Json, model: type[BaseModel], where: str) -> None:
    """Raise ValueError for a key unknown to a Harbor model, which pydantic would ignore."""
    for key, value in config.items():
        field = model.model_fields.get(key)
        if field is None:
            keys = ", ".join(model.model_fields)
            raise ValueError(f"Harbor's trial configuration has no {where}{key!r}; {where or 'it'} has {keys}")
        kind = field.annotation
        if isinstance(value, dict) and inspect.isclass(kind) and issubclass(kind, BaseModel):
            _refuse_unknown(value, kind, f"{where}{key}.")


def _connect(config: TrialConfig, order: Json) -> None:
    """Connect the agent to its session, and offer options to agent and environment."""
    gateway, (prompt, whole) = order["gateway"], order["window"]
    info = {"max_input_tokens": whole, "max_output_tokens": whole - prompt}
    offered = {
        "api_base": gateway["base_url"],
        "session_id": order["name"],
        "collect_rollout_details": True,
        "model_info": {**info, "input_cost_per_token": 0.0, "output_cost_per_token": 0.0},
        "temperature": order["temperature"],
        "proactive_summarization_threshold": whole - prompt + whole // 10,  # its token count differs from ours
        # Otherwise it installs a recorder in the sandbox.
        "record_terminal_session": False,
        "suppress_max_turns_warning": True,
    }
    agent = config.agent
    takes = _parameters(AgentFactory.get_agent_class_from_config(agent))
    must = {name: offered.pop(name) for name in ("api_base", "session_id", "collect_rollout_details") if name in takes}
    agent.kwargs = {**{name: value for name, value in offered.items() if name in takes}, **agent.kwargs, **must}
    if "llm_kwargs" in takes:
        configured = agent.kwargs.get("llm_kwargs") or {}
        agent.kwargs["llm_kwargs"] = {"max_retries": 0, "timeout": 3600.0, "api_key": gateway["secret"], **configured}
    agent.model_name = agent.model_name or ("hosted_vllm/policy" if "api_base" in takes else "openai/policy")
    agent.env = {
        "OPENAI_BASE_URL": gateway["base_url"],
        "OPENAI_API_BASE": gateway["base_url"],
        "OPENAI_API_KEY": gateway["secret"],
        "ANTHROPIC_BASE_URL": gateway["anthropic_url"],
        "ANTHROPIC_API_KEY": gateway["secret"],
        **agent.env,
    }
    config.environment.kwargs = {**_lifetime(config, order["lifetime"]), **config.environment.kwargs}


def _lifetime(config: TrialConfig, seconds: float) -> Json:
    """Return the options that make a provider end abandoned sandboxes; empty if it has none."""
    whole, minutes = int(seconds), -int(-seconds // 60)
    options = {
        # daytona: idle time, after which it is deleted.
        "auto_stop_interval_mins": minutes,
        "sandbox_timeout_secs": whole,  # modal
        "sandbox_timeout_sec": whole,  # opensandbox
        "sandbox_lifetime_seconds": whole,  # vercel
        "max_lifetime_seconds": seconds,  # cwsandbox
        "timeout_secs": whole,  # tensorlake
    }
    takes = _parameters(_environment_class(config))
    return {name: value for name, value in options.items() if name in takes}


def _environment_class(config: TrialConfig) -> Any:
    if config.environment.import_path:
        module, _, name = config.environment.import_path.partition(":")
        return getattr(importlib.import_module(module), name)
    from harbor.environments import factory

    return factory._load_environment_class(config.environment.type)


def _parameters(made: Any) -> set[str]:
    return set(inspect.signature(made.__init__).parameters)


# --- one trial --------------------------------------------------------------------------------------------------------


class Stoppable:
    """Replaces the method that runs a trial's agent: it returns early, and normally, once `stop` is set.

    Harbor verifies an agent that returns, but not one that it cancels. The ids recorded by the agent are digested, and
    then omitted from `result.json`, unless `keep`.
    """

    def __init__(self, play: Any, stop: asyncio.Event, keep: bool) -> None:
        self._play, self._stop, self._keep = play, stop, keep
        self.stopped = False
        self.recorded: list[list[str]] = []

    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the agent until it returns or is stopped."""
        context = kwargs.get("context") or next((a for a in args if hasattr(a, "rollout_details")), None)
        playing = asyncio.ensure_future(self._play(*args, **kwargs))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done() and not playing.cancelled() and playing.exception():
                # Caused by a refused call, for which the agent raises.
                await asyncio.wait({stopping}, timeout=_WORD)
        finally:
            stopping.cancel()
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing})
            self._note(context)
        if self._stop.is_set():
            self.stopped = True
            if not playing.cancelled():
                # A refused answer may have ended it first.
                playing.exception()
            return
        playing.result()

    def _note(self, context: Any) -> None:
        segments = getattr(context, "rollout_details", None)
        if segments is None:
            return
        self.recorded += [_digests(segment) for segment in segments]
        if not self._keep:
            context.rollout_details, context.model_usage = None, {}


def _digests(segment: Json) -> list[str]:
    """Return a digest of prompt and completion of each call of a segment."""
    prompts, completions = segment.get("prompt_token_ids") or [], segment.get("completion_token_ids") or []
    return [digest(*ids) for ids in zip(prompts, completions, strict=False)]


def digest(prompt: list[int], completion: list[int]) -> str:
    """Return a digest of a call's token ids; `treadle.integrations.harbor.driver.digest` computes the same."""
    ids = array.array("i", [len(prompt), *prompt, *completion])
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


async def _play(order: Json, stop: asyncio.Event) -> Json:
    directory = Path(order["directory"], order["name"])
    shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted attempt
    try:
        config = trial_config(order)
        try:
            trial = await Trial.create(config)
        except Exception as error:  # noqa: BLE001  # any problem of task or configuration: no trial was begun
            return {"invalid": f"{type(error).__name__}: {error}"}
        keep = order["keep"] == "keep"
        agent = trial.agent
        runs = {
            name: Stoppable(getattr(agent, name), stop, keep)
            for name in ("run", "resume", "load")
            if hasattr(agent, name)
        }
        for name, stoppable in runs.items():
            setattr(agent, name, stoppable)
        result = await trial.run()
        report = _report(result, trial)
        report["stopped"] = any(stoppable.stopped for stoppable in runs.values())
        report["recorded"] = [segment for stoppable in runs.values() for segment in stoppable.recorded]
        return report
    finally:
        _tidy(directory, order["keep"])


def _report(result: Any, trial: Any) -> Json:
    """Return the result of a trial: exception, rewards, seconds of each phase, the agent's own record."""
    steps = getattr(result, "step_results", None) or []
    parts = [result, *steps]
    failed = next((part for part in parts if part.exception_info is not None), None)
    contexts = [part.agent_result for part in parts if getattr(part, "agent_result", None) is not None]
    info = None if failed is None else failed.exception_info
    rewards = result.verifier_result.rewards if result.verifier_result else None
    return {
        "exception": info and {"type": info.exception_type, "message": info.exception_message[:2000]},
        "traceback": info.exception_traceback[-8000:] if info else "",
        "phase": _phase(parts, failed),
        "rewards": rewards if rewards is None or isinstance(rewards, dict) else {"reward": rewards},
        "reward_valid": getattr(result, "reward_valid", None),
        "seconds": {phase: sum(_seconds(getattr(part, phase, None)) for part in parts) for phase in _PHASES},
        "agent_seconds": _seconds(getattr(failed, "agent_execution", None)) if failed is not None else 0.0,
        "agent_limit": _agent_limit(trial, failed is not result),
        "summaries": sum((context.metadata or {}).get("summarization_count") or 0 for context in contexts),
    }


def _phase(parts: list[Any], failed: Any) -> str:
    """Return the phase in which the exception was raised: the last one begun by then; "" without one."""
    if failed is None:
        return ""
    timings = [(getattr(part, phase, None), phase) for part in parts for phase in _PHASES]
    begun = [(timing.started_at, phase) for timing, phase in timings if timing is not None and timing.started_at]
    before = [(at, phase) for at, phase in begun if at <= failed.exception_info.occurred_at]
    return max(before)[1] if before else _PHASES[0]


def _seconds(timing: Any) -> float:
    if timing is None or timing.started_at is None:
        return 0.0
    ended = timing.finished_at or datetime.now(timing.started_at.tzinfo)
    return float((ended - timing.started_at).total_seconds())


def _agent_limit(trial: Any, in_step: bool) -> float | None:
    """Return the agent's time limit in seconds; None if a step of the task may have had another."""
    override = trial.config.agent.override_timeout_sec
    names = ("agent_timeout_sec", "_agent_timeout_sec")  # 0.23 has the latter
    limit = next(filter(None, (getattr(trial, name, None) for name in names)), None)
    return None if in_step and override is None else limit


def _tidy(directory: Path, keep: str) -> None:
    if keep == "delete":
        shutil.rmtree(directory, ignore_errors=True)
    elif keep == "thin":
        for agent in (directory / "agent", *directory.glob("steps/*/agent")):
            shutil.rmtree(agent, ignore_errors=True)


# --- the rest ---------------------------------------------------------------------------------------------------------


async def _check(order: Json) -> Json:
    with tempfile.TemporaryDirectory(prefix="treadle-harbor-") as scratch:
        config = trial_config({**order, "directory": scratch})
        EnvironmentFactory.run_preflight(config.environment.type, import_path=config.environment.import_path)
        trial = await Trial.create(config)
        return {"task": trial.task.name, "agent": trial.agent.name(), "agent_limit": _agent_limit(trial, False)}


async def _probe(order: Json) -> Json:
    """Call the model once, as one of Harbor's agents does, and return the token ids that arrived."""
    config = trial_config({**order, "directory": tempfile.gettempdir()})
    options = {"model_info": None, "llm_kwargs": {}, **config.agent.kwargs}
    model_info = options["model_info"] or {"max_input_tokens": order["window"][1], "max_output_tokens": 1}
    llm = LiteLLM(
        "hosted_vllm/policy",
        api_base=order["gateway"]["base_url"],
        collect_rollout_details=True,
        session_id=order["name"],
        model_info={"input_cost_per_token": 0.0, "output_cost_per_token": 0.0, **model_info},
        max_retries=0,
        timeout=60.0,
        api_key=order["gateway"]["secret"],
    )
    answers: list[Any] = []
    extract = llm._extract_usage_info

    # Also sees truncated answers, for which `call` raises.
    def seen(response: Any) -> Any:
        answers.append((*llm._extract_token_ids(response), llm._extract_logprobs(response)))
        return extract(response)

    llm._extract_usage_info = seen
    try:
        await llm.call("ok")
    except Exception as error:  # noqa: BLE001  # reported: the caller knows whether an answer came
        if not answers:
            return {"error": f"{type(error).__name__}: {error}"[:2000]}
    prompt, completion, logprobs = answers[-1]
    return {"prompt": prompt, "completion": completion, "logprobs": logprobs}


async def _tasks(order: Json) -> Json:
    """Return the directories of a data set's tasks, sorted. order: data_set (`name@version`), registry."""
    from harbor.models.job.config import DatasetConfig
    from harbor.tasks.client import TaskClient

    name, _, version = order["data_set"].partition("@")
    where = {"registry_path": order["registry"]} if order["registry"] else {}
    configs = await DatasetConfig(name=name, version=version or None, **where).get_task_configs()
    ids = [config.get_task_id() for config in configs]
    await TaskClient().download_tasks(task_ids=ids)
    return {"tasks": sorted(str(task_id.get_local_path()) for task_id in ids)}


async def _remove(order: Json) -> Json:
    """Remove the containers, networks and volumes of trials with sandbox names that begin with `names`."""
    if shutil.which("docker") is None:
        return {"removed": []}
    label = "com.docker.compose.project"
    listed = await _docker("ps", "--all", "--filter", f"label={label}", "--format", f'{{{{.Label "{label}"}}}}')
    projects = sorted({name for name in listed.split() if name.startswith(order["names"])})
    for name in projects:
        await _docker("compose", "--project-name", name, "down", "--volumes", "--remove-orphans", "--timeout", "0")
    return {"removed": projects}


async def _docker(*words: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("docker", *words, stdin=pipe, stdout=pipe, stderr=pipe)
    return (await process.communicate())[0].decode(errors="replace")
