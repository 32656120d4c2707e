"""The page Loop, which shows whether the stack learns, and the page Why, which shows why nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup
from starlette.responses import Response

from headrace_console import charts, learning
from headrace_console.flow import Cause, Facts, find_cause
from headrace_console.flow_rules import describe_reason, sessions_query
from headrace_console.learning import Learning, ScoredVersion
from headrace_console.pages.page import Page, Visit
from headrace_console.read_model import queries
from headrace_console.read_model.queries import Counts
from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.errors import Refused, Unavailable
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelState

_DECISIONS_SHOWN = 8
_MODELS_SHOWN = 8
_CONSEQUENCES = frozenset({"promoted", "rejected", "skipped", "rolled_back", "withdrawn"})


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What the page Loop shows about one model: its state, scores, steps and decisions."""

    state: ModelState
    learning: Learning
    scores: tuple[ScoredVersion, ...]
    chart: Markup
    trial: str
    """Sentence with the numbers of the gate's last decision, or an empty text."""
    steps: tuple[queries.Row, ...]
    """The last training steps with a mean reward, the oldest first."""
    reward_chart: Markup
    decisions: tuple[ModelEvent, ...]


async def loop(visit: Visit) -> Response:
    """Show the page Loop: whether each model learns from its traffic."""
    visit.parameters()
    facts, problem = await _facts(visit)
    counts = await _counts(visit)
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
        last_call=None if counts is None else await _last_call(visit),
        searched_calls=queries.SEARCHED_CALLS_MAX,
        as_of=visit.parts.clock.now(),
    )


async def _steps(visit: Visit, model: str) -> tuple[queries.Row, ...]:
    """Return the last steps that report a mean reward, or no steps if the database does not answer."""
    try:
        async with visit.transaction() as tx:
            reports = await queries.steps(tx, model)
    except Unavailable:
        return ()
    return tuple(report for report in reports if report["reward"] is not None)


async def _counts(visit: Visit) -> Counts | None:
    """Return the counts of the captured turns that the user may see, or None if the database does not answer."""
    try:
        async with visit.transaction() as tx:
            return await queries.counts(tx, visit.user.scope)
    except Unavailable:
        return None


async def _last_call(visit: Visit) -> datetime | None:
    """Return the time of the last call that the user may see, or None if there is none or the database does not
    answer."""
    try:
        async with visit.transaction() as tx:
            last_ms = await queries.last_call(tx, visit.user.scope)
    except Unavailable:
        return None
    return None if last_ms is None else from_epoch_ms(last_ms)


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


async def _summary(visit: Visit, state: ModelState) -> ModelSummary:
    versions = await visit.parts.registry.versions(state.id)
    scores = tuple(learning.scored_versions(versions))
    chart = charts.interval_chart(
        f"Audit score of {state.id} by version, with 95 % intervals",
        [
            charts.Mark(
                number,
                score.score,
                score.lower,
                score.upper,
                f"{score.version}: {score.score:.3f}",
                score.is_refused,
            )
            for number, score in enumerate(scores)
        ],
        below="versions, the oldest first; hollow: refused",
    )
    events = (event for version in versions for event in version.decisions)
    decisions = sorted((event for event in events if event.decision in _CONSEQUENCES), key=_time, reverse=True)
    described = learning.describe_learning(state.id, state.champion, versions)
    steps = await _steps(visit, state.id)
    return ModelSummary(
        state,
        described,
        scores,
        chart,
        learning.describe_trial(versions),
        steps,
        reward_chart(state.id, steps),
        tuple(decisions[:_DECISIONS_SHOWN]),
    )


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
    return f"report {report['account']}, step {report['step']}: {report['reward']:.3f}{version}"


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
