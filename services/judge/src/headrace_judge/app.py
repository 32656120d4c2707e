"""Composition root of the judge: rubrics, prompts and endpoint in the shared stream service, and the check of
settings.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Sequence
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge import tables
from headrace_judge.call_budget import CallBudget, TenantCircuitBreakers
from headrace_judge.endpoint import Endpoint
from headrace_judge.metrics import BUDGET_LEFT, OUTCOMES
from headrace_judge.model_judge import ModelJudge
from headrace_judge.pairwise import PairwiseComparisons
from headrace_judge.rubric import load_all
from headrace_judge.run_transcript import Prompts
from headrace_judge.settings import EndpointSettings, JudgeSettings
from headrace_judge.tables import DEADLINE_JOB, STREAM, VERDICT_JOB
from headrace_judge.worker import BACKOFF_S, JudgeWorker, TrajectoryHandler, drop
from headrace_runtime.errors import SettingError
from headrace_runtime.http.web import Sources
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.isolation import each
from headrace_runtime.stream import stream_service
from headrace_runtime.stream.jobs import Job, Jobs
from headrace_runtime.stream.processor import Processor, ProcessorLimits, Unfinished
from headrace_runtime.stream.stream_service import StreamService, Timer
from headrace_schemas import Event, Reward

_CACHE_DAYS = 30.0
"""Days for which verdicts are cached."""

_DEADLINES_S = 1.0
_DEADLINES_AT_ONCE_MAX = 50
_UPKEEP_S = 10.0


async def run(common: Common, settings: JudgeSettings) -> None:
    """Run the judge until cancelled.

    Raises:
        SettingError: a setting is invalid. Some settings are checked only by the first call to the endpoint.
    """
    try:
        await stream_service.run(service(settings, common), common, settings)
    except BaseExceptionGroup as group:
        error = _setting_error(group)
        if error is not None:
            raise error from None
        raise


def service(settings: JudgeSettings, common: Common | None = None) -> StreamService:
    """Build the judge as a stream service that is not yet connected to bus and database.

    Raises `SettingError` for an invalid setting.
    """
    rubrics = load_all(settings.rubrics)
    prompts = Prompts(settings.templates_dir)
    for rubric in rubrics.values():
        prompts.check(rubric)
    judged_by = {name: prompts.judged_by(settings.endpoint.model, rubric) for name, rubric in rubrics.items()}
    key = api_key(settings.endpoint)
    jobs = Jobs(STREAM)
    pairwise = PairwiseComparisons(jobs, settings.pairs)
    budget = CallBudget(settings.budget)
    sources = Sources()
    sources.expect(rubric.source for rubric in rubrics.values())

    async def work(processor: Processor) -> None:
        endpoint = Endpoint(settings.endpoint, key)
        breakers = TenantCircuitBreakers(processor.clock, BACKOFF_S)
        model_judge = ModelJudge(settings, prompts, budget, processor, endpoint, breakers)
        try:
            await JudgeWorker(
                settings, rubrics, judged_by, jobs, pairwise, processor, model_judge, breakers, sources
            ).run()
        finally:
            await endpoint.close()

    def workers(processor: Processor) -> Sequence[Awaitable[None]]:
        return (work(processor),)

    async def deadlines(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        leased = await jobs.lease(tx, DEADLINE_JOB, now, timedelta(seconds=settings.lease_s), _DEADLINES_AT_ONCE_MAX)

        async def end_wait(job: Job) -> Sequence[Reward]:
            rewards = await pairwise.handle_deadline(tx, now, job, judged_by)
            for reward in rewards:
                OUTCOMES.labels(reward.source, reward.outcome).inc()
            return rewards

        rewards = await each(tx, "judge.deadlines", leased, end_wait, lambda job, reason: drop(tx, jobs, job, reason))
        return Unfinished(rewards) if len(leased) == _DEADLINES_AT_ONCE_MAX else rewards

    async def upkeep(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        more = await tables.delete_old_verdicts(tx, now, timedelta(days=_CACHE_DAYS))
        await budget.prune(tx, now)
        await jobs.count(tx, VERDICT_JOB)
        for setting, left in (await budget.remaining(tx, now)).items():
            BUDGET_LEFT.labels(setting).set(left)
        return Unfinished() if more else []

    return StreamService(
        name="judge",
        package="headrace_judge",
        tables=STREAM,
        handlers={"trajectories": TrajectoryHandler(settings, rubrics, judged_by, jobs, pairwise)},
        timers=(Timer(_DEADLINES_S, deadlines), Timer(_UPKEEP_S, upkeep)),
        workers=workers,
        routes=lambda _processor: [sources.route(common or Common())],
        limits=ProcessorLimits(retry_s=settings.retry_s),
    )


def _setting_error(group: BaseExceptionGroup) -> SettingError | None:
    """Return the first `SettingError` in the group or in its subgroups."""
    for error in group.exceptions:
        candidate = _setting_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(candidate, SettingError):
            return candidate
    return None


def api_key(settings: EndpointSettings) -> str:
    """Return the bearer token for the endpoint.

    Raises `SettingError` if the environment variable with it is not set.
    """
    if not settings.api_key_env:
        return settings.api_key.get_secret_value()
    key = os.environ.get(settings.api_key_env, "")
    if not key:
        raise SettingError("judge.endpoint.api_key_env", settings.api_key_env, "this environment variable is not set")
    return key


async def check(common: Common, settings: JudgeSettings) -> list[str]:
    """Check the settings before a start. The endpoint is not called, because a call may be billed.

    Raises:
        SettingError: a setting is invalid.
    """
    service(settings, common)
    return []
