"""Charts as SVG elements without scripts and inline styles: marks with intervals, and horizontal lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 800, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
POINTS_MAX = 400


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a chart: a value at `x` with its interval. A version that was refused is drawn as a hollow point."""

    x: float
    value: float
    lower: float
    upper: float
    label: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal line across a chart with its label, for example the margin of a guardrail."""

    value: float
    label: str


def interval_chart(title: str, marks: Sequence[Mark], lines: Sequence[Line] = (), *, below: str = "") -> Markup:
    """Return a chart of values with their intervals as an SVG element.

    At most `POINTS_MAX` marks are drawn, chosen at equal distances.

    Args:
        title: description for screen readers.
        marks: values by ascending `x`.
        lines: horizontal lines.
        below: caption of the horizontal axis.
    """
    drawn = _thin_out([mark for mark in marks if _is_finite(mark)])
    if not drawn:
        return Markup()
    ends = [end for mark in drawn for end in (mark.lower, mark.upper)] + [line.value for line in lines]
    low, high = min(ends), max(ends)
    padding = (high - low) * 0.06 or 0.5
    low, high = low - padding, high + padding
    first, last = drawn[0].x, drawn[-1].x

    def x_of(x: float) -> float:
        inner = WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * ((x - first) / (last - first) if last > first else 0.5)

    def y_of(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    levels = _levels(low, high)
    digits = max(2, -math.floor(math.log10(levels[1] - levels[0])))
    parts = [_grid_line(y_of(level), f"{level:.{digits}f}") for level in levels]
    parts += [_limit_line(y_of(line.value), line.label) for line in lines]
    path = " ".join(f"{x_of(mark.x):.1f},{y_of(mark.value):.1f}" for mark in drawn)
    parts.append(Markup('<polyline class="course" points="{}"/>').format(path))
    parts += [_drawn_mark(mark, x_of(mark.x), y_of) for mark in drawn]
    if below:
        caption = Markup('<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>')
        parts.append(caption.format(WIDTH // 2, HEIGHT - 8, below))
    frame = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return frame.format(WIDTH, HEIGHT, title, Markup("").join(parts))


def _drawn_mark(mark: Mark, x: float, y_of: object) -> Markup:
    assert callable(y_of)
    element = Markup(
        '<g><title>{}</title><line class="interval" x1="{x:.1f}" x2="{x:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
        '<circle class="{}" cx="{x:.1f}" cy="{:.1f}" r="4"/></g>'
    )
    kind = "hollow" if mark.hollow else "mark"
    return element.format(mark.label, y_of(mark.lower), y_of(mark.upper), kind, y_of(mark.value), x=x)


def _grid_line(y: float, label: str) -> Markup:
    line = Markup(
        '<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>'
        '<text class="label" x="{}" y="{y:.1f}" text-anchor="end" dominant-baseline="middle">{}</text>'
    )
    return line.format(_LEFT, WIDTH - _RIGHT, _LEFT - 6, label, y=y)


def _limit_line(y: float, label: str) -> Markup:
    line = Markup(
        '<line class="limit" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/><text class="label" x="{}" y="{:.1f}">{}</text>'
    )
    return line.format(_LEFT, WIDTH - _RIGHT, _LEFT + 4, y - 4, label, y=y)


def _levels(low: float, high: float) -> list[float]:
    """Return three to eight round numbers between `low` and `high`."""
    widest = (high - low) / 3
    power = 10 ** math.floor(math.log10(widest))
    step = next(factor * power for factor in (5, 2, 1) if factor * power <= widest)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _is_finite(mark: Mark) -> bool:
    return all(math.isfinite(number) for number in (mark.x, mark.value, mark.lower, mark.upper))


def _thin_out(marks: list[Mark]) -> list[Mark]:
    if len(marks) <= POINTS_MAX:
        return marks
    return [marks[round(number * (len(marks) - 1) / (POINTS_MAX - 1))] for number in range(POINTS_MAX)]
