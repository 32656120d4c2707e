"""Budget of calls and tokens for an endpoint, and circuit breakers, which stop calls while the endpoint fails.

Counts per hour and day are in the database, so replicas share them and restarts keep them. Each tenant has its own
breaker, so runs on which the endpoint fails block only their own tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge.metrics import ENDPOINT_UP
from headrace_judge.settings import BudgetSettings
from headrace_judge.tables import SPENDING
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.storage.tables import upsert

_RETENTION = timedelta(days=2)
_LENGTHS = {"day": timedelta(days=1), "hour": timedelta(hours=1)}
_PAUSE_MAX_S = 30.0
_TENANTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call that is counted in the budget before it is made, with an estimate of its tokens."""

    at: datetime
    tokens: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class BudgetLimit:
    """A limit of the judge's budget that would be exceeded by the next call. Its text names the setting."""

    setting: str
    limit: int
    tenants: int = 1
    """Number of tenants that share the limit."""

    def __str__(self) -> str:
        part = f"; this is the part of one of {self.tenants} tenants" if self.tenants > 1 else ""
        return f"the budget is spent: judge.budget.{self.setting} = {self.limit}{part}"


class CallBudget:
    """Budget of calls and tokens in the database. All methods run in the caller's transaction.

    If several tenants were judged in a period or the one before, each may spend an equal part of the limit.
    """

    def __init__(self, budget: BudgetSettings) -> None:
        self._limits = {name: limit for name, limit in budget.model_dump().items() if limit is not None}

    async def reserve(
        self, tx: AsyncConnection, now: datetime, tokens: int, tenant: str = ""
    ) -> Reservation | BudgetLimit:
        """Count one call of about `tokens` tokens, or return the limit that it would exceed."""
        for period, start_ms in _periods(now):
            await _lock_period(tx, period, start_ms)  # locks the row, so that no other replica spends the rest
        for setting, left in (await self.remaining(tx, now)).items():
            if left < (1 if setting.startswith("calls") else tokens):
                return BudgetLimit(setting, self._limits[setting])
        limit = await self._exceeded_share(tx, now, tokens, tenant) if self._limits and tenant else None
        if limit is not None:
            return limit
        await _add(tx, now, 1, tokens)
        if self._limits and tenant:
            for period, start_ms in _periods(now):
                await _lock_period(tx, f"{period}/{tenant}", start_ms)
            await _add(tx, now, 1, tokens, tenant)
        return Reservation(now, tokens, tenant if self._limits else "")

    async def _exceeded_share(self, tx: AsyncConnection, now: datetime, tokens: int, tenant: str) -> BudgetLimit | None:
        """Return the first limit whose equal share for the tenant the call would exceed, or None.

        If several tenants had calls in this period or the one before, they share a limit equally.

        Args:
            tx: the transaction.
            now: the present time.
            tokens: number of tokens of the call.
            tenant: tenant for whom the judge would be called.
        """
        for period, start_ms in _periods(now):
            before_ms = start_ms - round(_LENGTHS[period].total_seconds() * 1000)
            recent = SPENDING.c.period.startswith(f"{period}/", autoescape=True) & (SPENDING.c.start_ms >= before_ms)
            tenants = {tenant, *_tenants((await tx.execute(select(SPENDING.c.period).where(recent))).scalars())}
            query = select(SPENDING).where(_is(f"{period}/{tenant}", start_ms))
            spent = (await tx.execute(query)).mappings().one_or_none()
            for unit, more in (("calls", 1), ("tokens", tokens)):
                setting = f"{unit}_per_{period}"
                limit = self._limits.get(setting)
                total = (spent[unit] if spent else 0) + more
                if limit is not None and len(tenants) > 1 and total > limit / len(tenants):
                    return BudgetLimit(setting, limit, len(tenants))
        return None

    async def correct(self, tx: AsyncConnection, reservation: Reservation, tokens: int | None) -> None:
        """Replace the estimate of a reservation by the tokens that the call used; None keeps the estimate."""
        if tokens is not None:
            await _add(tx, reservation.at, 0, tokens - reservation.tokens)
            if reservation.tenant:
                await _add(tx, reservation.at, 0, tokens - reservation.tokens, reservation.tenant)

    async def remaining(self, tx: AsyncConnection, now: datetime) -> dict[str, int]:
        """Return the calls and tokens that remain of each limit, by the setting. They may be negative."""
        spent: dict[str, int] = {}
        for period, start_ms in _periods(now):
            row = (await tx.execute(select(SPENDING).where(_is(period, start_ms)))).mappings().one_or_none()
            for unit in ("calls", "tokens"):
                spent[f"{unit}_per_{period}"] = row[unit] if row else 0
        return {setting: limit - spent[setting] for setting, limit in self._limits.items()}

    async def prune(self, tx: AsyncConnection, now: datetime) -> None:
        """Delete the counts of periods that no limit uses any more."""
        await tx.execute(delete(SPENDING).where(SPENDING.c.start_ms < epoch_ms(now - _RETENTION)))


