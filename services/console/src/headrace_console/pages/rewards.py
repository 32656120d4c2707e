"""Rewards by source and outcome."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import get_args

from starlette.responses import Response

from headrace_console.pages.page import Page, Visit
from headrace_console.pages.sessions import chosen_tenant
from headrace_console.read_model import queries, tables
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.events.reward import Outcome
from headrace_schemas.values.text import printable

OUTCOMES = get_args(Outcome)
_FAILURES = ("failed", "parse_error", "timed_out")
_DAYS_MAX = 400
_DAYS = "7"


async def rewards(visit: Visit) -> Response:
    """Show the outcomes of each source in the last days, and how its values are distributed."""
    parameters = visit.parameters("tenant", "days")
    text = parameters.get("days") or _DAYS
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= _DAYS_MAX and len(text) < 4):
        problem = f"days = {printable(text)!r}: must be a number from 1 to {_DAYS_MAX}"
        raise Refused(400, "invalid_parameter", problem, "days")
    since = epoch_ms(visit.parts.clock.now() - timedelta(days=int(text))) // tables.HOUR_MS
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, parameters)
        sources = await queries.rewards_by_source(tx, tenants[tenant], since) if tenant is not None else {}
    return visit.render(
        "rewards.html",
        sources={name: (source.outcomes, histogram(source.buckets)) for name, source in sources.items()},
        outcomes=OUTCOMES,
        weights={name: visit.parts.rules.rewards.weight(name) for name in sources},
        failing=[name for name, source in sources.items() if any(source.outcomes.get(kind) for kind in _FAILURES)],
        tenants=list(tenants),
        tenant=tenant,
        days=int(text),
    )


def histogram(buckets: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return label and number of each tenth with rewards, the lowest first."""
    return [(_label(bucket), number) for bucket, number in sorted(buckets.items()) if number]


def _label(bucket: int) -> str:
    if bucket >= 10:
        return "1.0 and above"
    return "below -1.0" if bucket < -10 else f"{bucket / 10:.1f} to {(bucket + 1) / 10:.1f}"


PAGES = (Page("/rewards", rewards),)
