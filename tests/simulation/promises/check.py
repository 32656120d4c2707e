"""Interface of a checker."""

from __future__ import annotations

from dataclasses import dataclass, field

_SPELT_OUT = 5


@dataclass
class Check:
    """Call `that(condition, text)` for every single promise."""

    promise: str
    count: int = 0
    broken: list[str] = field(default_factory=list)
    """Texts of broken promises. The first few are stored, the rest is counted."""

    def __call__(self, holds: bool, text: str) -> bool:
        self.count += 1
        if not holds and len(self.broken) < _SPELT_OUT:
            self.broken.append(f"{self.promise}: {text}")
        return holds
