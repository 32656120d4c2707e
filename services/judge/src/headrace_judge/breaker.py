"""A circuit breaker: while the endpoint fails, waiting jobs are not tried, so that an outage uses up no retries."""

from __future__ import annotations

from headrace_judge.metrics import ENDPOINT_UP
from headrace_runtime.clock import Clock

_PAUSE_MAX_S = 30.0


class Breaker:
    """After a failure no job is admitted for a while; then one at a time, until a call succeeds."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)

    def admits(self, running: int, concurrency: int) -> int:
        """How many new jobs may begin now."""
        if not self._failures:
            return concurrency - running
        probe = running == 0 and self._clock.monotonic_s() >= self._closed_until_s
        return 1 if probe else 0

    def failed(self, wait_s: float | None) -> None:
        """A call failed; `wait_s` is what the endpoint asked for. Failures during a pause do not prolong it."""
        now_s = self._clock.monotonic_s()
        ENDPOINT_UP.set(0)
        if now_s >= self._closed_until_s:
            self._failures += 1
            pause_s = min(self._pause_s * 2.0 ** min(self._failures - 1, 16), _PAUSE_MAX_S)
            self._closed_until_s = now_s + pause_s
        self._closed_until_s = max(self._closed_until_s, now_s + (wait_s or 0.0))

    def succeeded(self) -> None:
        self._failures = 0
        self._closed_until_s = 0.0
        ENDPOINT_UP.set(1)
