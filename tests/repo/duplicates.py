"""Finds duplicates: runs of equal lines in two places of some packages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LINES = 6
"""So many lines in a row are a block."""
_COMMENT = re.compile(r"\s+#.*$")
_SAYS_SOMETHING = re.compile(r"\w")


class Place(NamedTuple):
    """A line of a file."""

    path: Path
    line: int


def blocks(paths: Iterable[Path]) -> list[tuple[Place, Place]]:
    """Each pair of places where `LINES` lines in a row are the same; the first one and any later one."""
    seen: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for path in paths:
        lines = list(_normalised(path.read_text(encoding="utf-8")))
        for start in range(len(lines) - LINES + 1):
            window = lines[start : start + LINES]
            seen[tuple(text for _, text in window)].append(Place(path, window[0][0]))
    return [(first, other) for first, *repeated in seen.values() for other in repeated]


def _normalised(source: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without indentation, comments, docstrings, imports and lone brackets."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        bare = _COMMENT.sub("", line).strip()
        if number not in left_out and _SAYS_SOMETHING.search(bare):
            yield number, bare
