"""Result lines of a test program: a measured figure, its limit, and whether the promise holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One promise of a test program: a measured figure and its limit, both as text. `details` go to the report only."""

    name: str
    figure: str
    limit: str
    holds: bool
    details: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {'held' if self.holds else 'BROKEN':6} {self.name}: {self.figure} (limit: {self.limit})"

    def as_json(self) -> dict[str, object]:
        fields = {"name": self.name, "figure": self.figure, "limit": self.limit, "holds": self.holds}
        return {**fields, **self.details}


def at_most(name: str, figure: float, limit: float, unit: str = "") -> Line:
    """Return a line that holds when `figure` is not above `limit`."""
    return Line(name, f"{figure:g}{unit}", f"at most {limit:g}{unit}", figure <= limit, {"value": figure})


def at_least(name: str, figure: float, limit: float, unit: str = "") -> Line:
    """Return a line that holds when `figure` is not below `limit`."""
    return Line(name, f"{figure:g}{unit}", f"at least {limit:g}{unit}", figure >= limit, {"value": figure})


def between(name: str, figure: float, low: float, high: float) -> Line:
    """Return a line that holds when `figure` is at least `low` and at most `high`."""
    return Line(name, f"{figure:.3g}", f"{low:g} to {high:g}", low <= figure <= high, {"value": figure})


def equals(name: str, figure: object, expected: object) -> Line:
    """Return a line that holds when `figure` equals `expected`."""
    return Line(name, str(figure), str(expected), figure == expected)


def none_of(name: str, count: int, total: int) -> Line:
    """Return a line that holds when `count`, the number of violations among `total` cases, is 0 and `total` is not."""
    return Line(name, f"{count} of {total}", "0", count == 0 and total > 0, {"value": count})


def no_problems(name: str, problems: Iterable[str], shown_max: int = 5) -> Line:
    """Return a line that holds when there are no `problems`; the report shows the first `shown_max` of them."""
    listed = list(problems)
    return Line(name, f"{len(listed)} problems", "0", not listed, {"problems": listed[:shown_max]})


def caught(fault: str, *, by_the_suite: bool, details: Mapping[str, object] | None = None) -> Line:
    """Return a line for a fault that was planted on purpose; the line holds when the fault made the suite fail."""
    figure = "caught" if by_the_suite else "not noticed"
    return Line(f"planted fault: {fault}", figure, "caught", by_the_suite, details or {})
