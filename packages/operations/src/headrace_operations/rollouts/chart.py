"""Text chart of a rollout's confidence sequence; `headrace_runtime.rollout_picture` draws it as a picture."""

from __future__ import annotations

from headrace_runtime.rollout_picture import Point, margin, points
from headrace_schemas.http.rollout_api import RolloutState


def draw_lines(rollout: RolloutState, metric: str, *, width: int = 72, height: int = 15) -> list[str]:
    """Return the lines of the chart: bars for intervals, dots for differences, the zero line and the margin."""
    shown_points = _thin_out(points(rollout, metric), width)
    if not shown_points:
        return [f"{metric}: no session has reached the age at which it is read"]
    limit = margin(rollout, metric)
    ends = (abs(end) for point in shown_points[len(shown_points) // 4 :] for end in point[1:])
    extent = max(1e-9, *ends, abs(limit or 0.0) * 1.2)
    rows = [extent - 2 * extent * row / (height - 1) for row in range(height)]
    step = 2 * extent / (height - 1)
    axis_lines = {} if limit is None else {_nearest(rows, limit): ("┄", f"{limit:+.3g}")}
    axis_lines[_nearest(rows, 0.0)] = ("─", "0")
    lines = []
    for level in rows:
        axis, label = axis_lines.get(level, (" ", f"{level:+.3g}" if level in (rows[0], rows[-1]) else ""))
        lines.append(f"{label:>8} ┤" + "".join(_letter(point, level, step, axis) for point in shown_points))
    lines.append(" " * 9 + "└" + "─" * len(shown_points))
    lines.append(
        " " * 10
        + f"{shown_points[0][0]:g} … {shown_points[-1][0]:g} units of {rollout.version}; {metric}, minus champion"
    )
    return lines


def _letter(point: Point, level: float, step: float, background: str) -> str:
    _, difference, lower, upper = point
    if abs(difference - level) < step / 2:
        return "●"
    return "│" if lower <= level + step / 2 and upper >= level - step / 2 else background


def _nearest(rows: list[float], level: float) -> float:
    return min(rows, key=lambda row: abs(row - level))


def _thin_out(points: list[Point], count: int) -> list[Point]:
    if len(points) <= count:
        return points
    return [points[round(at * (len(points) - 1) / (count - 1))] for at in range(count)]
