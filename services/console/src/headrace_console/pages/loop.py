"""The Loop page, whether the stack learns, and the Why page, why nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from headrace_console import charts, learning
from headrace_console.flow import BatchRules, Facts, RewardRules, find_cause
from headrace_console.learning import GateRule, Learning, ScoredVersion
from headrace_console.pages.frame import Templates
from headrace_console.pages.page import Page
from headrace_console.read_model import queries
from headrace_console.read_model.queries import Counts
from headrace_console.sources.registry import RegistryReader
from headrace_console.sources.services import StackReader
from headrace_console.users import User
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.http.web import parameters_of
from headrace_runtime.settings.sections import Common, Section
from headrace_runtime.storage.database import Database
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelState

_DECISIONS_SHOWN = 8
_MODELS_SHOWN = 8
_CONSEQUENCES = frozenset({"promoted", "rejected", "skipped", "rolled_back", "withdrawn"})


class _CollectorSection(Section):
    idle_s: float = 300.0


class _ScorerSection(Section):
    required: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reward_wait_s: float = 600.0


class _TrainerSection(Section):
    batch_experiences: int = 64
    batch_experiences_min: int = 8
    batch_wait_s: float = 30.0


class _RegistrySection(Section):
    gate: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What the Loop shows of a model."""

    state: ModelState
    learning: Learning
    scores: tuple[ScoredVersion, ...]
    chart: Markup
    trial: str
    """Numbers of the gate's last decision, or an empty text."""
    steps: tuple[queries.Row, ...]
    """The last training steps with a mean reward, the oldest first."""
    reward_chart: Markup
    decisions: tuple[ModelEvent, ...]


class LoopPages:
    """The first pages: Loop and Why."""

    def __init__(
        self,
        templates: Templates,
        database: Database,
        stack: StackReader,
        registry: RegistryReader,
        common: Common,
        clock: Clock,
    ) -> None:
        self._templates = templates
        self._database = database
        self._stack = stack
        self._registry = registry
        self._clock = clock
        self._idle_s = common.section_of("collector", _CollectorSection).idle_s
        scorer = common.section_of("scorer", _ScorerSection)
        self._rewards = RewardRules(scorer.required, scorer.expected, scorer.reward_wait_s)
        gate = common.section_of("registry", _RegistrySection).gate
        rule = {name: value for name, value in gate.items() if name in GateRule.model_fields}
        self._rule = learning.describe_rule(GateRule.model_validate(rule))
        trainer = common.section_of("trainer", _TrainerSection)
        self._batches = BatchRules(
            trainer.batch_experiences,
            min(trainer.batch_experiences_min, trainer.batch_experiences),
            trainer.batch_wait_s,
        )

    def pages(self) -> list[Page]:
        """Return the pages."""
        return [Page("/", self.loop), Page("/flow", self.flow)]

    async def loop(self, request: Request, user: User) -> Response:
        """Show whether the stack learns."""
        parameters_of(request)
        facts, problem = await self._facts()
        models = [await self._summary(state) for state in facts.models[:_MODELS_SHOWN]]
        return self._templates.render(
            request,
            user,
            "loop.html",
            stack=facts.stack,
            models=models,
            problem=problem,
            cause=find_cause(facts),
            rule=self._rule,
            facts=facts,
            counts=await self._counts(user),
            as_of=self._clock.now(),
        )

    async def _steps(self, model: str) -> tuple[queries.Row, ...]:
        """Return the last steps with a mean reward, or none if the database does not answer."""
        try:
            async with self._database.transaction() as tx:
                reports = await queries.steps(tx, model)
        except Unavailable:
            return ()
        return tuple(report for report in reports if report["reward"] is not None)

    async def _counts(self, user: User) -> Counts | None:
        """Return the counts of the captured turns that the user may see, or None if the database does not answer."""
        try:
            async with self._database.transaction() as tx:
                return await queries.counts(tx, user.scope)
        except Unavailable:
            return None

    async def flow(self, request: Request, user: User) -> Response:
        """Show why nothing is trained, and the numbers of each stage."""
        parameters_of(request)
        facts, problem = await self._facts()
        cause = find_cause(facts)
        return self._templates.render(
            request,
            user,
            "flow.html",
            cause=cause,
            facts=facts,
            problem=problem,
            stages=_stages(facts),
            as_of=self._clock.now(),
        )

    async def _facts(self) -> tuple[Facts, str]:
        """Return the facts, and the problem of the registry if it does not answer."""
        stack = await self._stack.report()
        models: tuple[ModelState, ...] = ()
        problem = ""
        try:
            models = await self._registry.models()
        except Refused as error:
            problem = str(error)
        facts = Facts(
            stack=stack,
            models=models,
            base_url=f"{self._stack.url('gateway')}/v1",
            untrained_s=self._stack.progress.untrained_s(self._clock.monotonic_s()),
            before=self._stack.progress.before,
            preceding=self._stack.progress.preceding,
            idle_s=self._idle_s,
            rewards=self._rewards,
            batches=self._batches,
        )
        return facts, problem

    async def _summary(self, state: ModelState) -> ModelSummary:
        versions = await self._registry.versions(state.id)
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
        steps = await self._steps(state.id)
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
    """Return the chart of the mean reward of the experiences that each step trained."""
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


def _stages(facts: Facts) -> list[tuple[str, str, float]]:
    """Return service, meaning and value of the numbers that the causes are derived from."""
    numbers = [
        ("gateway", "calls captured", "headrace_gateway_turns_total"),
        ("collector", "sessions open", "headrace_collector_open_sessions"),
        ("collector", "runs closed", "headrace_collector_trajectories_total"),
        ("collector", "turns left out", "headrace_collector_left_out_total"),
        ("scorer", "runs that wait for rewards", "headrace_scorer_waiting_trajectories"),
        ("scorer", "experiences sent", "headrace_scorer_experiences_total"),
        ("trainer", "experiences that wait for a batch", "headrace_trainer_waiting_experiences"),
        ("trainer", "experiences trained", "headrace_trainer_trained_total"),
        ("trainer", "experiences dropped", "headrace_trainer_dropped_total"),
        ("registry", "versions that wait for the gate", "headrace_registry_waiting_versions"),
    ]
    return [(service, meaning, facts.value(service, metric)) for service, meaning, metric in numbers]
