"""Trackers: callbacks that send figures to a tracking library, under the names of metrics.jsonl, and samples.

An update's figures have its number as their step; an evaluation's are named `evaluation/...`, or
`evaluation/greedy/...` at temperature 0 if that is not `evaluation.temperature`.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, fields
from typing import Any, ClassVar, Literal

from treadle.core.config import describe, dump_yaml
from treadle.core.errors import ConfigError, DamageError
from treadle.core.files import write_atomically
from treadle.core.registry import how_to_install
from treadle.core.text import checked_json, parse_checked_json
from treadle.core.types import Group
from treadle.report.callback import Callback, RunStart
from treadle.report.metrics import EvaluationResult
from treadle.report.samples import Sample, sample_attempts
from treadle.rollout.isolation.user_code import raised

Outcome = Literal["finished", "stopped", "failed"]


class Tracker(Callback):
    """Sends a run's figures to a tracking library: names them, stores the library's id of the run, handles its errors.

    An exception of the library at the start ends the run before it begins. Later the first one becomes a line of output
    and the run continues: metrics.jsonl has everything.
    """

    package: ClassVar[str]

    def __init__(self) -> None:
        self._library = _required(self.package)
        self._run: RunStart | None = None
        self._samples: list[Sample] = []
        self._reported = False

    @abstractmethod
    def open(self, run: RunStart, run_id: str | None) -> str:
        """Begin a run of the tracker, or continue the one with this id; return the id."""

    @abstractmethod
    def log(self, figures: Mapping[str, float], update: int) -> None:
        """Log figures, name -> value, at the step of this update; must return soon."""

    def log_samples(self, samples: Sequence[Sample], update: int) -> None:
        """Log attempts trained by this update, as text; must return soon. Default: no-op."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Finish the run of the tracker after the last `log`; wait until everything is sent."""

    def start(self, run: RunStart) -> None:
        """Open the tracker and store its id in the run's tracking.json. Raises DamageError if that is damaged."""
        file = run.directory / "tracking.json"
        ids = parse_checked_json(file.read_bytes()) if file.is_file() else {}
        if ids is None:
            raise DamageError(f"{file} is damaged: restore it, or remove it to continue as a new run of the tracker")
        run_id = self.open(run, ids.get(self.package))
        write_atomically(file, checked_json({**ids, self.package: run_id}).encode())
        self._run = run

    def batch(self, groups: Sequence[Group], version: int) -> None:
        assert self._run is not None
        self._samples = sample_attempts(
            groups, self._run.config.seed, self._run.config.orchestration.traced_groups, self._run.decode
        )

    def update(self, row: Mapping[str, Any]) -> None:
        figures = {name: value for name, value in scalars(row) if name != "update"}
        self._call(self.log, figures, row["update"])
        # For a batch of several updates, logged with the first.
        if self._samples:
            self._call(self.log_samples, self._samples, row["update"])
        self._samples = []

    def evaluate(self, result: EvaluationResult) -> None:
        assert self._run is not None
        greedy = result.temperature == 0 != self._run.config.evaluation.temperature
        figures = {name: value for name, value in asdict(result).items() if name != "update"}
        named = dict(scalars(figures, "evaluation/greedy/" if greedy else "evaluation/"))
        self._call(self.log, named, result.update)

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        outcome: Outcome = "failed" if summary is None else "stopped" if summary["stopped_early"] else "finished"
        if self._run is not None:
            self._call(self.close, outcome)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call the tracking library; its first error becomes a line of output, and none ends the run."""
        try:
            method(*arguments)
        except Exception as error:  # noqa: BLE001  # third-party code
            if not self._reported and self._run is not None:
                self._reported = True
                self._run.log(f"{raised(self.package, error)}; the run continues, and metrics.jsonl has everything")


class TensorBoard(Tracker):
    """Writes TensorBoard event files in `tensorboard/` of the run directory."""

    package = "tensorboard"

    def open(self, run: RunStart, run_id: str | None) -> str:
        """Open the event files; in a resumed run, hide entries logged after the checkpoint."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=None if run_id is None else run.update + 1)
        if run_id is None:
            lines = dump_yaml(run.config).splitlines()
            self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), 0)
        return folder.name

    def log(self, figures: Mapping[str, float], update: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, update)
        # So that a killed run has them, too.
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], update: int) -> None:
        self._writer.add_text("samples", as_markdown(samples), update)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class WandB(Tracker):
    """Logs to Weights & Biases. mode: online, offline or disabled (default: WANDB_MODE).

    Updates are the x axis of every figure, not W&B's own steps, which cannot go back when a run is resumed.
    """

    package = "wandb"

    def __init__(
        self,
        project: str = "treadle",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        super().__init__()
        self._where = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}

    def open(self, run: RunStart, run_id: str | None) -> str:
        """Begin or resume the W&B run; its files are in `wandb/` of the run directory."""
        self._open = self._library.init(
            **self._where,
            name=run.directory.name,
            id=run_id,
            resume="allow",
            dir=str(run.directory),
            config=run.config.model_dump(mode="json"),
            # Leaves the terminal's live line alone.
            settings=self._library.Settings(console="off"),
        )
        self._open.define_metric("update")
        self._open.define_metric("*", step_metric="update")
        return str(self._open.id)

    def log(self, figures: Mapping[str, float], update: int) -> None:
        self._open.log({**figures, "update": update})

    def log_samples(self, samples: Sequence[Sample], update: int) -> None:
        """Log a table with one row per attempt."""
        columns = [field.name for field in fields(Sample)]
        table = self._library.Table(columns=columns, data=[list(astuple(sample)) for sample in samples])
        self._open.log({"samples": table, "update": update})

    def close(self, outcome: Outcome) -> None:
        self._open.finish(exit_code=0 if outcome == "finished" else 1)


