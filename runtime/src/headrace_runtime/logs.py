"""Structured logs: one JSON object a line, with service, level, event and trace id. Never user text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from headrace_runtime import tracing
from headrace_runtime.settings import LogSettings
from headrace_schemas.redaction import Redactor


def _add_trace(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    trace = tracing.trace_id()
    if trace:
        event["trace_id"] = trace
    return event


def _redact(redactor: Redactor) -> Processor:
    """Everything that is text, tracebacks and what libraries say included."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redactor(value)
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return [clean(item) for item in value]
        text = str(value)
        clean_text = redactor(text)  # a key may consist of digits
        return value if isinstance(value, int | float | bool | None) and clean_text == text else clean_text

    def process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {key: value if key.startswith("_") else clean(value) for key, value in event.items()}

    return process


def configure(service: str, settings: LogSettings, secrets: Iterable[str] = ()) -> None:
    """Route our logs and those of libraries through one renderer on stderr. Called once, before anything logs."""
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
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
