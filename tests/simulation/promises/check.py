"""How a checker speaks."""

from __future__ import annotations

from dataclasses import dataclass, field

_SPELT_OUT = 5


@dataclass
class Check:
    """`that(condition, text)` for every single thing that was promised."""

    promise: str
    made: int = 0
    broken: list[str] = field(default_factory=list)
    """What did not hold; the first few, the rest is only counted."""

    def __call__(self, holds: bool, text: str) -> bool:
        self.made += 1
        if not holds and len(self.broken) < _SPELT_OUT:
            self.broken.append(f"{self.promise}: {text}")
        return holds
