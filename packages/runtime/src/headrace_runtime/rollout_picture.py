"""Picture of a rollout as a PNG file: its confidence sequence, its metrics and its decisions.

The registry writes a report for each decision, and `headrace rollouts report` on request. Both need matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_schemas.http.registry_api import RolloutState

Point = tuple[float, float, float, float]
"""Point of the chart: number of the candidate's units, difference to the champion, and the bounds of its interval."""
_INK, _LINE, _FAINT, _WRONG = "#1f2933", "#0b7285", "#868e96", "#c92a2a"
_DECISIONS_MAX = 8
_REASON_MAX = 96


def metric_of(rollout: RolloutState) -> str:
    """Return the metric that is drawn by default: the first guardrail, else `reward`."""
    return next(iter(rollout.margins), "reward")


def points(rollout: RolloutState, metric: str) -> list[Point]:
    """Return the points of the chart of one metric in order of time. Of several points after the same number of
    sessions or users of the candidate, only the last is returned."""
    last_points = {
        point.units: (point.units, *point.metrics[metric]) for point in rollout.chart if metric in point.metrics
    }
    return list(last_points.values())


def margin(rollout: RolloutState, metric: str) -> float | None:
    """Return the difference at which a guardrail fails, negative if higher values are better; None if `metric` is not a
    guardrail."""
    width = rollout.margins.get(metric)
    if width is None:
        return None
    return -width if rollout.higher_is_better.get(metric, True) else width


def intervals(rollout: RolloutState) -> list[tuple[str, ...]]:
    """Return the rows of the table of metrics: name, difference, bounds of its interval, and margin."""
    rows = []
    for name in rollout.higher_is_better:
        ends = [rollout.statistics.get(f"{name}.{part}") for part in ("difference", "lower", "upper")]
        numbers = tuple("-" if end is None else f"{end:+.3f}" for end in ends)
        rows.append((name, *numbers, f"{rollout.margins[name]:g}" if name in rollout.margins else "-"))
    return rows


def picture(rollout: RolloutState, metric: str, path: Path) -> bool:
    """Draw the chart of one metric of a rollout, with the table of all metrics, to the PNG file `path`. Return False if
    matplotlib is not installed. Thread-safe."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8.4, 7.2), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _sequence(above, rollout, metric)
    _table(below, rollout)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)
    return True


def _sequence(axes: Any, rollout: RolloutState, metric: str) -> None:
    sequence, limit = points(rollout, metric), margin(rollout, metric)
    units = [point[0] for point in sequence]
    lower, upper = [point[2] for point in sequence], [point[3] for point in sequence]
    axes.fill_between(units, lower, upper, color=_LINE, alpha=0.2, linewidth=0)
    axes.plot(units, [point[1] for point in sequence], color=_LINE, linewidth=2)
    axes.axhline(0, color=_INK, linewidth=0.8)
    if limit is not None:
        axes.axhline(limit, color=_WRONG, linewidth=0.8, linestyle="--")
    if not sequence:
        axes.text(0.5, 0.6, "no session is mature yet", transform=axes.transAxes, color=_FAINT, ha="center")
    title = f"{rollout.version}: {rollout.phase.replace('_', ' ')}"
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.set_xlabel("units of the candidate", color=_INK)
    axes.set_ylabel(f"{metric}, candidate minus champion", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)


def _table(axes: Any, rollout: RolloutState) -> None:
    axes.set_axis_off()
    numbers = rollout.statistics
    arms = f"{numbers.get('candidate_units', 0):g} units with it, {numbers.get('control_units', 0):g} with its control"
    met = f", {numbers['exposure']:.1%} of the traffic met it" if "exposure" in numbers else ""
    lines = [f"against {rollout.control}; {arms}{met}; watched for {rollout.watched_s:.0f} s", ""]
    columns = ("metric", "difference", "from", "to", "margin")
    lines += ["{:26}{:>11}{:>9}{:>9}{:>8}".format(*row) for row in (columns, *intervals(rollout))]
    lines.append("")
    for event in rollout.decisions[-_DECISIONS_MAX:]:
        kind = event.rollout.kind.replace("_", " ") if event.rollout else event.decision
        share = f" {event.rollout.share}" if event.rollout else ""
        lines.append(f"{event.time:%m-%d %H:%M:%S} {kind}{share}: {(event.reason or '')[:_REASON_MAX]}")
    axes.text(0, 1, "\n".join(lines), transform=axes.transAxes, va="top", family="monospace", fontsize=6.5, color=_INK)
