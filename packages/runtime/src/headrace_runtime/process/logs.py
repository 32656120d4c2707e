"""Structured logs, one JSON object per line and without text of users, and the W3C trace context that each line
contains.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from headrace_runtime.settings.sections import LogSettings
from headrace_schemas.values.errors import Redactor
from headrace_schemas.values.text import printable, printable_lines

_TEXT_LENGTH_MAX = 8_000
_TRACEBACK_LENGTH_MAX = 32_000
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)
_PATTERN = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


def _add_trace(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    trace = trace_id()
    if trace:
        event["trace_id"] = trace
    return event


def _redact(redactor: Redactor) -> Processor:
    """Return the log processor that removes secrets and terminal control characters from all text.

    It also covers tracebacks and messages of libraries. Only a traceback keeps its line breaks, so that no value can
    imitate a log line.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return printable(redactor(value), _TEXT_LENGTH_MAX)
        if isinstance(value, Mapping):
            return {printable(str(key)): clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return [clean(item) for item in value]
        text = str(value)
        clean_text = redactor(text)  # a key may consist of digits
        if isinstance(value, int | float | bool | None) and clean_text == text:
            return value
        return printable(clean_text, _TEXT_LENGTH_MAX)

    def process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {
            key: value
            if key.startswith("_")
            else printable_lines(redactor(str(value)), _TRACEBACK_LENGTH_MAX)
            if key == "exception"
            else clean(value)
            for key, value in event.items()
        }

    return process


def configure(service: str, settings: LogSettings, secrets: Iterable[str] = ()) -> None:
    """Configure logging, so that the logs of Headrace and of libraries are written to stderr in one format.

    Must be called once, before logging.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _add_trace,
        structlog.processors.format_exc_info,
        _redact(Redactor(secrets)),
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    for noisy in ("aiokafka", "faust", "mode", "alembic", "uvicorn.access", "httpx2"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the structured logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def current_traceparent() -> str | None:
    """Return the `traceparent` of the current task, or None outside of a trace."""
    return _current.get()


def trace_id() -> str | None:
    """Return the trace id (W3C trace context) of the current task; None outside of a trace."""
    value = _current.get()
    return value.split("-")[1] if value else None


def child_span(parent: str | None) -> str:
    """Return the `traceparent` of a new span in the trace of `parent`, or of a new trace if `parent` is None or
    malformed."""
    match = _PATTERN.match(parent or "")
    trace = match.group(1) if match else os.urandom(16).hex()
    flags = match.group(3) if match else "01"
    return f"00-{trace}-{os.urandom(8).hex()}-{flags}"


@contextlib.contextmanager
def span(parent: str | None) -> Iterator[str]:
    """Make a child span of `parent` the current span while the body runs. Logs and produced events contain it. Yields
    its `traceparent`."""
    value = child_span(parent)
    token = _current.set(value)
    try:
        yield value
    finally:
        _current.reset(token)
