"""The picture of a report: what each control gained. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from headrace.controls.report import Report

_INK, _LINE, _FAINT, _WRONG = "#1f2933", "#0b7285", "#868e96", "#c92a2a"


def draw(report: Report, path: Path) -> bool:
    """Write a PNG; False when matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 0.5 * len(report.rows) + 1.4), dpi=150)
    axes.axvline(0, color=_FAINT, linewidth=1)
    for place, row in zip(range(len(report.rows))[::-1], report.rows, strict=True):
        axes.errorbar(
            row.gain.value * 100,
            place,
            xerr=200 * row.gain.error,
            fmt="o",
            color=_LINE if row.as_expected else _WRONG,
            capsize=3,
        )
    axes.set_yticks(range(len(report.rows))[::-1], [row.control.name for row in report.rows])
    axes.set_xlabel("gain over the base, points, with two standard errors", color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return True
