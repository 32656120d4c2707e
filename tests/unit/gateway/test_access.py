"""Keys, scopes and limits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access import KeyRing, read_keys
from headrace_gateway.limits import RequestLimits
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import GatewaySettings, KeySettings, LimitSettings
from headrace_runtime.errors import SettingError
from tests.support.streams import ManualClock

LIMITS = LimitSettings(requests_per_s=10, burst=2, concurrency=3)


def key(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(name=secret, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def bearer(secret: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {secret}".encode()}


def test_without_keys_everybody_is_the_default_tenant_with_every_scope() -> None:
    caller = KeyRing((), LIMITS).identify(None, bearer("dummy"))
    assert caller.tenant == "default"
    for scope in ("chat", "feedback", "admin"):
        caller.need(scope)


def test_a_key_gives_its_tenant_and_its_scopes() -> None:
    ring = KeyRing([key("s3cret", tenant="acme", scopes=("feedback",), session_id="run")], LIMITS)
    caller = ring.identify(None, bearer("s3cret"))
    assert (caller.tenant, caller.session_id) == ("acme", "run")
    caller.need("feedback")
    with pytest.raises(ApiError) as caught:
        caller.need("chat")
    assert (caught.value.status, caught.value.code, caught.value.kind) == (403, "missing_scope", "permission_error")


def test_a_key_in_the_path_wins_over_a_made_up_bearer() -> None:
    """AgentScope's client sends `Bearer dummy` beside the only secret that it can carry, in its URL."""
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
    KeyRing([key("s3cret")], LIMITS, "inside").identify(None, bearer("inside")).need("admin")


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = "a" * 64
    path.write_text(f'[[keys]]\nname = "one"\nsha256 = "{digest}"\ntenant = "acme"\n')
    (found,) = read_keys(GatewaySettings(keys_file=str(path)))
    assert (found.tenant, found.sha256) == ("acme", digest)


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


def test_concurrency_is_bounded_per_key_and_in_total() -> None:
    clock = ManualClock()
    total = LimitSettings(concurrency=2)
    limits = RequestLimits(total, clock)
    ring = KeyRing([key("a"), key("b"), key("c", limits=LimitSettings(concurrency=1))], LimitSettings())
    a, b, c = (ring.identify(None, bearer(name)) for name in "abc")
    with limits.admit(c):
        with pytest.raises(ApiError, match="this API key may have 1"), limits.admit(c):
            pass
        with limits.admit(a):
            with pytest.raises(ApiError, match="all callers together may have 2"), limits.admit(b):
                pass
            assert limits.in_progress == 2
    assert limits.in_progress == 0


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
        caller.need("chat")
        caller.need("feedback")
        with pytest.raises(ApiError, match=r"security\.internal_key") as refusal:
            caller.need("admin")
        assert refusal.value.status == 401
    ring.identify(None, {b"authorization": b"Bearer between-us"}).need("admin")
    ring.identify("between-us", {}).need("admin")
    KeyRing((), LimitSettings()).identify(None, {}).need("admin")
