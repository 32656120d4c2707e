"""Chart of a demo: held-out success over the time of the agent's traffic. It needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.demo.report import Report
from headrace_operations.drawing import FAINT, INK, LINE, pyplot, save


def draw(report: Report, title: str, path: Path) -> bool:
    """Write a PNG; return False if matplotlib is not installed or no version has a score."""
    if not any(version.promoted and version.score is not None for version in report.versions):
        return False
    try:
        plt = pyplot()
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    scored = [
        (version.at_s, version.score * 100)
        for version in report.versions
        if version.promoted and version.score is not None
    ]
    rejected = [version.at_s for version in report.versions if not version.promoted]
    times, scores = zip(*scored, strict=True)
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
