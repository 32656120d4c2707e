"""Page with the rewards of each source by outcome, and the sources that agree least."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import get_args

from starlette.responses import Response

from headrace_console.agreement import COMMON_MIN, COMPARED_MAX, PairAgreement, least_agreeing_pairs
from headrace_console.pages.page import InvalidParameter, Page, Visit
from headrace_console.pages.review_queues import coefficient_text
from headrace_console.pages.sessions import chosen_tenant
from headrace_console.read_model import tables
from headrace_console.read_model.reward_queries import (
    EDITED_MAX,
    SESSIONS_MAX,
    Scores,
    SourceRewards,
    common_scores,
    edited_sessions,
    rewards_by_source,
)
from headrace_runtime.clock import epoch_ms
from headrace_schemas.events.feedback import Outcome

OUTCOMES = get_args(Outcome)
_FAILURES = ("failed", "parse_error", "timed_out")
_DAYS_MAX = 400
_DAYS = "7"
_PAIRS_SHOWN = 6
_SEED = 0


async def rewards(visit: Visit) -> Response:
    """Show the outcomes of each source in the last days, and the distribution of its values."""
    parameters = visit.parameters("tenant", "days")
    text = parameters.get("days") or _DAYS
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= _DAYS_MAX and len(text) < 4):
        raise InvalidParameter("days", text, f"must be a number from 1 to {_DAYS_MAX}")
    since_ms = epoch_ms(visit.parts.clock.now() - timedelta(days=int(text)))
    sources: Mapping[str, SourceRewards] = {}
    scores: Scores = {}
    edited = 0
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, parameters)
        if tenant is not None:
            sources = await rewards_by_source(tx, tenants[tenant], since_ms // tables.HOUR_MS)
            scores = await common_scores(tx, tenants[tenant], since_ms)
            edited = await edited_sessions(tx, tenants[tenant], since_ms)
    async with visit.parts.computation:
        disagreements = await asyncio.to_thread(_disagreements, scores, visit.parts.rules.rewards.weight)
    return visit.render(
        "rewards.html",
        sources={name: (source, histogram(source.buckets)) for name, source in sources.items()},
        disagreements=disagreements,
        kappa=coefficient_text(disagreements[0][1].kappa) if disagreements else "",
        edited=edited,
        edited_max=EDITED_MAX,
        common_min=COMMON_MIN,
        compared_max=COMPARED_MAX,
        sessions_max=SESSIONS_MAX,
        outcomes=OUTCOMES,
        columns=("source", "#weight", "#mean", *(f"#{outcome.replace('_', ' ')}" for outcome in OUTCOMES)),
        weights={name: visit.parts.rules.rewards.weight(name) for name in sources},
        failing=[name for name, source in sources.items() if any(source.outcomes.get(kind) for kind in _FAILURES)],
        tenants=list(tenants),
        tenant=tenant,
        days=int(text),
    )


def _disagreements(scores: Scores, weight: Callable[[str], float]) -> list[tuple[str, PairAgreement]]:
    """Return the pairs of sources with the lowest kappas, the lowest first, each with its model.

    Sources without a `weight` are not compared, because their values are no part of the reward.
    """
    pairs = []
    for model, by_target in scores.items():
        compared = {name for name in {name for scored in by_target.values() for name in scored} if weight(name)}
        weighted = [
            {name: score for name, score in scored.items() if name in compared} for scored in by_target.values()
        ]
        pairs += [(model, pair) for pair in least_agreeing_pairs(weighted, _SEED)]
    return sorted(pairs, key=lambda item: item[1].kappa.value or 0.0)[:_PAIRS_SHOWN]


def histogram(buckets: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return the label and the number of rewards of each bucket that is not empty, in ascending order."""
    return [(_label(bucket), number) for bucket, number in sorted(buckets.items()) if number]


def _label(bucket: int) -> str:
    if bucket >= 10:
        return "1.0 and above"
    return "below -1.0" if bucket < -10 else f"{bucket / 10:.1f} to {(bucket + 1) / 10:.1f}"


PAGES = (Page("/rewards", rewards),)
