"""Stops a consumer that refuses nearly everything: then the consumer is broken, not the records (a bad deploy)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

REMEDY = "mend the cause and restart this service, or POST /resume to go on as it is"


@dataclass(frozen=True, slots=True)
class RefusalBounds:
    """Section `dead_letters` of the settings."""

    run_max: int = 100
    share_max: float = 0.5
    window: int = 500


class RefusalLimit:
    """Counts what became of records. `admits` says how many of the next may be dealt with before it must stop."""

    def __init__(self, bounds: RefusalBounds) -> None:
        self._bounds = bounds
        self._recent: deque[bool] = deque(maxlen=bounds.window)
        self._run = 0

    def note(self, refused: Sequence[bool]) -> None:
        """What became of records, in order: whether each was refused."""
        for one in refused:
            self._run = self._run + 1 if one else 0
            self._recent.append(one)

    def admits(self, refused: Sequence[bool]) -> int:
        """How many of these may follow: all, or those before the refusal that would be one too many."""
        ahead = RefusalLimit(self._bounds)
        ahead._recent.extend(self._recent)
        ahead._run = self._run
        for count, one in enumerate(refused):
            ahead.note([one])
            if one and ahead.reason is not None:
                return count
        return len(refused)

    @property
    def reason(self) -> str | None:
        """Why no further refusal may follow, None when one may."""
        bounds, window = self._bounds, len(self._recent)
        if bounds.run_max and self._run > bounds.run_max:
            return f"{bounds.run_max} records in a row were refused (dead_letters.run_max)"
        if window == bounds.window and sum(self._recent) > bounds.share_max * window:
            return f"more than {bounds.share_max:.0%} of {window} records were refused (dead_letters.share_max)"
        return None

    def reset(self) -> None:
        self._recent.clear()
        self._run = 0
