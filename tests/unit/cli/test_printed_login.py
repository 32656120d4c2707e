"""The address with the token that `headrace up` prints: a terminal gets it, and a log does not."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import httpx2
import pytest

from headrace_cli.commands.up import print_summary
from headrace_operations.supervisor.state import RunState, ServiceState
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings, ServiceSettings
from headrace_schemas.http.stack_access import make_token, take_login_token
from tests.unit.cli.test_cli import NOW


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def summary(data_dir: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch, **fields: object) -> str:
    """Return what `headrace up` prints to `output` for a stack with a registry."""
    registry = ServiceState(status="ready", pid=1, url="http://127.0.0.1:8003", port=8003, log="x.log", since=NOW)
    state = RunState.model_validate(
        {"pid": 1, "data_dir": str(data_dir), "started_at": NOW, "bus": "127.0.0.1:1", "token_is_key": True}
        | {"services": {"registry": registry}, **fields}
    )
    monkeypatch.setattr(sys, "stdout", output)
    print_summary(state)
    return output.getvalue()


@pytest.fixture
def token(data_dir: Path) -> str:
    (data_dir / "run").mkdir(parents=True)
    return make_token(data_dir)


def test_a_terminal_gets_an_address_with_the_token(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(data_dir, Terminal(), monkeypatch)
    assert f"http://headrace:{token}@127.0.0.1:8003/v1/models" in text


def test_a_terminal_gets_an_address_that_logs_in_to_the_console_once(
    data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del token
    service = ServiceState(status="ready", pid=1, url="http://127.0.0.1:8040", port=8040, log="x.log", since=NOW)
    printed = summary(data_dir, Terminal(), monkeypatch, services={"console": service})
    match = re.search(r"http://127\.0\.0\.1:8040/login\?token=([\w-]+)", printed)
    assert match is not None
    assert take_login_token(data_dir, match[1])
    assert not take_login_token(data_dir, match[1])
    logged = summary(data_dir, io.StringIO(), monkeypatch, services={"console": service})
    assert "http://127.0.0.1:8040" in logged
    assert "token=" not in logged


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"])
def test_a_log_gets_no_token(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    text = summary(data_dir, io.StringIO(), monkeypatch)
    assert token not in text
    assert "run/token" in text.replace("\n", "")


def test_no_address_is_printed_that_the_token_does_not_open(
    data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[dict[str, object]] = [{"token_is_key": False, "token_is_password": True}, {"services": {}}]
    for fields in states:
        assert token not in summary(data_dir, Terminal(), monkeypatch, **fields)


async def test_the_printed_address_opens_the_page(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common = Common(data_dir=data_dir, security=SecuritySettings.model_validate({"internal_key": token}))
    async with web.serve(web.app({}, common=common), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        page = f"127.0.0.1:{port}/metrics"
        assert (await client.get(f"http://{page}")).status_code == 401
        assert (await client.get(f"http://headrace:{token}@{page}")).status_code == 200
