"""Rate, concurrency and body size, per key and in total."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headrace_gateway.access import Caller
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import LimitSettings
from headrace_runtime.clock import Clock


class Meter:
    """A token bucket and a count of what is in progress."""

    def __init__(self, limits: LimitSettings, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = float(limits.burst)
        self._filled_s = clock.monotonic_s()
        self.in_progress = 0

    def refusal(self, whose: str) -> ApiError | None:
        """Why one more request cannot begin now, None when it can."""
        now = self._clock.monotonic_s()
        limits = self._limits
        self._tokens = min(limits.burst, self._tokens + (now - self._filled_s) * limits.requests_per_s)
        self._filled_s = now
        if self._tokens < 1:
            wait_s = (1 - self._tokens) / limits.requests_per_s
            message = f"{whose} may send {limits.requests_per_s:g} requests per second"
            return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        if self.in_progress >= limits.concurrency:
            message = f"{whose} may have {limits.concurrency} requests in progress"
            return ApiError(429, "concurrency_limit_exceeded", message, retry_after_s=1)
        return None

    def charge(self, tokens: int) -> ApiError | None:
        """Take tokens for the events that a request becomes. The bucket may go below zero; further requests are then
        refused before their body is read. A caller whose bucket is below zero is refused here."""
        if self._tokens < 0:
            wait_s = (1 - self._tokens) / self._limits.requests_per_s
            message = f"this request counts as {tokens + 1}, with {self._limits.requests_per_s:g} allowed per second"
            return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        self._tokens -= tokens
        return None

    def begin(self) -> None:
        self._tokens -= 1
        self.in_progress += 1


class RequestLimits:
    """The meters of one gateway process; several gateways do not share them."""

    def __init__(self, total: LimitSettings, clock: Clock) -> None:
        self._clock = clock
        self._total_settings = total
        self._total = Meter(total, clock)
        self._meters: dict[str, Meter] = {}

    @contextlib.contextmanager
    def admit(self, caller: Caller) -> Iterator[None]:
        """Count one request in progress while the body runs. Raises `ApiError` 429; a refused request is not
        counted."""
        meter = self._meters.get(caller.key_id)
        if meter is None:  # bounded: one for each configured key
            meter = self._meters[caller.key_id] = Meter(caller.limits, self._clock)
        refusal = meter.refusal("this API key") or self._total.refusal("all callers together")
        if refusal:
            raise refusal
        for one in (meter, self._total):
            one.begin()
        try:
            yield
        finally:
            for one in (meter, self._total):
                one.in_progress -= 1

    def charge(self, caller: Caller, events: int) -> None:
        """For an admitted request that becomes so many events: each counts as a request. Raises `ApiError` 429."""
        if events <= 1:
            return
        for meter in (self._meters[caller.key_id], self._total):
            refusal = meter.charge(events - 1)
            if refusal:
                raise refusal

    @property
    def in_progress(self) -> int:
        return self._total.in_progress

    def body_bytes_max(self, caller: Caller) -> int:
        return min(caller.limits.body_bytes_max, self._total_settings.body_bytes_max)
