"""Fits reward models anew as thumbs come: beside the stream, on a thread, for one tenant after the other.

Two replicas may fit at the same time. Equal thumbs give an equal model, and the later one that was written stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.isolation import is_fatal
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_schemas import Event
from headrace_scorer import metrics
from headrace_scorer.learned import store
from headrace_scorer.learned.models import FittedModel
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.learned.store import Lesson

log = get_logger(__name__)


async def run(learned: LearnedSource, processor: Processor) -> None:
    """Until cancelled."""
    while True:
        await processor.clock.sleep(learned.settings.refit_s)
        try:
            await refit(learned, processor)
        except Unavailable as error:
            log.warning("refit_postponed", error=str(error))


async def refit(learned: LearnedSource, processor: Processor) -> None:
    """Fit what has enough new thumbs. Runs that were scored before are scored again where a model has changed."""
    settings = learned.settings
    async with processor.database.transaction() as tx:
        tenants = await store.due(tx, learned.name, settings.refit_share)
    for tenant in tenants:
        try:
            async with processor.database.transaction() as tx:
                lesson = await store.lesson(tx, tenant, learned.name, settings.thumbs_max, settings.others_max)
            made = await asyncio.to_thread(_fit, learned, lesson)
            await _keep(learned, processor, lesson, made)
        except Exception as error:  # the model of before goes on, and the next tenant is fitted
            if is_fatal(error):
                raise
            log.exception("refit_failed", source=learned.name, tenant=tenant)
            metrics.REFITS.labels(learned.name, "failed").inc()
            async with processor.database.transaction() as tx:
                await store.wait_for_thumbs(tx, tenant, learned.name)


def _fit(learned: LearnedSource, lesson: Lesson) -> FittedModel:
    return learned.model.fit(lesson.runs(), lesson.others(), learned.settings.demands)


async def _keep(learned: LearnedSource, processor: Processor, lesson: Lesson, made: FittedModel) -> None:
    async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        if await store.keep_model(tx, now, learned.name, lesson, made.model_id, made.to_json()):
            await store.mark_for_rescoring(tx, lesson.tenant, learned.settings.rescored_max)
        return []

    await processor.step(step)
    facts = made.facts()
    metrics.REFITS.labels(learned.name, "silent" if facts.get("silent") else "speaks").inc()
    told = {name: facts.get(name) for name in ("thumbs", "raters", "silent", "auroc")}  # no name of a person
    log.info("reward_model_fitted", source=learned.name, tenant=lesson.tenant, model_id=made.model_id, **told)
