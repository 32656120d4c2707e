"""Counts the outcomes of each reward source and keeps its last error, for scorer and judge.

A source that begins to fail, and each further power of ten of failures in a row, is a line in the log; so is its
recovery. All of it is counted since the process started; the metrics and the topic `rewards` keep more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_runtime.clock import Clock, SystemClock
from headrace_runtime.logs import get_logger
from headrace_runtime.settings import Common
from headrace_runtime.web import require_internal_key
from headrace_schemas.source_api import SourceList, SourceState

log = get_logger(__name__)
_FINE = frozenset({"scored", "abstained"})
_QUOTES = frozenset({"parse_error"})
"""Outcomes whose reason quotes a model; no text of a run is logged."""
RETRIED = "retried"
_SOURCES_MAX = 256
_ERROR_LENGTH_MAX = 2000


@dataclass
class _Source:
    outcomes: Counter[str] = field(default_factory=Counter)
    failing: int = 0
    last_error: str | None = None
    last_error_at: datetime | None = None


class Sources:
    """`expect` names those that there are, `note` says how one ended."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._sources: dict[str, _Source] = {}

    def expect(self, names: Iterable[str]) -> None:
        for name in names:
            self._sources.setdefault(name, _Source())

    def note(self, name: str, outcome: str, reason: str | None) -> None:
        """`outcome` as in `Reward.outcome`, or `retried`."""
        if name not in self._sources and len(self._sources) >= _SOURCES_MAX:
            self._sources.pop(next(iter(self._sources)))
        source = self._sources.setdefault(name, _Source())
        source.outcomes[outcome] += 1
        if outcome in _FINE:
            if source.failing:
                log.info("source_works_again", source=name, failed_in_a_row=source.failing)
            source.failing = 0
            return
        source.failing += 1
        source.last_error = (reason or outcome)[:_ERROR_LENGTH_MAX]
        source.last_error_at = self._clock.now()
        if _is_power_of_ten(source.failing):
            error = None if outcome in _QUOTES else source.last_error
            log.warning("source_fails", source=name, outcome=outcome, in_a_row=source.failing, error=error)

    def listed(self) -> SourceList:
        return SourceList(
            data=tuple(
                SourceState(
                    id=name,
                    outcomes=dict(source.outcomes),
                    failing=source.failing,
                    last_error=source.last_error,
                    last_error_at=source.last_error_at,
                )
                for name, source in self._sources.items()
            )
        )

    def route(self, common: Common) -> Route:
        """`GET /sources`, for those with the internal key: an error may quote what it was about."""

        async def sources(request: Request) -> Response:
            require_internal_key(request, common)
            return Response(self.listed().model_dump_json(exclude_none=True), media_type="application/json")

        return Route("/sources", sources)


def _is_power_of_ten(number: int) -> bool:
    return number > 0 and str(number).strip("0") == "1"
