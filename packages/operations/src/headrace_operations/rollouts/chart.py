"""The confidence sequence of a rollout as letters in a terminal; `headrace_runtime.rollout_picture` draws it."""

from __future__ import annotations

from headrace_runtime.rollout_picture import Point, margin, points
from headrace_schemas.rollout_api import RolloutState


def drawn(rollout: RolloutState, metric: str, *, width: int = 72, height: int = 15) -> list[str]:
    """Lines: bars from end to end of the intervals, a dot for the difference, the zero line and the margin."""
    found = _thinned(points(rollout, metric), width)
    if not found:
        return [f"{metric}: no session is mature yet"]
    limit = margin(rollout, metric)
    far = max(1e-9, *(abs(end) for one in found[len(found) // 4 :] for end in one[1:]), abs(limit or 0.0) * 1.2)
    rows = [far - 2 * far * row / (height - 1) for row in range(height)]
    step = 2 * far / (height - 1)
    grounds = {} if limit is None else {_nearest(rows, limit): ("┄", f"{limit:+.3g}")}
    grounds[_nearest(rows, 0.0)] = ("─", "0")
    lines = []
    for level in rows:
        ground, label = grounds.get(level, (" ", f"{level:+.3g}" if level in (rows[0], rows[-1]) else ""))
        lines.append(f"{label:>8} ┤" + "".join(_letter(one, level, step, ground) for one in found))
    lines.append(" " * 9 + "└" + "─" * len(found))
    lines.append(" " * 10 + f"{found[0][0]:g} … {found[-1][0]:g} units of {rollout.version}; {metric}, less champion")
    return lines


def _letter(point: Point, level: float, step: float, ground: str) -> str:
    _, difference, lower, upper = point
    if abs(difference - level) < step / 2:
        return "●"
    return "│" if lower <= level + step / 2 and upper >= level - step / 2 else ground


def _nearest(rows: list[float], level: float) -> float:
    return min(rows, key=lambda row: abs(row - level))


def _thinned(found: list[Point], most: int) -> list[Point]:
    if len(found) <= most:
        return found
    return [found[round(at * (len(found) - 1) / (most - 1))] for at in range(most)]
