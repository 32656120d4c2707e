"""Tests of API keys, scopes and limits: rate, concurrency, size and file descriptors."""

from __future__ import annotations

import contextlib
import hashlib
import resource
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access.keys import ALL_SCOPES, Caller, KeyRing, read_keys
from headrace_gateway.access.limits import Meter, RequestLimits, limit_to_descriptors
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.settings import GatewaySettings, KeySettings, LimitSettings
from headrace_runtime.errors import SettingError
from tests.support.streams import ManualClock

LIMITS = LimitSettings(requests_per_s=10, burst=2, concurrency=3)


def key(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(name=secret, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def bearer(secret: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {secret}".encode()}


def test_a_key_gives_its_tenant_and_its_scopes() -> None:
    ring = KeyRing([key("s3cret", tenant="acme", scopes=("feedback",), session_id="run")], LIMITS)
    caller = ring.identify(None, bearer("s3cret"))
    assert (caller.tenant, caller.session_id) == ("acme", "run")
    caller.require_scope("feedback")
    with pytest.raises(ApiError) as caught:
        caller.require_scope("chat")
    assert (caught.value.status, caught.value.code, caught.value.kind) == (403, "missing_scope", "permission_error")


def test_a_key_in_the_path_wins_over_a_made_up_bearer() -> None:
    """AgentScope's client can send the key only in the URL, and always adds the header `Bearer dummy`."""
    ring = KeyRing([key("s3cret", tenant="acme")], LIMITS)
    assert ring.identify("s3cret", bearer("dummy")).tenant == "acme"


@pytest.mark.parametrize(
    ("path_key", "headers", "code"),
    [
        (None, {}, "missing_api_key"),
        (None, {b"authorization": b"Basic abc"}, "missing_api_key"),
        (None, bearer("wrong"), "invalid_api_key"),
        ("wrong", bearer("s3cret"), "invalid_api_key"),
        (None, {b"authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
    ],
)
def test_who_has_no_key_is_refused(path_key: str | None, headers: dict[bytes, bytes], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        KeyRing([key("s3cret")], LIMITS).identify(path_key, headers)
    assert (caught.value.status, caught.value.code) == (401, code)


def test_the_internal_key_may_do_everything() -> None:
    KeyRing([key("s3cret")], LIMITS, "inside").identify(None, bearer("inside")).require_scope("admin")


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = "a" * 64
    path.write_text(f'[[keys]]\nname = "one"\nsha256 = "{digest}"\ntenant = "acme"\n')
    (key,) = read_keys(GatewaySettings(keys_file=str(path)))
    assert (key.tenant, key.sha256) == ("acme", digest)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"host": "0.0.0.0"}, "gateway.host"),
        ({"keys": (key("a"), key("a"))}, "gateway.keys.name"),
        ({"keys_file": "/nowhere/keys.toml"}, "gateway.keys_file"),
    ],
)
def test_settings_that_cannot_be_meant_stop_the_start(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_keys(GatewaySettings(**settings))
    assert caught.value.name == name


def test_a_keys_file_that_is_wrong_says_where(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "one"\nsha256 = "plain-text-key"\n')
    with pytest.raises(SettingError, match=r"keys\.0\.sha256"):
        read_keys(GatewaySettings(keys_file=str(path)))


def test_beyond_its_rate_a_key_waits_as_long_as_it_is_told() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitSettings(), clock)
    caller = KeyRing((), LIMITS).identify(None, {})
    for _ in range(2):
        with limits.admit(caller):
            pass
    with pytest.raises(ApiError) as caught, limits.admit(caller):
        pass
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.retry_after_s == pytest.approx(0.1)
    assert caught.value.headers == {"retry-after": "1"}
    clock.advance(0.1)
    with limits.admit(caller):
        assert limits.in_progress == 1


def test_a_place_is_given_back_when_the_work_fails() -> None:
    limits = RequestLimits(LimitSettings(), ManualClock())
    caller = KeyRing((), LIMITS).identify(None, {})
    with pytest.raises(RuntimeError), limits.admit(caller):
        raise RuntimeError
    assert limits.in_progress == 0


def test_a_key_may_name_its_models() -> None:
    ring = KeyRing([key("all"), key("one", models=("tiny",))], LIMITS)
    assert ring.identify(None, bearer("all")).may_use("other")
    caller = ring.identify(None, bearer("one"))
    assert (caller.may_use("tiny"), caller.may_use("other")) == (True, False)


def test_without_keys_agents_call_and_the_internal_key_alone_is_admin() -> None:
    ring = KeyRing((), LimitSettings(), "between-us")
    for headers in ({}, {b"authorization": b"Bearer dummy"}, {b"authorization": b"Basic between-us"}):
        caller = ring.identify(None, headers)
        assert caller.tenant == "default"
        caller.require_scope("chat")
        caller.require_scope("feedback")
        with pytest.raises(ApiError, match=r"security\.internal_key") as refusal:
            caller.require_scope("admin")
        assert refusal.value.status == 401
    ring.identify(None, {b"authorization": b"Bearer between-us"}).require_scope("admin")
    ring.identify("between-us", {}).require_scope("admin")
    KeyRing((), LimitSettings()).identify(None, {}).require_scope("admin")


def caller(name: str = "one", **limits: float) -> Caller:
    return Caller(name, name, "t", ALL_SCOPES, None, LimitSettings.model_validate(limits))


def begun(meter: Meter, tries: int) -> int:
    """Return how many of `tries` requests may begin now. Each request ends before the next one begins."""
    count = 0
    for _ in range(tries):
        if meter.refusal("it") is None:
            meter.begin()
            meter.in_progress -= 1
            count += 1
    return count


def test_a_burst_is_all_that_a_pause_can_save_up() -> None:
    clock = ManualClock()
    meter = Meter(LimitSettings(requests_per_s=10, burst=5), clock)
    assert begun(meter, 20) == 5
    clock.advance(0.2)
    assert begun(meter, 20) == 2
    clock.advance(3600)
    assert begun(meter, 20) == 5


def test_concurrency_is_counted_by_key_and_in_total_and_a_refused_request_is_charged_to_nobody() -> None:
    limits = RequestLimits(LimitSettings(concurrency=2, burst=4, requests_per_s=0.001), ManualClock())
    first, second = caller("one", concurrency=1), caller("two", concurrency=2)
    with limits.admit(first):
        with pytest.raises(ApiError, match="this API key"), limits.admit(first):
            pass
        with limits.admit(second):
            assert limits.in_progress == 2
            with pytest.raises(ApiError, match="all callers together"), limits.admit(second):
                pass
    assert limits.in_progress == 0
    for _ in range(2):
        with limits.admit(second):
            pass
    with pytest.raises(ApiError, match="all callers together") as refused, limits.admit(second):
        pass
    assert refused.value.code == "rate_limit_exceeded"


def test_what_a_request_causes_may_be_owed_and_nothing_begins_until_it_is_paid() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitSettings(requests_per_s=100, burst=100), clock)
    limited = caller(requests_per_s=2, burst=3)
    with limits.admit(limited):
        limits.charge(limited, 3)
        limits.charge(limited, 2)  # nothing was left, and nothing was owed yet
        limits.charge(limited, 1)  # itself, which `admit` has counted
        with pytest.raises(ApiError, match="counts as 5, with 2 allowed per second") as refused:
            limits.charge(limited, 5)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after_s == 1.0, "one is owed and one is needed, at two per second"
    clock.advance(0.75)
    with pytest.raises(ApiError) as refused, limits.admit(limited):
        pass
    assert refused.value.retry_after_s == 0.25
    clock.advance(0.25)
    with limits.admit(limited):
        pass


def test_who_has_all_places_in_use_comes_back_in_a_second() -> None:
    limits = RequestLimits(LimitSettings(), ManualClock())
    limited = caller(concurrency=1)
    with limits.admit(limited), pytest.raises(ApiError) as refused, limits.admit(limited):
        pass
    assert (refused.value.status, refused.value.code) == (429, "concurrency_limit_exceeded")
    assert refused.value.retry_after_s == 1


@pytest.mark.parametrize(("share", "calls"), [(0.5, 4), (0.01, 1)])
def test_one_tenant_with_several_keys_leaves_its_part_of_the_total_to_others(share: float, calls: int) -> None:
    limits = RequestLimits(LimitSettings(concurrency=8, burst=800), ManualClock(), tenant_share=share)
    greedy = [Caller(f"g{n}", "g", "greedy", ALL_SCOPES, None, LimitSettings()) for n in range(3)]
    modest = Caller("m", "m", "modest", ALL_SCOPES, None, LimitSettings())
    with contextlib.ExitStack() as stack:
        for number in range(calls):
            stack.enter_context(limits.admit(greedy[number % 3]))
        with pytest.raises(ApiError, match=r"gateway\.tenant_share"):
            stack.enter_context(limits.admit(greedy[0]))
        for _ in range(calls):
            stack.enter_context(limits.admit(modest))


@pytest.mark.parametrize(("share", "calls", "tokens"), [(0.5, 4, 500), (0.001, 1, 1)])
def test_part_of_a_tenant_is_refilled_in_proportion(share: float, calls: int, tokens: int) -> None:
    total = LimitSettings(requests_per_s=1, burst=8, tokens_per_s=100, tokens_burst=1000)
    limits = RequestLimits(total, ManualClock(), tenant_share=share)
    tenant = Caller("g", "g", "greedy", ALL_SCOPES, None, LimitSettings())
    for number in range(calls):
        taken = limits.work(tenant, 1, 0 if number else tokens)
        with limits.admit(tenant), taken, pytest.raises(ApiError) as no_tokens, limits.work(tenant, 1, 1):
            pass
    with pytest.raises(ApiError, match=f"{share:g} requests per second") as no_requests, limits.admit(tenant):
        pass
    assert no_tokens.value.retry_after_s == pytest.approx(1 / (100 * share))
    assert no_requests.value.retry_after_s == pytest.approx(1 / share)


def test_stored_bytes_are_bounded_for_each_tenant_and_hour() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitSettings(), clock, bytes_per_hour=3600)
    limits.store("t", 3601)
    with pytest.raises(ApiError) as refused, limits.admit(caller()):
        pass
    assert (refused.value.status, refused.value.code) == (429, "storage_limit_exceeded")
    assert refused.value.retry_after_s == 2.0, "one byte is owed and one is needed, at one per second"
    with limits.admit(Caller("two", "two", "other", ALL_SCOPES, None, LimitSettings())):
        clock.advance(2.0)
    with limits.admit(caller()):
        pass


@pytest.mark.parametrize("choices", [2, 5])
def test_call_with_more_choices_than_the_limit_runs_alone(choices: int) -> None:
    limits = RequestLimits(LimitSettings(), ManualClock())
    limited = caller(concurrency=choices - 1)
    with limits.admit(limited), limits.work(limited, choices, 0), pytest.raises(ApiError), limits.admit(limited):
        pass
    limited = caller("two", concurrency=choices)
    with limits.admit(limited), pytest.raises(ApiError, match="requests in progress"), limits.admit(limited):
        limits.work(limited, choices, 0).__enter__()


@pytest.mark.parametrize("choices", [1, 4, 16])
def test_each_choice_counts_as_a_request(choices: int) -> None:
    limits = RequestLimits(LimitSettings(), ManualClock())
    limited = caller(concurrency=16, burst=32, requests_per_s=0.001)
    with contextlib.ExitStack() as stack:
        for _ in range(16 // choices):
            stack.enter_context(limits.admit(limited))
            stack.enter_context(limits.work(limited, choices, 0))
        with pytest.raises(ApiError) as refused, limits.admit(limited), limits.work(limited, choices, 0):
            pass
        assert refused.value.code == "concurrency_limit_exceeded"
    assert limits.in_progress == 0


def test_tokens_are_charged_when_a_call_begins_and_what_it_did_not_take_is_given_back() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitSettings(), clock)
    limited = caller(tokens_per_s=100, tokens_burst=1000)
    with limits.admit(limited), limits.work(limited, 1, 800) as work:
        with pytest.raises(ApiError) as refused, limits.work(limited, 1, 800):
            pass
        assert (refused.value.code, refused.value.retry_after_s) == ("token_limit_exceeded", 6)
        work.used_tokens = 100
    with limits.admit(limited), limits.work(limited, 1, 900):
        pass
    with pytest.raises(ApiError), limits.admit(limited), limits.work(limited, 1, 1):
        pass
    clock.advance(60)
    with limits.admit(limited), limits.work(limited, 1, 10**9):
        pass  # more than the burst is let in when nothing was taken


def test_a_refused_call_takes_no_tokens_and_one_whose_client_left_takes_all() -> None:
    limits = RequestLimits(LimitSettings(), ManualClock())
    limited = caller(tokens_per_s=0.001, tokens_burst=1500)
    with limits.admit(limited), limits.work(limited, 1, 500):
        pass
    with pytest.raises(ApiError, match="overloaded"), limits.admit(limited), limits.work(limited, 1, 1000):
        raise ApiError(503, "overloaded", "overloaded")
    with limits.admit(limited), limits.work(limited, 1, 1000):
        pass
    with pytest.raises(ApiError), limits.admit(limited), limits.work(limited, 1, 1):
        pass


@pytest.fixture
def given_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the process limit of file descriptors, and return its soft and hard value."""
    limits = [1024, 4096]

    def put(_what: int, both: tuple[int, int]) -> None:
        assert both[0] <= both[1] or both[1] == resource.RLIM_INFINITY
        limits[:] = both

    monkeypatch.setattr(resource, "getrlimit", lambda _resource: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", put)
    return limits


def test_the_process_asks_for_what_it_needs(given_descriptors: list[int]) -> None:
    limits = LimitSettings(concurrency=1000)
    assert limit_to_descriptors(limits) == limits
    assert given_descriptors == [2128, 4096]


@pytest.mark.parametrize(("hard", "concurrency"), [(4096, (4096 - 128) // 2), (100, 1)])
def test_what_the_system_does_not_give_lowers_the_concurrency(
    given_descriptors: list[int], hard: int, concurrency: int
) -> None:
    given_descriptors[:] = [hard // 2, hard]
    assert limit_to_descriptors(GatewaySettings().limits_total).concurrency == concurrency
    assert given_descriptors == [hard, hard]


@pytest.mark.parametrize("soft", [100_000, resource.RLIM_INFINITY])
def test_what_is_enough_is_left_alone(given_descriptors: list[int], soft: int) -> None:
    given_descriptors[:] = [soft, resource.RLIM_INFINITY]
    limits = GatewaySettings().limits_total
    assert limit_to_descriptors(limits) == limits
    assert given_descriptors == [soft, resource.RLIM_INFINITY]


def test_one_caller_may_not_take_all_places() -> None:
    settings = GatewaySettings()
    assert settings.limits_per_key.concurrency < settings.limits_total.concurrency
