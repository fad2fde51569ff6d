"""The curves of runs: which runs are one line, where its mean and band are, and what is in which panel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import tiny
from treadle.core.config_diff import leaves
from treadle.report.curve import Panel, RunMetrics, draw_runs, group_runs, make_figure, panels, smoothed

REWARD, STEPS = "training reward", "steps per trajectory, training"
TOKENS = "completion tokens per trajectory, training"


def update(number: int, reward: float | None = 0.5, tokens: float = 9.0) -> dict[str, Any]:
    found = {"kind": "update", "update": number, "reward_mean": reward}
    return {**found, "completion_tokens_mean": tokens, "steps_mean": 2.0}


def evaluation(number: int, success: float | None, temperature: float = 1.0, **by: float) -> dict[str, Any]:
    found = {"kind": "evaluation", "update": number, "temperature": temperature, "success": success}
    return {**found, "by": by, "by_tasks": dict.fromkeys(by, 4)}


def a_run(*overrides: str, rewards: Sequence[float | None] | None = None, evaluations: Any = ()) -> RunMetrics:
    rows = [update(n, reward) for n, reward in enumerate(rewards or [0.5], 1)]
    return RunMetrics(leaves(tiny(*overrides)), [*rows, *evaluations])


def shown(*runs: RunMetrics) -> dict[str, Panel]:
    """Title -> panel."""
    return {panel.title: panel for panel in panels(group_runs(runs))}


# --- which runs are one line ------------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_only_are_one_group() -> None:
    groups = group_runs(
        [a_run("seed=0"), a_run("seed=0", "training.packing=step"), a_run("seed=1"), a_run("seed=2", "about=another")]
    )
    assert [[run.settings["seed"] for run in group.runs] for group in groups] == [[0, 1, 2], [0]]
    packing = tiny().training.packing
    assert [group.label for group in groups] == [f"training.packing={packing}", "training.packing=step"]


def test_a_label_of_many_keys_has_those_that_tell_the_groups_apart() -> None:
    """The recipes of two groups are the same, so that their name alone would not do."""
    other = ["recipe=other", "training.epochs_per_batch=2", "orchestration.checkpoint_every=7", "evaluation.every=9"]
    runs = [a_run(), a_run(*other), a_run(*other, "failures.max_failed_fraction=0.7")]
    labels = [group.label for group in group_runs(runs)]
    assert all("recipe=" in label and "failures.max_failed_fraction=" in label for label in labels)
    assert all(label.count("=") == 3 and label.endswith(", 2 more keys") for label in labels)


SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "training.packing": st.sampled_from(["step", "chain", "tree"]),
        "evaluation.every": st.integers(1, 2),
        "orchestration.checkpoint_every": st.integers(1, 2),
        "orchestration.updates": st.integers(1, 2),
        "failures.max_failed_fraction": st.sampled_from([0.5, 0.6]),
    }
)


@given(st.lists(SETTINGS, min_size=1, max_size=6))
def test_each_run_is_in_one_group_and_each_group_has_a_label_of_its_own(settings: list[dict[str, Any]]) -> None:
    runs = [RunMetrics(leaves(tiny(*(f"{key}={value}" for key, value in own.items()))), []) for own in settings]
    groups = group_runs(runs)
    expected = {tuple(own[key] for key in sorted(own) if key != "seed") for own in settings}
    assert len(groups) == len(expected) == len({group.label for group in groups})
    assert sorted(id(run) for group in groups for run in group.runs) == sorted(map(id, runs))
    for group in groups:
        assert len({repr({**run.settings, "seed": 0}) for run in group.runs}) == 1


# --- a line and its band ----------------------------------------------------------------------------------------------


def test_the_mean_and_the_lowest_and_highest_of_the_runs() -> None:
    runs = [a_run(f"seed={n}", rewards=rewards) for n, rewards in enumerate(([0.0, 0.3], [0.1, 0.9], [0.5, 0.6]))]
    [curve] = shown(*runs)[REWARD].curves
    lowest, highest = curve.values.min(axis=0), curve.values.max(axis=0)
    np.testing.assert_allclose([curve.mean, lowest, highest], [[0.2, 0.6], [0.0, 0.3], [0.5, 0.9]])
    assert curve.updates == (1, 2) and not curve.is_smoothed


def test_a_mean_is_over_all_runs_of_the_line() -> None:
    """Not over fewer of them where one is shorter, or has no reward in an update: the line would jump there."""
    runs = [a_run("seed=0", rewards=[0.0, 0.1, None, 0.3, 0.4]), a_run("seed=1", rewards=[1.0, 1.0, 1.0, 1.0])]
    [curve] = shown(*runs)[REWARD].curves
    assert curve.updates == (1, 2, 4) and curve.mean.tolist() == [0.5, 0.55, 0.65]


def test_a_longer_run_has_both() -> None:
    rewards = [float(n % 2) for n in range(18)]
    [curve] = shown(a_run(rewards=[*rewards]))[REWARD].curves
    assert curve.is_smoothed and curve.measured.tolist() == [rewards]
    assert curve.mean.tolist() == smoothed(rewards)
    assert smoothed(rewards)[8] == sum(rewards[4:13]) / 9


# --- panels -----------------------------------------------------------------------------------------------------------


def held_out(*settings: str) -> RunMetrics:
    rows = [
        evaluation(0, 0.2, **{"1": 0.4, "2": 0.0}),
        evaluation(0, 0.5, temperature=0.0, **{"1": 0.5, "2": 0.5}),
        evaluation(4, 0.6, **{"1": 1.0, "2": 0.2}),
    ]
    return a_run("data.table_by=hops", *settings, evaluations=rows)


def test_one_line_has_its_kinds_of_tasks_in_one_panel() -> None:
    found = shown(held_out())
    assert list(found) == [REWARD, "held-out success", TOKENS, STEPS]
    success = found["held-out success"]
    assert {curve.label: curve.mean.tolist() for curve in success.curves} == {
        "all": [0.2, 0.6],
        "hops 1": [0.4, 1.0],
        "hops 2": [0.0, 0.2],
    }
    assert [(curve.updates, curve.mean.tolist()) for curve in success.greedy] == [((0,), [0.5])]
    assert success.is_share


def test_several_lines_have_a_panel_for_each_kind() -> None:
    found = shown(held_out(), held_out("training.packing=step"), held_out("seed=1"))
    kinds = ["held-out success, all tasks", "held-out success, hops 1", "held-out success, hops 2"]
    assert list(found) == [REWARD, *kinds, TOKENS, STEPS]
    for title in kinds:
        assert [curve.group for curve in found[title].curves] == [0, 1]
        assert [len(curve.values) for curve in found[title].curves] == [2, 1]
    assert found["held-out success, hops 2"].curves[1].mean.tolist() == [0.0, 0.2]
    assert [bool(found[title].greedy) for title in kinds] == [True, False, False]


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_what_tasks_and_recipes_are_called_is_shown_and_never_interpreted(tmp_path: Path, suffix: str) -> None:
    r"""`$\frac$` would be a formula that cannot be read; no font of matplotlib's has every character."""
    names = dict.fromkeys((r"$\frac$", "_hidden", "数学", "a\x1b[2J\nb", "\ud800", "word " * 99, " "), 0.1)
    evaluations = [evaluation(0, 0.5, **names)]
    runs = [
        a_run("data.table_by=_$k$", f"training.packing={packing}", r"recipe='_$\frac$'", evaluations=evaluations)
        for packing in ("step", "chain", "tree")
    ]
    for number in (1, 3):
        path = tmp_path / f"curve{suffix}"
        draw_runs(runs[:number], path)
        assert path.stat().st_size > 1000
    groups = group_runs(runs[:1])
    figure = make_figure(groups, panels(groups))
    labels = [str(line.get_label()) for line in figure.axes[1].get_lines()]
    assert r" _\$k\$ \$\frac\$" in labels and r" _\$k\$ a\x1b[2J\nb" in labels


def test_the_legend_says_what_the_band_is_and_of_how_many_runs() -> None:
    groups = group_runs([a_run(f"seed={n}", f"training.packing={p}") for n, p in enumerate(["step", "step", "tree"])])
    [legend] = make_figure(groups, panels(groups)).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "training.packing=step (2 runs)",
        "training.packing=tree (1 run)",
        "line: mean over runs that differ in the seed only; band: from the lowest of them to the highest",
    ]
