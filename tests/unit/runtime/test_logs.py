"""No log line carries a secret, whoever wrote it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from headrace_runtime import logs
from headrace_runtime.settings import LogSettings


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
    said = capsys.readouterr().err
    assert not any(secret in said for secret in ("PLANTED", "SHAPED", "4711471147114711"))
    assert said.count("(hidden)") >= 5
    assert "17" in said
