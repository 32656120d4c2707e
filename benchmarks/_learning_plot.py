"""Plot of docs/controls.md: gains by control and by lag, and reward against score during training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks._learning_lines import FORMAT, Table
from headrace_operations.controls import kinds
from headrace_operations.drawing import FAINT, INK, LINE, WRONG, pyplot, save
from headrace_statistics.clustered_means import mean


def draw(table: Table, path: Path) -> None:
    figure, (left, middle, right) = pyplot().subplots(1, 3, figsize=(11, 3.8), dpi=130, width_ratios=(1.3, 0.8, 1.2))
    _gains(left, table)
    _lags(middle, table)
    _traces(right, table)
    for axes in (left, middle, right):
        axes.tick_params(labelsize=8)
    save(figure, path)


def _gains(axes: Any, table: Table) -> None:
    arms = [arm for arm in table.arms if not arm.startswith("lag ")]
    gains = [table.gain(arm) for arm in arms]
    positions = range(len(arms))[::-1]
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.errorbar(
        [gain.value * 100 for gain in gains], positions, xerr=[200 * gain.error for gain in gains], fmt="o", color=LINE,
        markersize=4, capsize=2,
    )  # fmt: skip
    for position, gain in zip(positions, gains, strict=True):
        axes.plot([value * 100 for value in gain.by_seed], [position] * len(gain.by_seed), "|", color=FAINT)
    axes.set_yticks(list(positions), [arm.removeprefix("function:") for arm in arms])
    axes.set_title("gain over the base, points (± 2 errors; each seed)", loc="left", color=INK, fontsize=9)


def _lags(axes: Any, table: Table) -> None:
    lags = {0: kinds.TRUE.name} | {int(arm.split()[1]): arm for arm in table.arms if arm.startswith("lag ")}
    scores = [(lag, table.score(arm)) for lag, arm in sorted(lags.items()) if arm in table.arms]
    axes.errorbar(
        [lag for lag, _ in scores], [score.value * 100 for _, score in scores],
        yerr=[200 * score.error for _, score in scores], fmt="o-", color=LINE, markersize=4, capsize=2,
    )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlabel("lag, steps", fontsize=8, color=INK)
    axes.set_title("held-out score, %", loc="left", color=INK, fontsize=9)


def _traces(axes: Any, table: Table) -> None:
    for arm, colour in ((kinds.TRUE.name, LINE), (FORMAT, WRONG)):
        traces = [run.trace for run in table.arms.get(arm, []) if run.trace]
        if not traces:
            continue
        steps = [step for step, *_ in traces[0]]
        together = list(zip(*traces, strict=True))
        rewards = [100 * statistics.fmean(reward for _, reward, _ in at) for at in together]
        scores = [100 * mean([plays for *_, plays in at]).value for at in together]
        axes.plot(steps, scores, "o-", color=colour, markersize=3, label=f"{arm.removeprefix('function:')}: score")
        axes.plot(steps, rewards, "--", color=colour, label=f"{arm.removeprefix('function:')}: reward")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=7)
    axes.set_xlabel("steps", fontsize=8, color=INK)
    axes.set_title("reward and held-out score, %", loc="left", color=INK, fontsize=9)
