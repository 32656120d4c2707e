"""The picture of a demo: held-out success over the calls that the agent made. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.demo.report import Report
from headrace_operations.drawing import FAINT, INK, LINE, pyplot, save


def draw(report: Report, title: str, path: Path) -> bool:
    """Write a PNG; False when matplotlib is not installed, or no gate measured anything."""
    if not any(one.promoted and one.score is not None for one in report.versions):
        return False
    try:
        plt = pyplot()
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    measured = [(one.at_s, one.score * 100) for one in report.versions if one.promoted and one.score is not None]
    rejected = [one.at_s for one in report.versions if not one.promoted]
    times, scores = zip(*measured, strict=True)
    axes.step(times, scores, where="post", color=LINE, linewidth=2)
    axes.plot(times, scores, "o", color=LINE, label="took over")
    if rejected:
        axes.plot(rejected, [3] * len(rejected), "x", color=FAINT, label="refused")
        axes.legend(frameon=False, loc="lower right")
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("seconds of the agent's own traffic", color=INK)
    axes.set_ylabel("audit tasks answered right, %", color=INK)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color="#e9ecef")
    captured = f"{report.turns_captured:,} calls captured, {report.turns_trained:,} trained, {report.swaps} swaps"
    axes.text(
        0.01, 0.02, f"{captured}, {report.failed_requests} failed requests", transform=axes.transAxes, color=FAINT
    )
    save(figure, path)
    return True
