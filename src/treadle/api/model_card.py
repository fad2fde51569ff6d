"""README.md of an export: training data, method and results of the model. Needs no torch."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle import __version__
from treadle.core.config import as_override, describe
from treadle.core.text import escape_line
from treadle.data.config import sources_of
from treadle.models.model_files import ADAPTER_CONFIG, BASE, is_hub_name
from treadle.plan.config import RunConfig

CARD = "README.md"
_ROWS = 11  # rows of the table without evaluations
_LEARNED = re.compile(
    r"(warm_start|rollout|rewards|algorithm|training)\..*|orchestration\.(updates|max_staleness)|seed"
)
_COSTS = re.compile(r"rollout\.(gateway.*|.*timeout)|training\.(threads|packing|sharing|.*microbatch|.*checkpointing)")
_FRONT_MATTER, _LICENCE = re.compile(r"---\n.*?\n---\n", re.DOTALL), re.compile(r"^license: *(\S+) *$", re.MULTILINE)
_LICENCE_FILE = re.compile(r"LICEN[SC]E.*", re.IGNORECASE)


def model_card(config: RunConfig, rows: Sequence[Mapping[str, Any]], update: int, files: Mapping[str, bytes]) -> bytes:
    """Return the model card, headed by the YAML for the hub.

    rows: rows of metrics.jsonl. update: update of the checkpoint. files: the model's files, including the base's own
    card and license, which are kept.
    """
    base, licence = config.model.path or config.model.adapter or "", find_licence(files)
    head: dict[str, Any] = {
        "library_name": "peft" if ADAPTER_CONFIG in files else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["treadle", "reinforcement-learning"],
        **({"base_model": base.partition("@")[0]} if is_hub_name(base) else {}),
        **({"license": licence} if licence and not _LICENCE_FILE.fullmatch(licence) else {}),
    }
    start = _code(_name(base)) if base else "random weights"
    sources = ", ".join(_code(_name(source.source)) for source in sources_of(config.data.train))
    player = f", {config.player.kind} {_code(config.player.name)}" if config.player.name else ""
    blocks: list[Iterable[str]] = [
        ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---"],
        [f"# {_plain(config.recipe)}"],
        [f"Trained with Treadle {__version__} from {start}, {update} updates. Tasks: {sources}{player}."],
        [_plain(config.about)],
        ["## Results"],
        _table(config, rows, update),
        ["## Settings"],
        ["What differs from Treadle's defaults, and changes what is learned:"],
        ["```yaml", *_settings(config), "```"],
        ["## Licence"],
        [f"That of the base: {_plain(licence)}." if licence else "The files of the base name none."],
    ]
    texts = ("\n".join(map(escape_line, block)) for block in blocks)
    return ("\n\n".join(text for text in texts if text) + "\n").encode()


def _plain(text: str) -> str:
    """Return Markdown that shows the text literally, without HTML, links and images."""
    return html.escape(re.sub(r"[\\`*\[\]!|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text), quote=False)


def _code(text: str) -> str:
    """Return a code span of the text, with a fence longer than any in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def find_licence(files: Mapping[str, bytes]) -> str | None:
    """Return the license stated in a base's files: its id, or the name of the file with its text; None without one."""
    if BASE in files and (base := Path(json.loads(files[BASE])["path"])).is_dir():  # for an adapter
        beside = (path for path in base.iterdir() if path.is_file() and path.suffix != ".safetensors")
        files = {path.name: path.read_bytes() for path in beside}
    card = _FRONT_MATTER.match(files.get(CARD, b"").decode(errors="replace"))
    if card and (found := _LICENCE.search(card[0])):
        return found[1]
    if (source := files.get("source.json")) and (licence := json.loads(source).get("licence")):  # for a converted model
        return str(licence)
    return next((name for name in sorted(files) if _LICENCE_FILE.fullmatch(name)), None)


def _table(config: RunConfig, rows: Sequence[Mapping[str, Any]], update: int) -> Iterator[str]:
    """Yield a row per evaluation, or evenly spaced ones without any. Training reward is a mean since the row before."""
    rewards = {row["update"]: row["reward_mean"] for row in rows if row["kind"] == "update"}
    held_out = {
        row["update"]: row
        for row in rows
        if row["kind"] == "evaluation" and row["temperature"] == config.evaluation.temperature
    }
    points = sorted(held_out) or range(0, update + 1, -(-update // (_ROWS - 1)) or 1)
    yield "| update | training reward | held-out reward | held-out success |"
    yield "| --- | --- | --- | --- |"
    before = 0
    for point in points:
        if point <= update:
            trained = [rewards[u] for u in range(before + 1, point + 1) if rewards.get(u) is not None]
            row = held_out.get(point, {})
            figures = (fmean(trained) if trained else None, row.get("reward_mean"), row.get("success"))
            yield f"| {point} | " + " | ".join("" if each is None else f"{each:.3f}" for each in figures) + " |"
            before = point


def _settings(config: RunConfig) -> Iterator[str]:
    for line in describe(config):
        is_shown = _LEARNED.fullmatch(line.path) and not _COSTS.fullmatch(line.path)
        if is_shown and (not line.is_default or line.path == "seed"):
            value = _name(line.value) if isinstance(line.value, str) else as_override(line.value)
            yield f"{line.path}: {value}"


def _name(path: str) -> str:
    """Return a model's or file's name without this machine's directories."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(".") else path
