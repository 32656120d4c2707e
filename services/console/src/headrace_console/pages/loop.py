"""The page Loop, which shows whether the stack learns, and the page Why, which shows why nothing is trained."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TypeVar

from markupsafe import Markup
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from headrace_console import charts, learning
from headrace_console.flow import Cause, Facts, find_cause
from headrace_console.flow_rules import describe_reason, sessions_query
from headrace_console.pages.page import Page, Visit
from headrace_console.read_model import queries
from headrace_console.read_model.queries import Counts
from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.errors import Refused, Unavailable
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelState

T = TypeVar("T")
_DECISIONS_SHOWN = 8
_MODELS_SHOWN = 8
_CONSEQUENCES = frozenset({"promoted", "rejected", "skipped", "rolled_back", "withdrawn"})


async def loop(visit: Visit) -> Response:
    """Show the page Loop: whether each model learns from its traffic."""
    visit.parameters()
    facts, problem = await _facts(visit)
    counts = await _counts(visit)
    last_ms = None if counts is None else await _read(visit, lambda tx: queries.last_call(tx, visit.user.scope))
    models = [await _summary(visit, state) for state in facts.models[:_MODELS_SHOWN]]
    return visit.render(
        "loop.html",
        stack=facts.stack,
        models=models,
        problem=problem,
        cause=find_cause(facts),
        rule=visit.parts.rules.gate,
        facts=facts,
        counts=counts,
        last_call=None if last_ms is None else from_epoch_ms(last_ms),
        searched_calls=queries.SEARCHED_CALLS_MAX,
        as_of=visit.parts.clock.now(),
    )


async def _read(visit: Visit, query: Callable[[AsyncConnection], Awaitable[T]]) -> T | None:
    """Return the result of a query in a transaction of its own, or None if the database does not answer."""
    try:
        async with visit.transaction() as tx:
            return await query(tx)
    except Unavailable:
        return None


async def _counts(visit: Visit) -> Counts | None:
    """Return the counts of the captured turns that the user may see, or None if the database does not answer."""
    return await _read(visit, lambda tx: queries.counts(tx, visit.user.scope))


async def flow(visit: Visit) -> Response:
    """Show the page Why: the numbers of each stage of the loop, and the cause if nothing is trained."""
    visit.parameters()
    facts, problem = await _facts(visit)
    cause = find_cause(facts)
    counts = await _counts(visit)
    return visit.render(
        "flow.html",
        title=flow_title(facts, cause),
        counts=counts,
        describe_reason=describe_reason,
        sessions_query=sessions_query,
        cause=cause,
        facts=facts,
        problem=problem,
        stages=_stages(facts),
        as_of=visit.parts.clock.now(),
    )


def flow_title(facts: Facts, cause: Cause | None) -> str:
    """Return the heading of the console's page Why (`/flow`).

    Args:
        facts: state of the loop; the heading depends on whether a model was trained on an experience recently.
        cause: reason why nothing is trained, or None if there is none or it is not known.
    """
    if facts.trains:
        return "What is not trained, and why"
    return "Why nothing trains" if cause is not None else "Is anything trained?"


async def _facts(visit: Visit) -> tuple[Facts, str]:
    """Return the observed state of the loop, and an error message if the registry does not answer."""
    stack = await visit.parts.stack.report()
    models: tuple[ModelState, ...] = ()
    problem = ""
    try:
        models = await visit.parts.registry.models()
    except Refused as error:
        problem = str(error)
    facts = Facts(
        stack=stack,
        models=models,
        base_url=f"{visit.parts.stack.url('gateway')}/v1",
        untrained_s=visit.parts.stack.progress.untrained_s(visit.parts.clock.monotonic_s()),
        before=visit.parts.stack.progress.before,
        preceding=visit.parts.stack.progress.preceding,
        idle_s=visit.parts.rules.idle_s,
        rewards=visit.parts.rules.rewards,
        batches=visit.parts.rules.batches,
    )
    return facts, problem


async def _summary(visit: Visit, state: ModelState) -> dict[str, object]:
    """Return what the page Loop shows about one model: its scores, its decisions, and the last training steps with a
    mean reward, the oldest first.
    """
    versions = await visit.parts.registry.versions(state.id)
    scores = learning.scored_versions(versions)
    marks = [
        charts.Mark(
            number, score.score, score.lower, score.upper, f"{score.version}: {score.score:.3f}", score.is_refused
        )
        for number, score in enumerate(scores)
    ]
    events = (event for version in versions for event in version.decisions)
    decisions = sorted((event for event in events if event.decision in _CONSEQUENCES), key=_time, reverse=True)
    reports = await _read(visit, lambda tx: queries.steps(tx, state.id)) or ()
    steps = [report for report in reports if report["reward"] is not None]
    return {
        "state": state,
        "learning": learning.describe_learning(state.id, state.champion, versions),
        "scores": scores,
        "chart": charts.interval_chart(
            f"Audit score of {state.id} by version, with 95 % intervals",
            marks,
            below="versions, the oldest first; hollow: refused",
        ),
        "trial": learning.describe_trial(versions),
        "steps": steps,
        "reward_chart": reward_chart(state.id, steps),
        "decisions": decisions[:_DECISIONS_SHOWN],
    }


def reward_chart(model: str, steps: Sequence[queries.Row]) -> Markup:
    """Return a chart of the mean reward of the experiences that each training step used."""
    marks = [
        charts.Mark(report["account"], report["reward"], report["reward"], report["reward"], _step_label(report))
        for report in steps
    ]
    return charts.interval_chart(
        f"Mean reward of the trained experiences of {model} by report",
        marks,
        below="reports of the trainer, the oldest first",
    )


def _step_label(report: queries.Row) -> str:
    version = f", made {report['version']}" if report["version"] else ""
    trained = f"{report['reward']:.3f}, mean of {report['trained']} trained revisions"
    return f"report {report['account']}, step {report['step']}: {trained}{version}"


def _time(event: ModelEvent) -> datetime:
    return event.time


def _stages(facts: Facts) -> list[tuple[str, str, float | None]]:
    """Return the service, the label and the value of each number that the page Why lists.

    The value is None if the service does not answer.
    """
    numbers = [
        ("gateway", "calls captured", "headrace_gateway_turns_total"),
        ("collector", "sessions open", "headrace_collector_open_sessions"),
        ("collector", "runs closed", "headrace_collector_trajectories_total"),
        ("collector", "turns left out, without evaluations", "headrace_collector_left_out_total"),
        ("scorer", "runs that wait for rewards", "headrace_scorer_waiting_trajectories"),
        ("scorer", "experiences sent", "headrace_scorer_experiences_total"),
        ("trainer", "experiences that wait for a batch", "headrace_trainer_waiting_experiences"),
        ("trainer", "revisions of experiences trained", "headrace_trainer_trained_total"),
        ("trainer", "revisions of experiences dropped", "headrace_trainer_dropped_total"),
        ("registry", "versions that wait for the gate", "headrace_registry_waiting_versions"),
    ]
    away = {name for name, service in facts.stack.services.items() if service.status == "away"}
    return [
        (service, meaning, None if service in away else facts.value(service, metric))
        for service, meaning, metric in numbers
    ]


PAGES = (
    Page("/", loop),
    Page("/flow", flow),
)
