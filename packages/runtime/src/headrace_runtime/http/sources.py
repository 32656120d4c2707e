"""Counters of the outcomes of each reward source, with its last error, for scorer and judge.

The first failure of a source, the 10th, 100th and so on of consecutive failures, and its recovery are logged. Counts
begin with the process; the metrics and the topic `rewards` have the history.
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
from headrace_runtime.http.web import require_internal_key
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_schemas.http.registry_api import SourceList, SourceState

log = get_logger(__name__)
_FINE = frozenset({"scored", "abstained"})
_QUOTES = frozenset({"parse_error"})
"""Outcomes whose reason quotes a model's text. The reason is not logged, because the log contains no text of runs."""
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
    """Counters of the outcomes of all reward sources of a service, each with its last error."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._sources: dict[str, _Source] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Add sources, so that `GET /sources` lists them before their first outcome."""
        for name in names:
            self._sources.setdefault(name, _Source())

    def note(self, name: str, outcome: str, reason: str | None) -> None:
        """Count one outcome of a source: one of `Reward.outcome`, or `retried`."""
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
        """Return the state of each source."""
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
        """Return the route `GET /sources`. It requires the internal key, because an error may quote user text."""

        async def sources(request: Request) -> Response:
            require_internal_key(request, common)
            return Response(self.listed().model_dump_json(exclude_none=True), media_type="application/json")

        return Route("/sources", sources)


def _is_power_of_ten(number: int) -> bool:
    return number > 0 and str(number).strip("0") == "1"
