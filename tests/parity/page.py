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
    """A row: what the document has, what it is called here and where, the program that shows it, how equal it is."""

    id: str
    asked: str
    here: str
    where: str
    program: str
    verdict: str


def items(text: str | None = None) -> list[Item]:
    return [Item(*found) for found in _ROW.findall(PAGE.read_text(encoding="utf-8") if text is None else text)]


def expected_ids() -> Iterator[str]:
    for seed, count in COUNTS.items():
        yield from (f"{seed}-{number:02}" for number in range(1, count + 1))


def problems(found: list[Item], programs: set[str]) -> list[str]:
    """What is wrong with the page."""
    ids = [item.id for item in found]
    wanted = list(expected_ids())
    said = [f"{one} is missing" for one in wanted if one not in ids]
    said += [
        f"{one} is listed twice, or is none" for one in sorted(set(ids)) if ids.count(one) > 1 or one not in wanted
    ]
    said += [f"{item.id}: there is no program {item.program}" for item in found if item.program not in programs]
    said += [f"{item.id}: nothing is at {item.where}" for item in found if not exists(item.where)]
    refused = sum(item.verdict == "not" for item in found)
    return said + ([f"{refused} items are `not`; at most {NOT_MAX}"] if refused > NOT_MAX else [])


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
