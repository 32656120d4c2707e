"""Chart of a report: the gain of each control. It needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from headrace_operations.controls.report import Report
from headrace_operations.drawing import FAINT, INK, LINE, WRONG, pyplot, save


def draw(report: Report, path: Path) -> bool:
    """Write a PNG; return False if matplotlib is not installed."""
    try:
        plt = pyplot()
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 0.5 * len(report.rows) + 1.4), dpi=150)
    axes.axvline(0, color=FAINT, linewidth=1)
    for y, row in zip(range(len(report.rows))[::-1], report.rows, strict=True):
        axes.errorbar(
            row.gain.value * 100,
            y,
            xerr=200 * row.gain.error,
            fmt="o",
            color=LINE if row.as_expected else WRONG,
            capsize=3,
        )
    axes.set_yticks(range(len(report.rows))[::-1], [row.control.name for row in report.rows])
    axes.set_xlabel("gain over the base, points, with two standard errors", color=INK)
    save(figure, path)
    return True
