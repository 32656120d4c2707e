"""The picture of a demo: held-out success over the calls that the agent made. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from headrace.demo.report import Report

_INK, _LINE, _FAINT = "#1f2933", "#0b7285", "#868e96"


def draw(report: Report, title: str, path: Path) -> bool:
    """Write a PNG; False when matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    measured = [(one.at_s, one.score * 100) for one in report.versions if one.promoted and one.score is not None]
    rejected = [one.at_s for one in report.versions if not one.promoted]
    times, scores = zip(*measured, strict=True)
    axes.step(times, scores, where="post", color=_LINE, linewidth=2)
    axes.plot(times, scores, "o", color=_LINE, label="took over")
    if rejected:
        axes.plot(rejected, [3] * len(rejected), "x", color=_FAINT, label="refused")
        axes.legend(frameon=False, loc="lower right")
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.set_xlabel("seconds of the agent's own traffic", color=_INK)
    axes.set_ylabel("audit tasks answered right, %", color=_INK)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color="#e9ecef")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    captured = f"{report.turns_captured:,} calls captured, {report.turns_trained:,} trained, {report.swaps} swaps"
    axes.text(
        0.01, 0.02, f"{captured}, {report.failed_requests} failed requests", transform=axes.transAxes, color=_FAINT
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return True
