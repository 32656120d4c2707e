"""Pages of rollouts: the rule, the evidence so far, and the forms to promote, hold and roll back."""

from __future__ import annotations

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from headrace_console import charts
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_runtime import rollout_picture
from headrace_schemas.http.registry_api import RolloutChange, RolloutState

UNDER_WAY = ("shadow", "canary")
_ACTIONS = ("promote", "stop", "rollback")


async def rollouts(visit: Visit) -> Response:
    """List the newest rollouts of all models."""
    visit.parameters()
    return visit.render("rollouts.html", rollouts=await visit.parts.registry.rollouts())


async def rollout(visit: Visit) -> Response:
    """Show a rollout with the chart of one metric, which the query parameter `metric` names."""
    metric = visit.parameters("metric").get("metric")
    rollout = await visit.parts.registry.rollout(visit.path("rollout"))
    if metric is not None and metric not in rollout.higher_is_better:
        raise NotFound
    chosen = metric or rollout_picture.metric_of(rollout)
    return visit.render(
        "rollout.html",
        rollout=rollout,
        metric=chosen,
        rows=[(*row, describe_evidence(rollout, row[0])) for row in rollout_picture.intervals(rollout)],
        chart=draw(rollout, chosen),
        points=rollout_picture.points(rollout, chosen)[-50:],
        is_under_way=rollout.phase in UNDER_WAY,
        can_change=visit.user.has_role("operator") and rollout.phase in UNDER_WAY,
        sentence=describe_rollout(rollout),
    )


async def change(visit: Visit) -> Response:
    """Promote, hold or roll back a rollout, as the last segment of the path demands."""
    action = visit.path("action")
    if action not in _ACTIONS:
        raise NotFound
    rollout = await visit.parts.registry.rollout(visit.path("rollout"))
    body = RolloutChange(reason=await visit.reason())
    await visit.parts.registry.change(f"/v1/rollouts/{rollout.id}/{action}", body, visit.user)
    return RedirectResponse(f"/rollouts/{rollout.id}", 303)


def describe_evidence(rollout: RolloutState, metric: str) -> str:
    """Return in words what the confidence sequence of a metric shows so far."""
    lower, upper = (rollout.statistics.get(f"{metric}.{end}") for end in ("lower", "upper"))
    if lower is None or upper is None:
        return "not measured yet"
    higher = rollout.higher_is_better.get(metric, True)
    if (lower if higher else -upper) > 0:
        return "shown to be better"
    margin = rollout.margins.get(metric)
    if margin is None:
        return "shown to be worse" if (upper if higher else -lower) < 0 else "not decided"
    worst, best = (lower, upper) if higher else (-upper, -lower)
    if best < -margin:
        return "shown to be worse than its margin"
    return "shown to keep its margin" if worst > -margin else "not decided"


def draw(rollout: RolloutState, metric: str) -> Markup:
    """Return the chart of a metric's confidence sequence, with its margin."""
    marks = [
        charts.Mark(units, value, lower, upper, f"{units:g} units: {value:+.3f} [{lower:+.3f}, {upper:+.3f}]")
        for units, value, lower, upper in rollout_picture.points(rollout, metric)
    ]
    lines = [charts.Line(0.0, "no difference")]
    if (margin := rollout_picture.margin(rollout, metric)) is not None:
        lines.append(charts.Line(margin, "margin"))
    title = f"{metric}: candidate minus champion, with its confidence sequence"
    return charts.interval_chart(title, marks, lines, below=f"units of {rollout.version}")


def describe_rollout(rollout: RolloutState) -> str:
    """Return the state of a rollout as a sentence."""
    if rollout.phase == "shadow":
        prompts = rollout.statistics.get("shadow_units", 0)
        return f"{rollout.version} answers prompts of users in the shadow: {prompts:g} of {rollout.shadow_units}."
    if rollout.phase == "canary":
        evidence = "The evidence suffices for a promotion." if rollout.good_enough else "The evidence does not suffice."
        return f"{rollout.version} has {rollout.share} of the traffic. {evidence} {rollout.reason}"
    words = {
        "champion": "took over",
        "succeeded": "succeeded",
        "hold": "is held and serves no calls",
        "rolled_back": "was rolled back",
    }
    return f"{rollout.version} {words[rollout.phase]}: {rollout.reason}"


PAGES = (
    Page("/rollouts", rollouts),
    Page("/rollouts/{rollout}", rollout),
    Page("/rollouts/{rollout}/{action}", change, role="operator", method="POST"),
)
