"""Charts: helpers that open matplotlib, and the text chart of a rollout.

`headrace_runtime.rollout_picture` draws the picture of a rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_runtime.rollout_picture import Point, margin, points
from headrace_schemas.http.registry_api import RolloutState
from headrace_schemas.values.text import printable_lines

INK, LINE, FAINT, WRONG = "#1f2933", "#0b7285", "#868e96", "#c92a2a"

_LABEL_LENGTH_MAX = 2_000


def draw_lines(rollout: RolloutState, metric: str, *, width: int = 72, height: int = 15) -> list[str]:
    """Draw a metric of a rollout as text: bars for intervals, dots for differences, the zero line and the margin.

    Returns:
        The lines of the chart.
    """
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


def summarize_shadow(rollout: RolloutState) -> list[str]:
    """Return lines of text about the shadow phase of a rollout, in which the candidate answers users' prompts again.

    A rollout without a shadow phase has no lines.
    """
    if not rollout.shadow_units:
        return []
    report = rollout.shadow
    if report is None:
        read = rollout.statistics.get("shadow_units", 0)
        return [f"shadow  {read:g} of {rollout.shadow_units} prompts read"]
    summary = [
        f"shadow  {report.read} of {report.prompts} prompts answered by both versions, {report.pairs} judged pairs, "
        f"{report.spoke} with user feedback, {report.tokens} tokens"
    ]
    if report.judged is not None:
        summary.append(f"        judges: {report.judged:+.3f}, uncorrected")
    if report.refused is not None:
        summary.append(f"        users: no estimate, {report.refused}")
    elif report.difference is not None:
        ends = f"[{report.lower or 0.0:+.3f}, {report.upper or 0.0:+.3f}]"
        counts = f"{report.spoke} answers count as {report.effective:.0f}"
        summary.append(f"        users: {report.difference:+.3f} in {ends}, {counts}")
    summary += [
        f"        {number} ended otherwise, {how.replace('_', ' ')}" for how, number in sorted(report.ended.items())
    ]
    summary += [f"        {number} left out, {why}" for why, number in sorted(report.left_out.items())]
    return summary


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend that opens no window.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Save the figure as PNG without its upper and right frame lines, and close it."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names may come from users: render no formulas, no invisible characters
        text.set_parse_math(False)
        text.set_text(printable_lines(text.get_text(), _LABEL_LENGTH_MAX))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)
