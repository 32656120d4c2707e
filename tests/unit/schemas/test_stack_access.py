"""Tests that the token of a stack is found by the stack's address, and is sent only to addresses of this stack."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace_schemas.http import stack_access
from headrace_schemas.http.stack_access import BusLogin, key_for, login_for, make_token, read_token

GATEWAY, BUS = "http://127.0.0.1:8000", "127.0.0.1:9092"


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stack_access, "_keys", {})
    monkeypatch.setattr(stack_access, "_logins", {})
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    (tmp_path / ".headrace/run").mkdir(parents=True)
    state = {
        "bus": BUS,
        "services": {"gateway": {"url": GATEWAY}},
        "token_is_key": True,
        "token_is_password": True,
    }
    (tmp_path / ".headrace/run/state.json").write_text(json.dumps(state))
    return tmp_path / ".headrace"


def test_the_token_is_its_owners_alone_and_stays(stack: Path) -> None:
    token = make_token(stack)
    assert len(token) >= 40
    assert (stack / "run/token").stat().st_mode & 0o777 == 0o600
    assert make_token(stack) == read_token(stack) == token


def test_a_token_that_others_may_read_is_made_again(stack: Path) -> None:
    token = make_token(stack)
    (stack / "run/token").chmod(0o644)
    assert read_token(stack) == ""
    assert make_token(stack) not in ("", token)


def test_it_is_used_for_the_stacks_own_addresses_alone(stack: Path) -> None:
    token = make_token(stack)
    assert key_for(GATEWAY) == key_for(f"{GATEWAY}/v1/models") == token
    assert login_for(BUS) == BusLogin("headrace", token)
    for other in (
        "http://127.0.0.1:8001",
        "http://evil.example:8000",
        "http://127.0.0.1:8000@evil.example",
        "http://[",
    ):
        assert key_for(other) is None
    for other in ("kafka:9092", "127.0.0.1:9093", f"{BUS},evil.example:9092"):
        assert login_for(other) is None


def test_a_stack_with_a_key_of_its_own_has_another_one(stack: Path) -> None:
    make_token(stack)
    state = json.loads((stack / "run/state.json").read_text()) | {"token_is_key": False, "token_is_password": False}
    (stack / "run/state.json").write_text(json.dumps(state))
    assert (key_for(GATEWAY), login_for(BUS)) == (None, None)


def test_the_environment_wins(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(stack)
    monkeypatch.setenv("HEADRACE_SECURITY__INTERNAL_KEY", '"0123"')
    monkeypatch.setenv("HEADRACE_BUS__PASSWORD", "secret")
    monkeypatch.setenv("HEADRACE_BUS__MECHANISM", "SCRAM-SHA-512")
    assert key_for(GATEWAY) == "0123"
    assert login_for("kafka:9092") == BusLogin("headrace", "secret", "SCRAM-SHA-512")


def test_a_login_does_not_show_its_password() -> None:
    assert "secret" not in repr(BusLogin("headrace", "secret"))
    assert "secret" not in f"{BusLogin('headrace', 'secret')}"
