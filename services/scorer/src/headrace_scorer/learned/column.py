"""One column of a reward model's feature table. It does not import NumPy, because reading a fitted model needs none."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_scorer.learned.models import Features

_CLIPPED_AT = 4.0


@dataclass(frozen=True, slots=True)
class Column:
    """Standardized column of one feature."""

    name: str
    presence: bool
    """Whether the column is 1 where the run has the feature and 0 elsewhere, instead of the feature's value."""
    mean: float
    deviation: float
    is_reward: bool = False
    """Whether the feature is the value of another source, of which a higher one is better."""
    controlled: bool = False
    """Whether the agent controls the feature, so that it does not change the reward."""

    def of(self, features: Features) -> float:
        """Return the column's number for a run, in deviations from the mean. It is clipped, so outliers move little."""
        present = self.name in features
        if not present and not self.presence:
            return 0.0
        value = float(present) if self.presence else features[self.name]
        return max(-_CLIPPED_AT, min(_CLIPPED_AT, (value - self.mean) / self.deviation))
