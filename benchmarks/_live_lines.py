"""What the demos on a live stack share: lines that have to hold, and the report that says which did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Line:
    """One thing that has to hold."""

    name: str
    holds: bool
    found: str


def say(text: str) -> None:
    print(text, flush=True)


def report(target: str, lines: Sequence[Line], numbers: Mapping[str, object], wall_s: float) -> int:
    """Print the lines and write `reports/<target>.json`. The exit status: 1 when one of them does not hold."""
    say("")
    for line in lines:
        say(f"{'holds' if line.holds else 'DOES NOT HOLD':14} {line.name}: {line.found}")
    path = Path("reports") / f"{target}.json"
    path.parent.mkdir(exist_ok=True)
    written = {"lines": [vars(line) for line in lines], "numbers": numbers, "wall_s": round(wall_s, 1)}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    say(f"written: {path}")
    return 0 if all(line.holds for line in lines) else 1
