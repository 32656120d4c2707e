"""Circuit breakers. While the endpoint fails, waiting jobs are not tried, so that an outage does not consume retries.

Each tenant has its own breaker, so runs on which the endpoint fails block only their own tenant.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace_judge.metrics import ENDPOINT_UP
from headrace_runtime.clock import Clock

_PAUSE_MAX_S = 30.0
_TENANTS_MAX = 1_000


class Breaker:
    """Breaker that admits no job for some time after a failure, and then one at a time until a call succeeds."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)

    def admits(self, running: int, concurrency: int) -> int:
        """Return the number of new jobs that may begin now."""
        if not self._failures:
            return concurrency - running
        probe = running == 0 and self._clock.monotonic_s() >= self._closed_until_s
        return 1 if probe else 0

    def failed(self, wait_s: float | None) -> None:
        """Record a failed call. Failures during a pause do not prolong it, unless the endpoint requests that.

        Args:
            wait_s: waiting time that the endpoint requested.
        """
        now_s = self._clock.monotonic_s()
        ENDPOINT_UP.set(0)
        if now_s >= self._closed_until_s:
            self._failures += 1
            pause_s = min(self._pause_s * 2.0 ** min(self._failures - 1, 16), _PAUSE_MAX_S)
            self._closed_until_s = now_s + pause_s
        self._closed_until_s = max(self._closed_until_s, now_s + (wait_s or 0.0))

    def succeeded(self) -> None:
        """Record a successful call, which ends the pause."""
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)


class TenantBreakers:
    """Breakers of the tenants that were judged most recently."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def of(self, tenant: str) -> Breaker:
        """Return the breaker of a tenant."""
        breaker = self._breakers.get(tenant)
        if breaker is None:
            breaker = self._breakers[tenant] = Breaker(self._clock, self._pause_s)
        self._breakers.move_to_end(tenant)
        if len(self._breakers) > _TENANTS_MAX:
            self._breakers.popitem(last=False)
        return breaker
