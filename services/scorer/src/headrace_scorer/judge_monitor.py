"""Monitor of the agreement between judges and people, with an alarm when a judge drifts.

A run counts once for each judge, when both have first scored it. An alarm changes no reward; an operator has to act.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Row, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import each
from headrace_runtime.storage.tables import upsert
from headrace_schemas import Event, Trajectory
from headrace_schemas.values.sources import fits_any
from headrace_scorer import metrics
from headrace_scorer.agreement_test import Agreement, alarm_at
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.schema import agreement, agreement_pairs
from headrace_scorer.settings import DriftSettings

log = get_logger(__name__)
_REFERENCE_RUNS = 200
"""Number of first runs, scored by both, that determine the usual disagreement."""
_FALSE_ALARM_RATE = 0.01
"""Largest probability that a judge which does not drift ever raises an alarm."""
_LISTED_MAX = 256
_WEEK_MS = 7 * 86_400_000


class _Pair(NamedTuple):
    """Difference between the value of a judge and the mean value of people for one run."""

    source: str
    judged_by: str
    disagreement: float


class JudgeMonitor:
    """Counts the disagreement of each judge with people, within the scorer's transactions."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings

    async def add_run(self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, entries: LedgerEntries) -> None:
        """Count the run for each judge that has scored it, if people have scored it, too."""
        for pair in self._pairs(entries):
            key = {"trajectory_id": trajectory.trajectory_id, "source": pair.source}
            if await upsert(tx, agreement_pairs, key, {}, update=False):
                await self._count(tx, now, trajectory.tenant, pair)

    def _pairs(self, entries: LedgerEntries) -> list[_Pair]:
        rows = [row for row in entries.rewards() if not row["turn_id"] and row["outcome"] == "scored"]
        rows = [row for row in rows if 0 <= row["value"] <= 1]
        values = [row["value"] for row in rows if fits_any(self._settings.people, row["source"])]
        if not values:
            return []
        mean = math.fsum(values) / len(values)
        return [
            _Pair(row["source"], row["judged_by"] or "", abs(row["value"] - mean))
            for row in rows
            if fits_any(self._settings.judges, row["source"]) and row["feedback_id"] is None
        ]

    async def _count(self, tx: AsyncConnection, now: datetime, tenant: str, pair: _Pair) -> None:
        reference, error = _REFERENCE_RUNS, _FALSE_ALARM_RATE
        key = {"tenant": tenant, "source": pair.source, "judged_by": pair.judged_by}
        where = [agreement.c[name] == value for name, value in key.items()]
        row = (await tx.execute(select(agreement).where(*where).with_for_update())).mappings().one_or_none()
        before = Agreement() if row is None else Agreement.model_validate_json(row["state"])
        after = before.with_pair(pair.disagreement, reference=reference, error=error)
        drifted_ms = None if row is None else row["drifted_ms"]
        if drifted_ms is None and after.has_drifted(reference=reference, error=error):
            drifted_ms = epoch_ms(now)
            log.error(
                "judge_drifts",
                source=pair.source,
                tenant=tenant,
                judged_by=pair.judged_by,
                disagreement=after.recent,
                usual_at_most=after.bound,
                pairs=after.pairs,
                remedy="look at runs that both scored; then POST /agreement/forget, or change the judge",
            )
        values = {"state": after.model_dump_json(), "drifted_ms": drifted_ms, "changed_ms": epoch_ms(now)}
        await upsert(tx, agreement, key, values)


async def measure(tx: AsyncConnection, now: datetime) -> None:
    """Set the gauges of each judge to the worst values among its tenants and versions.

    Versions that were compared with people on no run for a week do not count.
    """
    worst: dict[str, tuple[float, float]] = {}

    async def add(row: Row[tuple[object, ...]]) -> Sequence[Event]:
        state = Agreement.model_validate_json(row.state)
        disagreement, drifted = worst.get(row.source, (0.0, 0.0))
        alarm = float(row.drifted_ms is not None)
        worst[row.source] = max(disagreement, state.recent or 0.0), max(drifted, alarm)
        return ()

    async def discard(row: Row[tuple[object, ...]], _reason: str) -> Sequence[Event]:
        await forget(tx, row.tenant, row.source)
        return ()

    await each(tx, "scorer.measure", await _newest(tx, epoch_ms(now) - _WEEK_MS), add, discard)
    for source, (disagreement, drifted) in worst.items():
        metrics.JUDGE_DISAGREEMENT.labels(source).set(disagreement)
        metrics.JUDGE_DRIFTED.labels(source).set(drifted)


async def listed(tx: AsyncConnection, settings: DriftSettings) -> list[dict[str, object]]:
    """Return the state of each judge for the REST interface, the most recently compared one first."""
    judges: list[dict[str, object]] = []
    for row in await _newest(tx, 0):
        state = Agreement.model_validate_json(row.state)
        judges.append(
            {
                **{name: getattr(row, name) for name in ("tenant", "source", "judged_by")},
                "pairs": state.pairs,
                "disagreement": state.recent,
                "usual_at_most": state.bound,
                "evidence": state.evidence(_REFERENCE_RUNS),
                "alarm_at": alarm_at(_FALSE_ALARM_RATE),
                "drifted_at": None if row.drifted_ms is None else from_epoch_ms(row.drifted_ms).isoformat(),
            }
        )
    return judges


async def forget(tx: AsyncConnection, tenant: str, source: str) -> int:
    """Delete the state of a judge, so that its next runs are a new reference.

    Returns:
        Number of versions of the judge whose state was deleted.
    """
    of_judge = (agreement.c.tenant == tenant) & (agreement.c.source == source)
    return (await tx.execute(delete(agreement).where(of_judge))).rowcount


async def _newest(tx: AsyncConnection, since_ms: int) -> Sequence[Row[tuple[object, ...]]]:
    changed = agreement.c.changed_ms
    query = select(agreement).where(changed >= since_ms).order_by(changed.desc()).limit(_LISTED_MAX)
    return (await tx.execute(query)).all()
