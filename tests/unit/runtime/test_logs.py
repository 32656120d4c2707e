"""Tests that no log line contains a secret, and of the health of reward sources: counts, last error, few log lines."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import httpx
import pytest
import structlog

from headrace_runtime.http import web
from headrace_runtime.http.web import Sources
from headrace_runtime.process import logs
from headrace_runtime.settings.sections import Common, LogSettings
from headrace_schemas.http.registry_api import SourceList
from headrace_schemas.values.text import printable


@pytest.fixture
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, settings = root.handlers, root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**settings)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("shape", ["json", "console"])
def test_secrets_are_in_no_line(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = LogSettings.model_validate({"format": shape})
    logs.configure("test", settings, ["4711471147114711", "PLANTED"])
    log = structlog.stdlib.get_logger("ours")
    try:
        raise ValueError("postgresql://me:SHAPED@db/x: PLANTED")
    except ValueError as error:
        log.exception("failed", error=repr(error), settings={"key": 4711471147114711, "list": ["xPLANTEDx"]})
        logging.getLogger("theirs").exception("connect %s", "redis://me:SHAPED@host")
    log.info("counts", tokens=17, ratio=0.5, name=None)
    log_text = capsys.readouterr().err
    assert not any(secret in log_text for secret in ("PLANTED", "SHAPED", "4711471147114711"))
    assert log_text.count("(hidden)") >= 5
    assert "17" in log_text


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("shape", ["json", "console"])
def test_log_values_are_visible_and_bounded(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = 'a\x1b[2J\x9b31m\u202eb\n{"level": "forged"}\x00\ud800\u2028c'
    logs.configure("test", LogSettings.model_validate({"format": shape}))
    log = structlog.stdlib.get_logger("ours")
    try:
        raise ValueError(hostile)
    except ValueError:
        log.exception("failed " + hostile, value=hostile, mapping={hostile: [hostile]}, long="x" * 1_000_000)
        logging.getLogger("theirs").error("they send %s", hostile)
    written = capsys.readouterr().err
    own_colors = re.compile(r"\x1b\[[0-9;]*m") if shape == "console" else re.compile("$^")
    lines = own_colors.sub("", written)
    assert not [letter for letter in lines if letter != "\n" and printable(letter) != letter]
    assert not any(line.startswith('{"level": "forged"') for line in lines.splitlines() if shape == "json")
    assert len(lines) < 100_000


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    info = warning


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    recorder = Log()
    monkeypatch.setattr(web, "log", recorder)
    return recorder


def test_failures_are_counted_told_and_over_with_the_first_success(log: Log) -> None:
    sources = Sources()
    sources.expect(["function:a", "function:b"])
    for _ in range(150):
        sources.note("function:a", "failed", "KeyError: 'x'")
    sources.note("function:b", "abstained", None)
    a, b = sources.listed().data
    assert (a.id, a.failing, a.outcomes, a.last_error) == ("function:a", 150, {"failed": 150}, "KeyError: 'x'")
    assert a.last_error_at is not None
    assert (b.failing, b.last_error) == (0, None)
    assert [fields["in_a_row"] for _, fields in log.lines] == [1, 10, 100]
    assert log.lines[0][1]["error"] == "KeyError: 'x'"
    sources.note("function:a", "scored", None)
    a = sources.listed().data[0]
    assert (a.failing, a.last_error) == (0, "KeyError: 'x'"), "the last error stays to be read"
    assert log.lines[-1] == ("source_works_again", {"source": "function:a", "failed_in_a_row": 150})


def test_what_quotes_a_model_is_not_logged(log: Log) -> None:
    sources = Sources()
    sources.note("judge:a", "parse_error", "no verdict in: SECRET")
    assert log.lines[0][1]["error"] is None
    assert sources.listed().data[0].last_error == "no verdict in: SECRET"


def test_sources_are_bounded() -> None:
    sources = Sources()
    for number in range(1000):
        sources.note(f"judge:{number}", "failed", "x" * 100_000)
    listed = sources.listed().data
    assert len(listed) == 256
    assert listed[-1].id == "judge:999"
    assert len(listed[-1].last_error or "") == 2000


async def test_the_page_needs_the_internal_key() -> None:
    sources = Sources()
    sources.note("judge:a", "timed_out", None)
    application = web.app({}, [sources.route(Common.model_validate({"security": {"internal_key": "key"}}))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://scorer") as http:
        assert (await http.get("/sources")).status_code == 401
        answer = await http.get("/sources", headers={"Authorization": "Bearer key"})
    assert SourceList.model_validate_json(answer.content).data[0].last_error == "timed_out"
