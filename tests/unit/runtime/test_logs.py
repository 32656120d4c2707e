"""No log line of any library carries a secret."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from headrace_runtime.process import logs
from headrace_runtime.settings.sections import LogSettings
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
