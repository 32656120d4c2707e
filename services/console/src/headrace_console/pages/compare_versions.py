"""Two versions of a model side by side: audit scores, decisions, their sessions, and tasks that both have played."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.responses import Response

from headrace_console import learning
from headrace_console.learning import Z95, ScoredVersion
from headrace_console.pages.models import match_version
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_console.pages.sessions import chosen_tenant
from headrace_console.read_model.version_queries import (
    SESSIONS_MAX,
    VersionTraffic,
    shared_tasks,
    version_traffic,
)
from headrace_schemas.http.registry_api import VersionState

REWARDS_MIN = 30
"""Smallest number of rewards of each version for which their means are compared."""


async def compare(visit: Visit) -> Response:
    """Compare the version of the path with the version `with`, by default its parent or the champion."""
    parameters = visit.parameters("with", "tenant")
    versions = await visit.parts.registry.versions(visit.path("model"))
    first = match_version(visit, versions)
    second = await _other(visit, first, versions, parameters.get("with", ""))
    traffic, tasks = [VersionTraffic(), VersionTraffic()], []
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, parameters)
        if tenant is not None and second is not None:
            traffic = [await version_traffic(tx, tenants[tenant], version.id) for version in (first, second)]
            tasks = list(await shared_tasks(tx, tenants[tenant], first.id, second.id))
    pair = (first, second) if second is not None else (first,)
    names = {version.id for version in pair}
    scores = {score.version: score for score in learning.scored_versions(versions)}
    return visit.render(
        "compare_versions.html",
        first=first,
        second=second,
        versions=[version.id for version in versions if version.id != first.id],
        tenants=list(tenants),
        tenant=tenant,
        sessions_max=SESSIONS_MAX,
        rows=_rows(pair, [scores.get(version.id) for version in pair], traffic),
        sentences=_differences(pair, [scores.get(version.id) for version in pair], traffic),
        decisions=[
            event
            for version in pair
            for event in reversed(version.decisions)
            if {event.version, event.previous} == names
        ],
        tasks=tasks,
    )


async def _other(visit: Visit, first: VersionState, versions: Sequence[VersionState], name: str) -> VersionState | None:
    """Return the second version, or None if the model has no other. Raises `NotFound` for an unknown name."""
    by_id = {version.id: version for version in versions if version.id != first.id}
    if name:
        if name not in by_id:
            raise NotFound
        return by_id[name]
    champion = (await visit.parts.registry.model(first.model)).champion
    return next((by_id[default] for default in (first.parent, champion, *by_id) if default in by_id), None)


def _rows(
    pair: Sequence[VersionState], scores: Sequence[ScoredVersion | None], traffic: Sequence[VersionTraffic]
) -> list[tuple[str, list[str]]]:
    """Return the heading and the values of each row of the table."""
    return [
        ("state", [version.state.replace("_", " ") for version in pair]),
        ("lineage and step", [f"{version.lineage}, {version.step}" for version in pair]),
        ("audit score", [_interval(score.score, score.error) if score else "" for score in scores]),
        ("sessions", [f"{numbers.sessions:,}" for numbers in traffic]),
        ("sampled tokens per turn that it answered", [_ratio(numbers.tokens, numbers.turns) for numbers in traffic]),
        ("its turns trained, dropped", [f"{numbers.trained:,}, {numbers.dropped:,}" for numbers in traffic]),
        ("mean reward", [_interval(n.reward_mean, n.reward_error) if n.rewards else "" for n in traffic]),
        ("thumbs up, down", [f"{numbers.up:,}, {numbers.down:,}" for numbers in traffic]),
    ]


def _differences(
    pair: Sequence[VersionState], scores: Sequence[ScoredVersion | None], traffic: Sequence[VersionTraffic]
) -> list[str]:
    """Return sentences with the differences of the first version from the second one."""
    first, second = traffic
    names = [f"{version.id.partition('@')[2][:12]} (step {version.step})" for version in pair]
    sentences = []
    left, right = (*scores, None)[:2]
    if left is not None and right is not None:
        error = math.hypot(left.error, right.error)
        sentences.append(_difference("Audit score", names, left.score - right.score, error))
    if min(first.rewards, second.rewards) >= REWARDS_MIN:
        error = math.hypot(first.reward_error, second.reward_error)
        sentences.append(_difference("Mean reward", names, first.reward_mean - second.reward_mean, error))
    return sentences


def _difference(metric: str, names: Sequence[str], difference: float, error: float) -> str:
    lower, upper = difference - Z95 * error, difference + Z95 * error
    verdict = "higher than" if lower > 0 else "lower than" if upper < 0 else "not shown to differ from"
    numbers = f"{difference:+.3f} (95 %: {lower:+.3f} to {upper:+.3f})"
    return f"{metric} of {names[0]} is {verdict} {names[1]}: {numbers}."


def _interval(value: float, error: float) -> str:
    return f"{value:.3f} ± {Z95 * error:.3f}" if math.isfinite(error) else f"{value:.3f}"


def _ratio(total: int, number: int) -> str:
    return f"{total / number:.1f}" if number else ""


PAGES = (Page("/models/{model}/{digest}/compare", compare),)
