"""Composition root of the scorer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import InvalidEvent, SettingError
from headrace_runtime.kafka.known_versions import KnownVersions
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.stream import stream_service
from headrace_runtime.stream.stream_service import StreamService, Timer
from headrace_schemas import Event
from headrace_scorer import api, schema, upkeep
from headrace_scorer.functions.process import FunctionPool, FunctionsRefused
from headrace_scorer.handlers import Scorer
from headrace_scorer.judge_monitor import JudgeMonitor
from headrace_scorer.learned import refitting
from headrace_scorer.learned.refitting import LearnedSource
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache

_END_WAITING_INTERVAL_S = 0.5
_REMATCH_INTERVAL_S = 0.5
_FORGET_INTERVAL_S = 1.0
_MEASURE_INTERVAL_S = 5.0


async def run(common: Common, settings: ScorerSettings) -> None:
    """Run the scorer until cancelled. Raises `SettingError` when a reward function cannot be loaded."""
    pool = FunctionPool(settings)
    try:
        await pool.reload()
    except FunctionsRefused as error:
        raise SettingError("scorer.functions", settings.functions, str(error)) from None
    try:
        await stream_service.run(service(common, settings, pool), common, settings)
    finally:
        await pool.close()


async def _ignore_invalid_record(_record: Record, _error: InvalidEvent) -> None:
    """Ignore a record about models that cannot be decoded. The gateway reads the same topics and dead-letters it."""


def _learned_source(settings: ScorerSettings, pool: FunctionPool) -> LearnedSource | None:
    """Return the reward model that `scorer.learned.model` names as a source of rewards, or None without that
    setting.
    """
    return LearnedSource(settings.learned, lambda: pool.functions) if settings.learned.model is not None else None


def service(common: Common, settings: ScorerSettings, pool: FunctionPool) -> StreamService:
    """Build the stream service of the scorer: its handlers, its periodic tasks and its routes."""
    cache = TrajectoryCache()
    learned = _learned_source(settings, pool)
    scores = ScoreStore(cache, learned, JudgeMonitor(settings.drift))
    scoring = Scoring(pool, settings, cache, scores)
    scoring.sources.expect(function.source for function in scoring.functions)
    versions = KnownVersions(common.bus, "headrace/scorer", BlobStore.open(common), _ignore_invalid_record)
    scorer = Scorer(settings, cache, scores, scoring, versions.models)

    async def emit_overdue(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        return await upkeep.emit_overdue(tx, now, scores, scoring.policy)

    return StreamService(
        name="scorer",
        package="headrace_scorer",
        tables=schema.stream,
        handlers={
            "trajectories": scorer.on_trajectory,
            "rewards": scorer.on_reward,
            "feedback": scorer.on_feedback,
        },
        timers=[
            Timer(_END_WAITING_INTERVAL_S, emit_overdue),
            Timer(_REMATCH_INTERVAL_S, scorer.rematch),
            *(
                Timer(_FORGET_INTERVAL_S, partial(forget, retention_s=settings.retention_s))
                for forget in upkeep.FORGETTING
            ),
            Timer(_MEASURE_INTERVAL_S, upkeep.measure),
        ],
        workers=lambda processor: [
            *scoring.tasks(processor),
            versions.run(),
            *([refitting.run(learned, processor)] if learned is not None else []),
        ],
        routes=lambda processor: [
            *api.routes(common, pool, processor.database),
            *api.learned_routes(common, settings.drift, processor),
            scoring.sources.route(common),
        ],
    )
