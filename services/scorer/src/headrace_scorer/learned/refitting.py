"""Refitting of reward models as thumbs arrive: beside the stream, on a thread, for one tenant after the other.

Two replicas may fit at the same time. Equal thumbs give an equal model, and the last one that is stored counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import is_fatal
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event
from headrace_scorer import metrics
from headrace_scorer.learned import store
from headrace_scorer.learned.models import FittedModel
from headrace_scorer.learned.settings import THUMBS_MAX, UNRATED_RUNS_MAX
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.learned.store import TrainingData

REFIT_SHARE = 0.05
"""Share of thumbs that must be new or changed before the model is fitted again."""
_RESCORED_MAX = 20_000
"""Runs that are scored again after the model was fitted again. The newest count."""

log = get_logger(__name__)


async def run(learned: LearnedSource, processor: Processor) -> None:
    """Refit reward models periodically until cancelled."""
    while True:
        await processor.clock.sleep(learned.settings.refit_s)
        try:
            await refit(learned, processor)
        except Unavailable as error:
            log.warning("refit_postponed", error=str(error))


async def refit(learned: LearnedSource, processor: Processor) -> None:
    """Refit the reward models that have enough new thumbs. If a model has changed, mark its runs for rescoring."""
    async with processor.database.transaction() as tx:
        tenants = await store.tenants_to_refit(tx, learned.name, REFIT_SHARE)
    for tenant in tenants:
        try:
            async with processor.database.transaction() as tx:
                data = await store.training_data(tx, tenant, learned.name, THUMBS_MAX, UNRATED_RUNS_MAX)
            fitted = await asyncio.to_thread(_fit, learned, data)
            await _store_model(learned, processor, data, fitted)
        except Exception as error:  # the earlier model stays in use, and the next tenant is fitted
            if is_fatal(error):
                raise
            log.exception("refit_failed", source=learned.name, tenant=tenant)
            metrics.REFITS.labels(learned.name, "failed").inc()
            async with processor.database.transaction() as tx:
                await store.wait_for_thumbs(tx, tenant, learned.name)


def _fit(learned: LearnedSource, data: TrainingData) -> FittedModel:
    return learned.model.fit(data.rated_runs(), data.unrated_features(), learned.settings.requirements)


async def _store_model(learned: LearnedSource, processor: Processor, data: TrainingData, fitted: FittedModel) -> None:
    async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        if await store.store_model(tx, now, learned.name, data, fitted.model_id, fitted.to_json()):
            await store.mark_for_rescoring(tx, data.tenant, _RESCORED_MAX)
        return []

    await processor.step(step)
    facts = fitted.facts()
    metrics.REFITS.labels(learned.name, "silent" if facts.get("silent") else "speaks").inc()
    logged = {name: facts.get(name) for name in ("thumbs", "raters", "silent", "auroc")}  # names of people are left out
    log.info("reward_model_fitted", source=learned.name, tenant=data.tenant, model_id=fitted.model_id, **logged)
