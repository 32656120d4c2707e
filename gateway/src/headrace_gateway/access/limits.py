"""Limits per key, per tenant and in total: requests, choices, tokens, concurrency, stored bytes and body size.

The number of file descriptors bounds the concurrency of the process.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_gateway.access.keys import Caller
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.settings import CaptureSettings, LimitSettings
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger

_HOUR_S = 3600.0
log = get_logger(__name__)
_OWN = 128
"""File descriptors that the process needs for the bus, the spool, the logs and the probes."""
_PER_CALL = 2


class Bucket:
    """Token bucket that refills by `per_s` up to `burst`. Its level may become negative; a request then waits until it
    is positive again."""

    def __init__(self, per_s: float, burst: float, clock: Clock) -> None:
        self.per_s = per_s
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._filled_s = clock.monotonic_s()

    @property
    def level(self) -> float:
        now = self._clock.monotonic_s()
        self._level = min(self._burst, self._level + (now - self._filled_s) * self.per_s)
        self._filled_s = now
        return self._level

    def take(self, amount: float) -> None:
        """Take `amount` from the bucket. A negative amount is returned to the bucket."""
        self._level = min(self._burst, self.level - amount)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until the bucket contains `amount`, or 0 if it already contains it.

        For an amount larger than the burst, return the seconds until the bucket is full.
        """
        return max(0.0, (min(amount, self._burst) - self.level) / self.per_s)


class Meter:
    """Rate limits (requests and tokens per second) and the number of requests in progress of one key, one tenant or all
    callers."""

    def __init__(self, limits: LimitSettings, clock: Clock) -> None:
        self._limits = limits
        self._requests = Bucket(limits.requests_per_s, float(limits.burst), clock)
        self._tokens = Bucket(limits.tokens_per_s, float(limits.tokens_burst), clock)
        self.in_progress = 0

    def refusal(self, holder: str) -> ApiError | None:
        """Return error 429 if one more request would exceed the rate or the concurrency of `holder`, else None."""
        wait_s = self._requests.wait_s(1)
        if wait_s:
            message = f"{holder} may send {self._limits.requests_per_s:g} requests per second"
            return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        return self._refuse_concurrency(1, holder)

    def charge(self, requests: int) -> ApiError | None:
        """Take one request per event from the bucket of requests, for a request that causes several events. Return the
        error 429 if the bucket is already negative.

        The bucket may become negative by this; further requests are then refused before their body is read.
        """
        if self._requests.level < 0:
            wait_s = self._requests.wait_s(1)
            message = f"this request counts as {requests + 1}, with {self._limits.requests_per_s:g} allowed per second"
            return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        self._requests.take(requests)
        return None

    def refuse_work(self, choices: int, tokens: int, holder: str) -> ApiError | None:
        """Return error 429 if a call with `choices` answers and `tokens` tokens would exceed the limits of `holder`,
        else None.

        One of the choices was already counted when the request was admitted.
        """
        wait_s = self._tokens.wait_s(tokens)
        if wait_s:
            message = f"{holder} may ask for {self._limits.tokens_per_s:g} tokens per second (tokens_per_s)"
            return ApiError(429, "token_limit_exceeded", message, retry_after_s=wait_s)
        if self.in_progress == 1:  # a call with more choices than the limit may run alone
            return None
        return self._refuse_concurrency(choices - 1, holder)

    def begin(self, count: int = 1, tokens: float = 0) -> None:
        self._requests.take(count)
        self._tokens.take(tokens)
        self.in_progress += count

    def end(self, count: int = 1, unused_tokens: float = 0) -> None:
        self._tokens.take(-unused_tokens)
        self.in_progress -= count

    def _refuse_concurrency(self, count: int, holder: str) -> ApiError | None:
        if self.in_progress + count > self._limits.concurrency:
            message = f"{holder} may have {self._limits.concurrency} requests in progress, each choice counting as one"
            return ApiError(429, "concurrency_limit_exceeded", message, retry_after_s=1)
        return None


@dataclass(slots=True)
class Work:
    """Size of a call in progress. `tokens` is the estimate that it was charged; `used_tokens` is the actual number,
    None until the answer has ended."""

    choices: int
    tokens: int
    used_tokens: int | None = None


