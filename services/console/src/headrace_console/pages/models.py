"""Pages of models and versions: list, history, training and comparison, with the forms that promote or withdraw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from starlette.responses import RedirectResponse, Response

from headrace_console import learning
from headrace_console.advantages import direction, is_undone
from headrace_console.learning import Z95, ScoredVersion
from headrace_console.pages.page import NotFound, Page, Visit, choice_of
from headrace_console.pages.sessions import chosen_tenant
from headrace_console.read_model.packing import unpack_numbers
from headrace_console.read_model.queries import PAGE_ROWS, Row
from headrace_console.read_model.status import history_of
from headrace_console.read_model.version_queries import (
    SESSIONS_MAX,
    Runs,
    VersionTraffic,
    runs_of,
    shared_tasks,
    version_traffic,
    version_training,
)
from headrace_console.sources.clients import VERSIONS_MAX
from headrace_schemas.http.registry_api import AuditedPromoteRequest, VersionState, WithdrawRequest

NUMBER_NAMES = {
    "tasks": "tasks drawn",
    "plays": "plays of all compared versions together",
    "trial": "number of this trial among those against one anchor",
    "alpha": "probability of a wrong promotion that this trial may spend",
    "beta": "probability of a wrong refusal",
    "difference": "mean difference from the champion",
    "standard_error": "its standard error",
    "margin": "loss against the champion that must be ruled out",
    "anchor_difference": "mean difference from the anchor",
    "anchor_standard_error": "standard error of the difference from the anchor",
    "anchor_margin": "loss against the anchor that must be ruled out",
    "minimum_score": "score that the version must not fall behind",
    "minimum_difference": "mean difference from the minimum score",
    "minimum_standard_error": "standard error of the difference from the minimum score",
    "minimum_margin": "loss against the minimum score that must be ruled out",
    "score": "mean score of the audit tasks",
    "score_standard_error": "standard error of the score",
    "replicas": "replicas that loaded the version",
    "max_abs_delta": "largest difference of a log probability from the trainer's",
    "parent_max_abs_delta": "the same difference with the weights of the parent",
}
"""Descriptions of the statistics in decisions and measurements."""
_REFUSALS = frozenset({"rejected", "skipped", "rolled_back", "withdrawn"})
_ANNOUNCEMENTS = ("registered", "probed", "evaluated")
"""Events of a version that decide nothing."""
_UNPROMOTABLE = ("promoted", "canary", "withdrawn")


async def models(visit: Visit) -> Response:
    """List all models."""
    visit.parameters()
    return visit.render("models.html", models=await visit.parts.registry.models())


async def model(visit: Visit) -> Response:
    """Show a model with its newest versions."""
    visit.parameters()
    state = await visit.parts.registry.model(visit.path("model"))
    versions = await visit.parts.registry.versions(state.id)
    return visit.render(
        "model.html",
        model=state,
        versions=versions,
        scores={score.version: score for score in learning.scored_versions(versions)},
        refusals={
            version.id: refusal
            for version in versions
            if (refusal := learning.describe_refusal(learning.last_decision(version)))
        },
        refused=[version for version in versions if _REFUSALS & {event.decision for event in version.decisions}],
        described=learning.describe_learning(state.id, state.champion, versions),
        versions_max=VERSIONS_MAX,
    )


async def version(visit: Visit) -> Response:
    """Show a version: its state, and the statistics of each decision about it."""
    visit.parameters()
    version = await find_version(visit)
    model = await visit.parts.registry.model(version.model)
    return visit.render(
        "version.html",
        version=version,
        model=model,
        sentence=learning.describe_decision(version),
        refusal=learning.describe_refusal(learning.last_decision(version)),
        number_names=NUMBER_NAMES,
        can_promote=visit.user.has_role("operator") and version.state not in _UNPROMOTABLE and not version.retired,
        can_withdraw=visit.user.has_role("operator") and version.state != "withdrawn" and version.id != model.champion,
    )


async def promote(visit: Visit) -> Response:
    """Make a version the next candidate. It still passes the gate."""
    return await _change(visit, "promote", AuditedPromoteRequest)


async def withdraw(visit: Visit) -> Response:
    """Withdraw a version, so that it gets no more calls."""
    return await _change(visit, "withdraw", WithdrawRequest)


async def _change(visit: Visit, action: str, request: type[AuditedPromoteRequest | WithdrawRequest]) -> Response:
    version = await find_version(visit)
    body = request(version=version.id, reason=await visit.reason())
    await visit.parts.registry.change(f"/v1/models/{version.model}/{action}", body, visit.user)
    return RedirectResponse(visit.request.url.path.removesuffix(f"/{action}"), 303)


async def find_version(visit: Visit) -> VersionState:
    """Return the version that the URL path names. Raises `NotFound` as `match_version`."""
    return match_version(visit, await visit.parts.registry.versions(visit.path("model")))


def match_version(visit: Visit, versions: Iterable[VersionState]) -> VersionState:
    """Return the version that the URL path names by its digest or by the beginning of the digest.

    Raises:
        NotFound: no version matches, or several do.
    """
    prefix = f"{visit.path('model')}@{visit.path('digest')}"
    matches = [version for version in versions if version.id.startswith(prefix)]
    if len(matches) != 1:
        raise NotFound
    return matches[0]


ORDERS = ("up", "down")
"""Values of the parameter `first`: order by descending (`up`) or ascending (`down`) advantage."""


async def learned(visit: Visit) -> Response:
    """Show the sessions on which a version was trained and the version before it was not."""
    first = choice_of(visit.parameters("first"), "first", ORDERS)
    version = (await find_version(visit)).id
    async with visit.transaction() as tx:
        training = await version_training(tx, visit.user.scope, version, is_ascending=first == "down")
        runs = await runs_of(tx, {row["session"] for row in training.rows} if training is not None else ())
    return visit.render(
        "learned.html",
        version=version,
        training=training,
        rows=[_row(row, runs) for row in training.rows] if training is not None else [],
        first=first,
        rows_max=PAGE_ROWS,
    )


def _row(row: Row, runs: Runs) -> dict[str, object]:
    """Return the values of one row of the page: a revision of an experience that the version was trained on.

    Args:
        row: the stored experience and the advantage that it was trained with.
        runs: runs of the listed sessions, by which the row names its run.
    """
    history, turns = history_of(row["history"]), unpack_numbers(row["turns"])
    entry = next(
        (
            entry
            for entry in history
            if entry.kind == "trained"
            and (entry.lineage, entry.save, entry.revision) == (row["lineage"], row["save"], row["revision"])
        ),
        None,
    )
    return {
        **row,
        "title": row["title"] or row["session_id"] or row["session_key"],
        "first_turn": min(turns, default=0),
        "run": runs.of_turn.get(min(turns, default=0), ""),
        "turns": len(turns),
        "direction": direction(row["advantage"]),
        "is_undone": entry is not None and is_undone(entry, history),
    }


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
            tasks = await shared_tasks(tx, tenants[tenant], first.id, second.id)
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
            if {event.version, event.previous} == names and event.decision not in _ANNOUNCEMENTS
        ],
        tasks=tasks,
    )


async def _other(visit: Visit, first: VersionState, versions: Sequence[VersionState], name: str) -> VersionState | None:
    """Return the version that a page compares `first` with.

    It is the version `name`, or by default its parent, the champion, or any other version; None if there is no other.
    Raises `NotFound` for an unknown name.
    """
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
    """Return the rows of the table that compares two versions: the heading and the value of each version."""
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
    """Return sentences with the differences in score and reward between the first version and the second."""
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


PAGES = (
    Page("/models", models),
    Page("/models/{model}", model),
    Page("/models/{model}/{digest}", version),
    Page("/models/{model}/{digest}/promote", promote, role="operator", method="POST"),
    Page("/models/{model}/{digest}/withdraw", withdraw, role="operator", method="POST"),
    Page("/models/{model}/{digest}/learned", learned),
    Page("/models/{model}/{digest}/compare", compare),
)
