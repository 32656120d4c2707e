"""What an attack reports: one line for each figure, with the limit it is held to."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """`figure` is what was measured, `limit` what it is held to in words, `holds` whether it does."""

    what: str
    figure: str
    limit: str
    holds: bool

    def __str__(self) -> str:
        return f"  {'held' if self.holds else 'BROKEN':6} {self.what}: {self.figure} (limit: {self.limit})"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def at_most(what: str, figure: float, limit: float, unit: str = "") -> Line:
    """Held when `figure` is not above `limit`."""
    return Line(what, f"{figure:g}{unit}", f"at most {limit:g}{unit}", figure <= limit)


def at_least(what: str, figure: float, limit: float, unit: str = "") -> Line:
    """Held when `figure` is not below `limit`."""
    return Line(what, f"{figure:g}{unit}", f"at least {limit:g}{unit}", figure >= limit)


def none_of(what: str, count: int, of: int) -> Line:
    """Held when nothing of what must not happen did, and something was tried."""
    return Line(what, f"{count} of {of}", "0", count == 0 and of > 0)
