"""Bounds how much is dead-lettered: of each tenant, and of a consumer that refuses the records of all tenants.

A tenant beyond its bounds is held: its further refusals are kept back, and nobody else notices. When no other tenant's
last record was handled, the consumer itself may be broken (a bad deploy), and it reports that it is paused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REMEDY = "mend the cause and restart this service, or POST /resume to go on as it is"
_TENANTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class RefusalBounds:
    """Section `dead_letters` of the settings."""

    run_max: int = 100
    share_max: float = 0.5
    window: int = 500


class RefusalLimit:
    """Counts what became of the records of one tenant."""

    def __init__(self, bounds: RefusalBounds) -> None:
        self._bounds = bounds
        self._recent: deque[bool] = deque(maxlen=bounds.window)
        self._run = 0

    def note(self, refused: Sequence[bool]) -> None:
        """Count records, in order: whether each was refused."""
        for is_refused in refused:
            self._run = self._run + 1 if is_refused else 0
            self._recent.append(is_refused)

    def admits(self, refused: Sequence[bool]) -> int:
        """Return how many of these may follow: all, or those before the refusal that would be one too many."""
        ahead = RefusalLimit(self._bounds)
        ahead._recent.extend(self._recent)
        ahead._run = self._run
        for count, is_refused in enumerate(refused):
            ahead.note([is_refused])
            if is_refused and ahead.reason is not None:
                return count
        return len(refused)

    @property
    def works(self) -> bool:
        """Whether the last record was handled."""
        return bool(self._recent) and self._run == 0

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


class TenantLimits:
    """A `RefusalLimit` for each tenant that was seen lately."""

    def __init__(self, bounds: RefusalBounds) -> None:
        self._bounds = bounds
        self._limits: OrderedDict[str, RefusalLimit] = OrderedDict()
        self._over: dict[str, str] = {}

    def note(self, tenant: str, *, refused: bool) -> None:
        """Count a record that was handled, or whose dead letter is durable."""
        limit = self._limit(tenant)
        limit.note([refused])
        if not refused:
            self._over.pop(tenant, None)

    def admits(self, tenant: str) -> bool:
        """Return whether one more record of the tenant may be dead-lettered."""
        return bool(self._limit(tenant).admits([True]))

    def admit_all(self, tenants: Iterable[str]) -> bool:
        """Return whether all these records, of one tenant each, may be dead-lettered, even one after the other."""
        counts = Counter(tenants)
        return all(self._limit(tenant).admits([True] * count) == count for tenant, count in counts.items())

    def exceed(self, tenant: str) -> str | None:
        """Note that a refusal of the tenant is kept back. Returns the reason the first time."""
        if tenant in self._over:
            return None
        ahead = self._limit(tenant)
        ahead.note([True])  # so that `reason` names the bound
        self._over[tenant] = ahead.reason or "too many records were refused"
        return self._over[tenant]

    @property
    def paused(self) -> str | None:
        """Why the consumer may be broken: a tenant is over its bounds, and nobody's last record was handled."""
        if not self._over or any(limit.works for limit in self._limits.values()):
            return None
        return next(iter(self._over.values()))

    def reset(self) -> None:
        self._limits.clear()
        self._over.clear()

    def _limit(self, tenant: str) -> RefusalLimit:
        limit = self._limits.setdefault(tenant, RefusalLimit(self._bounds))
        self._limits.move_to_end(tenant)
        while len(self._limits) > _TENANTS_MAX:
            forgotten, _ = self._limits.popitem(last=False)
            self._over.pop(forgotten, None)
        return limit
