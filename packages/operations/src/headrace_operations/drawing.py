"""Shared helpers of all charts: colours, opening matplotlib, saving a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_schemas.values.text import printable_lines

INK, LINE, FAINT, WRONG = "#1f2933", "#0b7285", "#868e96", "#c92a2a"

_LABEL_LENGTH_MAX = 2_000


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
