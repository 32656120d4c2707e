"""One column of the table that a reward model sees. Light to import: reading a fitted model needs no NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_scorer.learned.models import Features

_CLIPPED_AT = 4.0


@dataclass(frozen=True, slots=True)
class Column:
    """`presence`: 1 where the feature is known, else 0; otherwise its value. `is_reward`: more of it is better.
    `controlled`: by the agent itself, so that it is not paid for it."""

    name: str
    presence: bool
    mean: float
    deviation: float
    is_reward: bool = False
    controlled: bool = False

    def of(self, features: Features) -> float:
        """In deviations from the mean, at most four: one strange run moves nothing far."""
        known = self.name in features
        if not known and not self.presence:
            return 0.0
        value = float(known) if self.presence else features[self.name]
        return max(-_CLIPPED_AT, min(_CLIPPED_AT, (value - self.mean) / self.deviation))