class RequestLimits:
    """Limits of one gateway process on requests and captured bytes: for each key, each tenant, and all requests
    together.

    Each gateway process counts only its own requests. With a `tenant_share` (a part of 1), no tenant gets more than
    that part of the total limits, so that no tenant can use up the limits of all.
    """

    def __init__(
        self,
        total: LimitSettings,
        clock: Clock,
        *,
        tenant_share: float | None = None,
        bytes_per_hour: int = CaptureSettings().tenant_bytes_per_hour,
    ) -> None:
        self._clock = clock
        self._total = Meter(total, clock)
        self._of_tenant = None if tenant_share is None else _part(total, tenant_share)
        self._bytes_per_hour = bytes_per_hour
        self._keys: dict[str, Meter] = {}
        self._tenants: dict[str, Meter] = {}
        self._stored: dict[str, Bucket] = {}

    @contextlib.contextmanager
    def admit(self, caller: Caller) -> Iterator[None]:
        """Count one request in progress while the body runs. Raises `ApiError` 429; a refused request is not
        counted."""
        meters = self._meters_of(caller)
        refusals = (meter.refusal(holder) for holder, meter in meters)
        refusal = next(filter(None, refusals), None) or self._refuse_storing(caller.tenant)
        if refusal:
            raise refusal
        for _, meter in meters:
            meter.begin()
        try:
            yield
        finally:
            for _, meter in meters:
                meter.end()

    @contextlib.contextmanager
    def work(self, caller: Caller, choices: int, tokens: int) -> Iterator[Work]:
        """Charge an admitted call for its choices and estimated tokens while the body runs, then give back the tokens
        that it did not use.

        A refused call takes no tokens. If the client disconnects before the actual number is known, the estimate stays.

        Raises:
            ApiError: 429.
        """
        meters = self._meters_of(caller)
        refusal = next(filter(None, (meter.refuse_work(choices, tokens, holder) for holder, meter in meters)), None)
        if refusal:
            raise refusal
        work = Work(choices, tokens)
        for _, meter in meters:
            meter.begin(choices - 1, tokens)
        try:
            yield work
        except ApiError:
            work.used_tokens = work.used_tokens or 0
            raise
        finally:
            unused = 0 if work.used_tokens is None else tokens - work.used_tokens
            for _, meter in meters:
                meter.end(choices - 1, unused)

    def charge(self, caller: Caller, events: int) -> None:
        """Charge an admitted request that causes several events as that many requests.

        Raises:
            ApiError: 429, the caller has used up its rate limit.
        """
        if events <= 1:
            return
        for _, meter in self._meters_of(caller):
            refusal = meter.charge(events - 1)
            if refusal:
                raise refusal

    def store(self, tenant: str, size_bytes: int) -> None:
        """Charge `size_bytes` of stored events to a tenant. If the tenant exceeds its limit, only its next requests are
        refused."""
        self._bucket_of(tenant).take(size_bytes)

    @property
    def in_progress(self) -> int:
        return self._total.in_progress

    def _meters_of(self, caller: Caller) -> list[tuple[str, Meter]]:
        """Return the meters that a request of the caller is charged to, with their names for messages: the key, the
        tenant if there are several, and all callers."""
        key = self._keys.get(caller.key_id)
        if key is None:
            key = self._keys[caller.key_id] = Meter(caller.limits, self._clock)
        meters = [("this API key", key)]
        if self._of_tenant is not None:
            tenant = self._tenants.get(caller.tenant)
            if tenant is None:
                tenant = self._tenants[caller.tenant] = Meter(self._of_tenant, self._clock)
            meters.append(("this tenant (gateway.tenant_share)", tenant))
        return [*meters, ("all callers together", self._total)]

    def _bucket_of(self, tenant: str) -> Bucket:
        bucket = self._stored.get(tenant)
        if bucket is None:
            per_s = self._bytes_per_hour / _HOUR_S
            bucket = self._stored[tenant] = Bucket(per_s, float(self._bytes_per_hour), self._clock)
        return bucket

    def _refuse_storing(self, tenant: str) -> ApiError | None:
        wait_s = self._bucket_of(tenant).wait_s(1)
        if not wait_s:
            return None
        message = f"this tenant may store {self._bytes_per_hour} bytes per hour (gateway.capture.tenant_bytes_per_hour)"
        return ApiError(429, "storage_limit_exceeded", message, retry_after_s=wait_s)


def _part(total: LimitSettings, share: float) -> LimitSettings:
    """Return the limits of one tenant: `share` of the total rates and concurrency."""
    return total.model_copy(
        update={
            "requests_per_s": total.requests_per_s * share,
            "burst": max(1, math.floor(total.burst * share)),
            "concurrency": max(1, math.floor(total.concurrency * share)),
            "tokens_per_s": total.tokens_per_s * share,
            "tokens_burst": max(1, math.floor(total.tokens_burst * share)),
        }
    )


def limit_to_descriptors(limits: LimitSettings) -> LimitSettings:
    """Return `limits` with the concurrency reduced to the number of file descriptors, after raising the process's soft
    limit as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN + _PER_CALL * limits.concurrency
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    fits = max(1, (soft - _OWN) // _PER_CALL)
    remedy = f"raise the limit (ulimit -n, LimitNOFILE=) to {needed}, or lower gateway.limits_total.concurrency"
    log.warning("few_file_descriptors", limit=soft, concurrency=fits, remedy=remedy)
    return limits.model_copy(update={"concurrency": fits})
