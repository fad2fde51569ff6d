"""The picture of a run says what it shows."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from treadle.orchestration.reporting.curve import draw_curve, smoothed


def draw(updates: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Label -> y values of the lines that were drawn."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def kept(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    rows = [{"kind": "update", "update": n + 1, "reward_mean": float(n % 2)} for n in range(updates)]
    draw_curve(rows, path, "a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    return {str(line.get_label()): list(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}  # type: ignore[arg-type]


@pytest.mark.parametrize("updates", [1, 4, 9, 17])
def test_a_short_run_has_no_moving_average(updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(draw(updates, tmp_path / "curve.png", monkeypatch)) == ["reward in training"]


def test_a_longer_run_has_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = draw(18, tmp_path / "curve.png", monkeypatch)
    reward = lines["reward in training"]
    assert reward == [float(n % 2) for n in range(18)]
    assert lines["... moving average over 9 updates"] == smoothed(reward)
    assert smoothed(reward)[8] == sum(reward[4:13]) / 9