def _periods(now: datetime) -> Iterator[tuple[str, int]]:
    """Yield the name and the start of the current day, then of the current hour.

    Replicas lock the rows of these periods in this order, so they cannot deadlock.
    """
    hour = now.replace(minute=0, second=0, microsecond=0)
    yield "day", epoch_ms(hour.replace(hour=0))
    yield "hour", epoch_ms(hour)


async def _lock_period(tx: AsyncConnection, period: str, start_ms: int) -> None:
    """Lock the row of a period, and create it if necessary."""
    key = {"period": period, "start_ms": start_ms}
    await upsert(tx, SPENDING, key, {"calls": 0, "tokens": 0}, update=False)
    await tx.execute(select(SPENDING).where(_is(period, start_ms)).with_for_update())


def _tenants(periods: Iterable[str]) -> set[str]:
    return {period.partition("/")[2] for period in periods}


async def _add(tx: AsyncConnection, at: datetime, calls: int, tokens: int, tenant: str = "") -> None:
    for name, start_ms in _periods(at):
        period = f"{name}/{tenant}" if tenant else name
        more = {"calls": SPENDING.c.calls + calls, "tokens": SPENDING.c.tokens + tokens}
        await tx.execute(update(SPENDING).where(_is(period, start_ms)).values(more))


def _is(period: str, start_ms: int):  # type: ignore[no-untyped-def]
    return (SPENDING.c.period == period) & (SPENDING.c.start_ms == start_ms)


class CircuitBreaker:
    """Circuit breaker for calls of an endpoint.

    After a failure it allows no new job for a pause, then one at a time until a call succeeds.
    """

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)

    def free_slots(self, running: int, concurrency: int) -> int:
        """Return how many new jobs may begin now.

        Args:
            running: number of running jobs.
            concurrency: largest number of running jobs while calls succeed.
        """
        if not self._failures:
            return concurrency - running
        probe = running == 0 and self._clock.monotonic_s() >= self._closed_until_s
        return 1 if probe else 0

    def record_failure(self, wait_s: float | None) -> None:
        """Record a failed call, which begins a pause. Failures during a pause prolong it only if `wait_s` does.

        Args:
            wait_s: seconds that the endpoint requested to wait; None if it requested none.
        """
        now_s = self._clock.monotonic_s()
        ENDPOINT_UP.set(0)
        if now_s >= self._closed_until_s:
            self._failures += 1
            pause_s = min(self._pause_s * 2.0 ** min(self._failures - 1, 16), _PAUSE_MAX_S)
            self._closed_until_s = now_s + pause_s
        self._closed_until_s = max(self._closed_until_s, now_s + (wait_s or 0.0))

    def record_success(self) -> None:
        """Record a successful call, which ends the pause."""
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)


class TenantCircuitBreakers:
    """Circuit breakers by tenant, for the tenants that were judged most recently."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._breakers: OrderedDict[str, CircuitBreaker] = OrderedDict()

    def of(self, tenant: str) -> CircuitBreaker:
        """Return the breaker of a tenant, created if the tenant has none."""
        breaker = self._breakers.get(tenant)
        if breaker is None:
            breaker = self._breakers[tenant] = CircuitBreaker(self._clock, self._pause_s)
        self._breakers.move_to_end(tenant)
        if len(self._breakers) > _TENANTS_MAX:
            self._breakers.popitem(last=False)
        return breaker
