"""`docs/parity.md` as data: an item for each row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
COUNTS = {"S0": 56, "S1": 37, "S2": 19, "S3": 24, "S4": 22}
"""Items of each document."""
NOT_MAX = 6
_ROW = re.compile(r"^\| (S\d-\d\d) \| (.+) \| (.+) \| `([\w.]+)` \| (\w+) \| (same|other|not) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Item:
    """A row: the document's item, its counterpart and its place here, the program that shows it, and its equality."""

    id: str
    request: str
    counterpart: str
    where: str
    program: str
    verdict: str


def items(text: str | None = None) -> list[Item]:
    return [Item(*cells) for cells in _ROW.findall(PAGE.read_text(encoding="utf-8") if text is None else text)]


def expected_ids() -> Iterator[str]:
    for seed, count in COUNTS.items():
        yield from (f"{seed}-{number:02}" for number in range(1, count + 1))


def problems(listed: list[Item], programs: set[str]) -> list[str]:
    """Return the errors of the page."""
    ids = [item.id for item in listed]
    expected = list(expected_ids())
    sentences = [f"{item_id} is missing" for item_id in expected if item_id not in ids]
    sentences += [
        f"{item_id} is listed twice, or is none"
        for item_id in sorted(set(ids))
        if ids.count(item_id) > 1 or item_id not in expected
    ]
    sentences += [f"{item.id}: there is no program {item.program}" for item in listed if item.program not in programs]
    sentences += [f"{item.id}: nothing is at {item.where}" for item in listed if not exists(item.where)]
    refused = sum(item.verdict == "not" for item in listed)
    return sentences + ([f"{refused} items are `not`; at most {NOT_MAX}"] if refused > NOT_MAX else [])


def exists(name: str) -> bool:
    """Whether a dotted name leads to something: through packages, then through attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            at = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            at = getattr(at, part, None)  # type: ignore[assignment]
        return at is not None
    return False
