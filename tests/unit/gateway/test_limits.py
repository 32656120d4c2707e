"""Rate, concurrency and size: of a key, and of all keys together."""

from __future__ import annotations

import contextlib
from datetime import datetime

import pytest

from headrace_gateway.access import ALL_SCOPES, Caller
from headrace_gateway.limits import Meter, RequestLimits
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import LimitSettings
from headrace_schemas.values.base import utcnow


class Clock:
    """Moved by the test."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def now(self) -> datetime:
        return utcnow()

    def monotonic_s(self) -> float:
        return self.at_s

    async def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def caller(name: str = "one", **limits: float) -> Caller:
    return Caller(name, name, "t", ALL_SCOPES, None, LimitSettings.model_validate(limits))


def begun(meter: Meter, tries: int) -> int:
    """How many of so many requests may begin now; all of them end at once."""
    count = 0
    for _ in range(tries):
        if meter.refusal("it") is None:
            meter.begin()
            meter.in_progress -= 1
            count += 1
    return count


def test_a_burst_is_all_that_a_pause_can_save_up() -> None:
    clock = Clock()
    meter = Meter(LimitSettings(requests_per_s=10, burst=5), clock)
    assert begun(meter, 20) == 5
    clock.at_s += 0.2
    assert begun(meter, 20) == 2
    clock.at_s += 3600
    assert begun(meter, 20) == 5


def test_a_refusal_says_when_to_come_back() -> None:
    clock = Clock()
    meter = Meter(LimitSettings(requests_per_s=4, burst=1), clock)
    assert begun(meter, 1) == 1
    refusal = meter.refusal("it")
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, "rate_limit_exceeded", 0.25)
    clock.at_s += 0.25
    assert meter.refusal("it") is None


@pytest.mark.parametrize(("own", "total"), [(2048, 4096), (4096, 2048), (2048, 2048)])
def test_the_smaller_body_limit_counts(own: int, total: int) -> None:
    limits = RequestLimits(LimitSettings(body_bytes_max=total), Clock())
    assert limits.body_bytes_max(caller(body_bytes_max=own)) == 2048


def test_concurrency_is_counted_by_key_and_in_total_and_a_refused_request_is_charged_to_nobody() -> None:
    limits = RequestLimits(LimitSettings(concurrency=2, burst=4, requests_per_s=0.001), Clock())
    one, two = caller("one", concurrency=1), caller("two", concurrency=2)
    with limits.admit(one):
        with pytest.raises(ApiError, match="this API key"), limits.admit(one):
            pass
        with limits.admit(two):
            assert limits.in_progress == 2
            with pytest.raises(ApiError, match="all callers together"), limits.admit(two):
                pass
    assert limits.in_progress == 0
    for _ in range(2):
        with limits.admit(two):
            pass
    with pytest.raises(ApiError, match="all callers together") as refused, limits.admit(two):
        pass
    assert refused.value.code == "rate_limit_exceeded"


def test_what_a_request_causes_may_be_owed_and_nothing_begins_until_it_is_paid() -> None:
    clock = Clock()
    limits = RequestLimits(LimitSettings(requests_per_s=100, burst=100), clock)
    one = caller(requests_per_s=2, burst=3)
    with limits.admit(one):
        limits.charge(one, 3)
        limits.charge(one, 2)  # nothing was left, and nothing was owed yet
        limits.charge(one, 1)  # itself, which `admit` has counted
        with pytest.raises(ApiError, match="counts as 5, with 2 allowed per second") as refused:
            limits.charge(one, 5)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after_s == 1.0, "one is owed and one is needed, at two per second"
    clock.at_s += 0.75
    with pytest.raises(ApiError) as refused, limits.admit(one):
        pass
    assert refused.value.retry_after_s == 0.25
    clock.at_s += 0.25
    with limits.admit(one):
        pass


def test_who_has_all_places_in_use_comes_back_in_a_second() -> None:
    limits = RequestLimits(LimitSettings(), Clock())
    one = caller(concurrency=1)
    with limits.admit(one), pytest.raises(ApiError) as refused, limits.admit(one):
        pass
    assert (refused.value.status, refused.value.code) == (429, "concurrency_limit_exceeded")
    assert refused.value.retry_after_s == 1


def test_one_tenant_with_several_keys_leaves_its_part_of_the_total_to_others() -> None:
    total = LimitSettings(concurrency=8, burst=100, requests_per_s=0.001)
    limits = RequestLimits(total, Clock(), tenants=2, tenant_share=0.5)
    greedy = [Caller(f"g{n}", "g", "greedy", ALL_SCOPES, None, LimitSettings()) for n in range(3)]
    modest = Caller("m", "m", "modest", ALL_SCOPES, None, LimitSettings())
    with contextlib.ExitStack() as stack:
        for number in range(4):
            stack.enter_context(limits.admit(greedy[number % 3]))
        with pytest.raises(ApiError, match=r"gateway\.tenant_share"):
            stack.enter_context(limits.admit(greedy[0]))
        for _ in range(4):
            stack.enter_context(limits.admit(modest))


@pytest.mark.parametrize("choices", [1, 4, 16])
def test_each_choice_counts_as_a_request(choices: int) -> None:
    limits = RequestLimits(LimitSettings(), Clock())
    one = caller(concurrency=16, burst=32, requests_per_s=0.001)
    with contextlib.ExitStack() as stack:
        for _ in range(16 // choices):
            stack.enter_context(limits.admit(one))
            stack.enter_context(limits.work(one, choices, 0))
        with pytest.raises(ApiError) as refused, limits.admit(one), limits.work(one, choices, 0):
            pass
        assert refused.value.code == "concurrency_limit_exceeded"
    assert limits.in_progress == 0


def test_tokens_are_charged_when_a_call_begins_and_what_it_did_not_take_is_given_back() -> None:
    clock = Clock()
    limits = RequestLimits(LimitSettings(), clock)
    one = caller(tokens_per_s=100, tokens_burst=1000)
    with limits.admit(one), limits.work(one, 1, 800) as work:
        with pytest.raises(ApiError) as refused, limits.work(one, 1, 800):
            pass
        assert (refused.value.code, refused.value.retry_after_s) == ("token_limit_exceeded", 6)
        work.used_tokens = 100
    with limits.admit(one), limits.work(one, 1, 900):
        pass
    with pytest.raises(ApiError), limits.admit(one), limits.work(one, 1, 1):
        pass
    clock.at_s += 60
    with limits.admit(one), limits.work(one, 1, 10**9):
        pass  # more than the burst is let in when nothing was taken


def test_a_refused_call_takes_no_tokens_and_one_whose_client_left_takes_all() -> None:
    limits = RequestLimits(LimitSettings(), Clock())
    one = caller(tokens_per_s=0.001, tokens_burst=1000)
    with pytest.raises(ApiError, match="overloaded"), limits.admit(one), limits.work(one, 1, 1000):
        raise ApiError(503, "overloaded", "overloaded")
    with limits.admit(one), limits.work(one, 1, 1000):
        pass
    with pytest.raises(ApiError), limits.admit(one), limits.work(one, 1, 1):
        pass
