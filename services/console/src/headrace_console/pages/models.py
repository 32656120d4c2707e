"""Pages of models and of single versions, with the forms that promote or withdraw a version."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import RedirectResponse, Response

from headrace_console import learning
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_console.sources.registry import VERSIONS_MAX
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
    "score": "mean score of the audit tasks",
    "score_standard_error": "standard error of the score",
    "replicas": "replicas that loaded the version",
    "max_abs_delta": "largest difference of a log probability from the trainer's",
    "parent_max_abs_delta": "the same difference with the weights of the parent",
}
"""Descriptions of the statistics in decisions and measurements."""
_REFUSALS = frozenset({"rejected", "skipped", "rolled_back", "withdrawn"})
_UNPROMOTABLE = ("promoted", "canary", "withdrawn")


async def models(visit: Visit) -> Response:
    """List the models."""
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
        refused=[version for version in versions if _REFUSALS & {event.decision for event in version.decisions}],
        described=learning.describe_learning(state.id, state.champion, versions),
        versions_max=VERSIONS_MAX,
    )


async def version(visit: Visit) -> Response:
    """Show the page of a version: its state, and the statistics of each decision about it."""
    visit.parameters()
    version = await find_version(visit)
    model = await visit.parts.registry.model(version.model)
    return visit.render(
        "version.html",
        version=version,
        model=model,
        sentence=describe_decision(version),
        number_names=NUMBER_NAMES,
        can_promote=visit.user.has_role("operator") and version.state not in _UNPROMOTABLE and not version.retired,
        can_withdraw=visit.user.has_role("operator") and version.state != "withdrawn" and version.id != model.champion,
    )


async def promote(visit: Visit) -> Response:
    """Make a version the next candidate. It still passes the gate."""
    version = await find_version(visit)
    body = AuditedPromoteRequest(version=version.id, reason=await visit.reason())
    await visit.parts.registry.change(f"/v1/models/{version.model}/promote", body, visit.user)
    return RedirectResponse(visit.request.url.path.removesuffix("/promote"), 303)


async def withdraw(visit: Visit) -> Response:
    """Withdraw a version, so that it gets no more calls."""
    version = await find_version(visit)
    body = WithdrawRequest(version=version.id, reason=await visit.reason())
    await visit.parts.registry.change(f"/v1/models/{version.model}/withdraw", body, visit.user)
    return RedirectResponse(visit.request.url.path.removesuffix("/withdraw"), 303)


async def find_version(visit: Visit) -> VersionState:
    """Return the version that the path names. Raises `NotFound` as `match_version`."""
    return match_version(visit, await visit.parts.registry.versions(visit.path("model")))


def match_version(visit: Visit, versions: Iterable[VersionState]) -> VersionState:
    """Return the version that the path names, perhaps by the beginning of its digest.

    Raises:
        NotFound: no version matches, or several do.
    """
    prefix = f"{visit.path('model')}@{visit.path('digest')}"
    matches = [version for version in versions if version.id.startswith(prefix)]
    if len(matches) != 1:
        raise NotFound
    return matches[0]


def describe_decision(version: VersionState) -> str:
    """Return a sentence about the last decision that changed the state of a version."""
    words = {
        "promoted": "took over",
        "rejected": "was refused",
        "skipped": "was skipped",
        "rolled_back": "was taken back",
        "withdrawn": "was withdrawn",
    }
    decisions = [event for event in version.decisions if event.decision in words]
    if not decisions:
        return f"{version.id} is {version.state.replace('_', ' ')}; nothing was decided about it yet."
    event = decisions[-1]
    verb = words[event.decision]
    if event.rollout is not None and event.rollout.kind in ("begin", "advance", "hold"):
        verb = {"begin": "began a rollout", "advance": "got a larger share", "hold": "was held"}[event.rollout.kind]
    author = f" by {event.who}" if event.who else ""
    against = f", compared with {event.previous}" if event.previous else ""
    numbers = f" {numbers}" if (numbers := learning.describe_numbers(event)) else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"{version.id} {verb}{author}{against}{numbers}{reason}"


PAGES = (
    Page("/models", models),
    Page("/models/{model}", model),
    Page("/models/{model}/{digest}", version),
    Page("/models/{model}/{digest}/promote", promote, role="operator", method="POST"),
    Page("/models/{model}/{digest}/withdraw", withdraw, role="operator", method="POST"),
)
