"""Acceptance lines and reports that the demos on a live stack share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Line:
    """Acceptance line with its measured values."""

    name: str
    holds: bool
    details: str


def print_now(text: str) -> None:
    print(text, flush=True)


def report(target: str, lines: Sequence[Line], numbers: Mapping[str, object], wall_s: float) -> int:
    """Print the lines and write `reports/<target>.json`. Return exit status 1 if a line does not hold."""
    print_now("")
    for line in lines:
        print_now(f"{'holds' if line.holds else 'DOES NOT HOLD':14} {line.name}: {line.details}")
    path = Path("reports") / f"{target}.json"
    path.parent.mkdir(exist_ok=True)
    written = {"lines": [vars(line) for line in lines], "numbers": numbers, "wall_s": round(wall_s, 1)}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print_now(f"written: {path}")
    return 0 if all(line.holds for line in lines) else 1
