"""The confidence sequence of a rollout, as letters in a terminal or as a picture."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.drawing import FAINT, INK, LINE, WRONG, pyplot, save
from headrace_schemas.rollout_api import RolloutState

Point = tuple[float, float, float, float]
"""Units of the candidate, the difference, and the ends of its interval."""


def metric_of(rollout: RolloutState) -> str:
    """The one that is drawn unless another is asked for: the first guardrail."""
    return next(iter(rollout.margins), "reward")


def points(rollout: RolloutState, metric: str) -> list[Point]:
    """In the order of time, one for each number of units: the last."""
    found = {one.units: (one.units, *one.metrics[metric]) for one in rollout.chart if metric in one.metrics}
    return list(found.values())


def margin(rollout: RolloutState, metric: str) -> float | None:
    """Where the loss begins that a guardrail does not allow: below zero where more is better."""
    width = rollout.margins.get(metric)
    if width is None:
        return None
    return -width if rollout.higher_is_better.get(metric, True) else width


def drawn(rollout: RolloutState, metric: str, *, width: int = 72, height: int = 15) -> list[str]:
    """Lines: bars from end to end of the intervals, a dot for the difference, the zero line and the margin."""
    found = _thinned(points(rollout, metric), width)
    if not found:
        return [f"{metric}: no session is mature yet"]
    limit = margin(rollout, metric)
    far = max(1e-9, *(abs(end) for one in found[len(found) // 4 :] for end in one[1:]), abs(limit or 0.0) * 1.2)
    rows = [far - 2 * far * row / (height - 1) for row in range(height)]
    step = 2 * far / (height - 1)
    lines = []
    for level in rows:
        zero = abs(level) < step / 2
        at_margin = limit is not None and abs(level - limit) < step / 2
        label = "0" if zero else f"{level:+.3g}" if level in (rows[0], rows[-1]) or at_margin else ""
        ground = "─" if zero else "┄" if at_margin else " "
        lines.append(f"{label:>8} ┤" + "".join(_letter(one, level, step, ground) for one in found))
    lines.append(" " * 9 + "└" + "─" * len(found))
    lines.append(" " * 10 + f"{found[0][0]:g} … {found[-1][0]:g} units of {rollout.version}; {metric}, less champion")
    return lines


def _letter(point: Point, level: float, step: float, ground: str) -> str:
    _, difference, lower, upper = point
    if abs(difference - level) < step / 2:
        return "●"
    return "│" if lower <= level + step / 2 and upper >= level - step / 2 else ground


def _thinned(found: list[Point], most: int) -> list[Point]:
    if len(found) <= most:
        return found
    return [found[round(at * (len(found) - 1) / (most - 1))] for at in range(most)]


def picture(rollout: RolloutState, metric: str, path: Path) -> bool:
    """Write a PNG; False when matplotlib is not installed."""
    try:
        plt = pyplot()
    except ImportError:
        return False
    found = points(rollout, metric)
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    units = [one[0] for one in found]
    axes.fill_between(units, [one[2] for one in found], [one[3] for one in found], color=LINE, alpha=0.2, linewidth=0)
    axes.plot(units, [one[1] for one in found], color=LINE, linewidth=2)
    axes.axhline(0, color=INK, linewidth=0.8)
    limit = margin(rollout, metric)
    if limit is not None:
        axes.axhline(limit, color=WRONG, linewidth=0.8, linestyle="--")
    axes.set_title(f"{rollout.version}: {rollout.phase.replace('_', ' ')}", loc="left", color=INK, fontsize=11)
    axes.set_xlabel("units of the candidate", color=INK)
    axes.set_ylabel(f"{metric}, candidate less champion", color=INK)
    axes.text(0.01, 0.02, rollout.reason[:110], transform=axes.transAxes, color=FAINT, fontsize=7)
    save(figure, path)
    return True