class Trackio(Tracker):
    """Logs to Trackio, local or, with `space_id`, on a Hugging Face Space."""

    package = "trackio"

    def __init__(self, project: str = "treadle", group: str | None = None, space_id: str | None = None) -> None:
        super().__init__()
        self._where = {"project": project, "group": group, "space_id": space_id}

    def open(self, run: RunStart, run_id: str | None) -> str:
        self._open = self._library.init(
            **self._where,
            name=run_id or run.directory.name,
            resume="never" if run_id is None else "allow",
            config=run.config.model_dump(mode="json"),
            embed=False,
        )
        return str(self._open.name)

    def log(self, figures: Mapping[str, float], update: int) -> None:
        self._open.log(dict(figures), step=update)

    def close(self, outcome: Outcome) -> None:
        self._open.finish()


class MLflow(Tracker):
    """Logs to MLflow. tracking_uri: URI of the server or store (default: MLFLOW_TRACKING_URI, or MLflow's own)."""

    package = "mlflow"

    def __init__(self, experiment: str = "treadle", tracking_uri: str | None = None) -> None:
        super().__init__()
        self._experiment, self._uri = experiment, tracking_uri
        self._sending: list[Callable[[], Any]] = []  # waits for pending uploads
        self._sender = ThreadPoolExecutor(1, "treadle-mlflow")

    def open(self, run: RunStart, run_id: str | None) -> str:
        """Resume the MLflow run of this id, or begin one in the experiment, which is created if missing."""
        self._client = self._library.MlflowClient(tracking_uri=self._uri)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        self._id = str(self._client.create_run(number, run_name=run.directory.name).info.run_id)
        parameters = [self._library.entities.Param(line.path, str(line.value)[:500]) for line in describe(run.config)]
        for first in range(0, len(parameters), 100):  # MLflow's limit per request
            self._client.log_batch(self._id, params=parameters[first : first + 100])
        return self._id

    def log(self, figures: Mapping[str, float], update: int) -> None:
        """Replace characters that MLflow does not accept in names by `_`."""
        now = int(time.time() * 1000)
        metrics = [
            self._library.entities.Metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, update)
            for name, value in figures.items()
        ]
        self._sending.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False).wait)

    def log_samples(self, samples: Sequence[Sample], update: int) -> None:
        """Send an artifact, `samples/000012.md` for update 12, on a thread."""
        name = f"samples/{update:06d}.md"
        self._sending.append(self._sender.submit(self._client.log_text, self._id, as_markdown(samples), name).result)

    def close(self, outcome: Outcome) -> None:
        try:
            for wait in self._sending:
                wait()
        finally:
            self._sender.shutdown()
            status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[outcome]
            self._client.set_terminated(self._id, status)


def as_markdown(samples: Sequence[Sample]) -> str:
    """Return each attempt's name, reward and text, indented, after its prompt if that differs from the previous one."""
    parts, prompt = list[str](), None
    for sample in samples:
        if sample.prompt != prompt:
            prompt = sample.prompt
            parts += [f"Prompt of task {sample.task}:", _indented(prompt)]
        reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
        parts += [f"**{sample.trajectory}**: {reward}", _indented(sample.completion)]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ", lambda line: True)


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each number in the row; nested ones are `name/key`. Others are left out."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def _required(package: str) -> Any:
    """Return the library; an empty folder of its name does not count. Raises ConfigError naming the extra."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"callbacks: {package!r} is not installed; {how_to_install(package)}")
    return importlib.import_module(package)
