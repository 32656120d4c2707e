"""What all pictures share: colours, how matplotlib is opened, how a figure becomes a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_schemas.text import printable_lines

INK, LINE, FAINT, WRONG = "#1f2933", "#0b7285", "#868e96", "#c92a2a"

_LABEL_LENGTH_MAX = 2_000


def pyplot() -> Any:
    """`matplotlib.pyplot` without a window. Raises `ImportError` when matplotlib is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a PNG, without the frame's upper and right sides, and close the figure."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # names of versions and metrics: no formulas, nothing invisible
        text.set_parse_math(False)
        text.set_text(printable_lines(text.get_text(), _LABEL_LENGTH_MAX))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)
