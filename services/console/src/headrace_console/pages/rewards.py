"""Rewards by source and outcome."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from headrace_console.pages.frame import Templates
from headrace_console.pages.page import Page
from headrace_console.pages.sessions import chosen_tenant
from headrace_console.read_model import queries, tables
from headrace_console.users import User
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import Refused
from headrace_runtime.http.web import parameters_of
from headrace_runtime.storage.database import Database
from headrace_schemas.events.reward import Outcome
from headrace_schemas.values.text import printable

OUTCOMES = get_args(Outcome)
_DAYS_MAX = 400
_DAYS = "7"


class RewardPages:
    """The page of all reward sources."""

    def __init__(self, templates: Templates, database: Database, clock: Clock) -> None:
        self._templates = templates
        self._database = database
        self._clock = clock

    def pages(self) -> list[Page]:
        """Return the page."""
        return [Page("/rewards", self.rewards)]

    async def rewards(self, request: Request, user: User) -> Response:
        """Show the outcomes of each source in the last days, and how its values are distributed."""
        parameters = parameters_of(request, "tenant", "days")
        text = parameters.get("days") or _DAYS
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= _DAYS_MAX and len(text) < 4):
            problem = f"days = {printable(text)!r}: must be a number from 1 to {_DAYS_MAX}"
            raise Refused(400, "invalid_parameter", problem, "days")
        since = epoch_ms(self._clock.now() - timedelta(days=int(text))) // tables.HOUR_MS
        async with self._database.transaction() as tx:
            tenants, tenant = await chosen_tenant(tx, user, parameters)
            sources = await queries.rewards_by_source(tx, tenants[tenant], since) if tenant is not None else {}
        return self._templates.render(
            request,
            user,
            "rewards.html",
            sources={name: (source.outcomes, histogram(source.buckets)) for name, source in sources.items()},
            outcomes=OUTCOMES,
            tenants=list(tenants),
            tenant=tenant,
            days=int(text),
        )


def histogram(buckets: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return label and number of each tenth between the lowest and the highest one with rewards."""
    if not buckets:
        return []
    return [(_label(bucket), buckets.get(bucket, 0)) for bucket in range(min(buckets), max(buckets) + 1)]


def _label(bucket: int) -> str:
    if bucket >= 10:
        return "1.0 and above"
    return "below -1.0" if bucket < -10 else f"{bucket / 10:.1f} to {(bucket + 1) / 10:.1f}"
