"""Monitor of the agreement between judges and people: a sequential test with a bounded false alarm rate, and an alarm
when a judge drifts.

A run counts once for each judge, when both have first scored it. An alarm changes no reward; an operator has to act.

Each run that both have scored gives a disagreement from 0 to 1. The first runs are the reference. They give an upper
confidence bound of the mean disagreement, at half of the allowed error (W. Hoeffding, JASA 58 (1963) 13, theorem 1, in
the form of a relative entropy). Every later run is a bet against the hypothesis that the mean is at most that bound
(I. Waudby-Smith and A. Ramdas, JRSS B 86 (2024) 1). A bet may begin at any run: the starts are mixed with the weights
1/(n(n+1)), so that a long time without drift does not delay the alarm. The total capital of the bets is an e-process.
By Ville's inequality it reaches 1/error with a probability of at most that error, however long the test runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Row, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import each
from headrace_runtime.storage.tables import upsert
from headrace_schemas import Event, Trajectory
from headrace_schemas.values.ids import matches_any
from headrace_scorer import metrics
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.schema import agreement, agreement_pairs
from headrace_scorer.settings import DriftSettings

_STAKES = (0.1, 0.3, 0.6, 0.9)
"""Stakes as shares of the largest possible stake. The test uses the mean capital of these strategies."""
_BOUND_MAX = 0.95
_RECENT = 0.05
_HALVINGS = 60
log = get_logger(__name__)
_REFERENCE_RUNS = 200
"""Number of first runs, scored by both, that determine the usual disagreement."""
_FALSE_ALARM_RATE = 0.01
"""Largest probability that a judge which does not drift ever raises an alarm."""
_LISTED_MAX = 256
_WEEK_MS = 7 * 86_400_000


class Agreement(BaseModel):
    """State of the sequential test whether a judge disagrees with people more than on its first runs.

    Immutable: `with_pair` returns the next state.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int = 0
    total: float = 0.0
    """Sum of the disagreements of the reference."""
    recent: float | None = None
    """Exponential moving average of the disagreements; the newest has a weight of 1/20."""
    bound: float | None = None
    """Upper bound of the mean disagreement without drift. None until the reference is complete."""
    won: tuple[float, ...] = (0.0,) * len(_STAKES)
    """Capital of the bets that have begun, for each of `_STAKES`."""

    def with_pair(self, disagreement: float, *, reference: int, error: float) -> Agreement:
        """Return the state after one more run that judge and people have scored.

        Args:
            disagreement: difference of their scores, from 0 to 1.
            reference: number of first runs that determine the bound.
            error: allowed probability of a false alarm.
        """
        recent = disagreement if self.recent is None else self.recent + _RECENT * (disagreement - self.recent)
        pairs = self.pairs + 1
        if self.bound is not None:
            won = _after(self.won, pairs - reference, disagreement, self.bound)
            return self.model_copy(update={"pairs": pairs, "recent": recent, "won": won})
        total = self.total + disagreement
        bound = upper_bound(total / pairs, pairs, error / 2) if pairs >= reference else None
        return Agreement(pairs=pairs, total=total, recent=recent, bound=bound)

    def evidence(self, reference: int) -> float:
        """Return the evidence that the judge has drifted: the capital of all bets, including those that begin later.

        It is 1 at the start.

        Args:
            reference: number of first runs that determine the usual disagreement.
        """
        tested = max(0, self.pairs - reference)
        return math.fsum(self.won) / len(self.won) + 1 / (tested + 1)

    def has_drifted(self, *, reference: int, error: float) -> bool:
        """Return whether the judge disagrees with people significantly more than it did at first.

        Args:
            reference: number of first runs that determined the usual disagreement.
            error: allowed probability of a false alarm.
        """
        return self.bound is not None and self.evidence(reference) >= alarm_at(error)


def alarm_at(error: float) -> float:
    """Return the evidence from which a judge counts as drifted: 2 / `error`.

    Args:
        error: allowed probability of a false alarm. Half of it is spent here, the other half on the bound of the usual
            disagreement.
    """
    return 2 / error


def _after(won: Sequence[float], number: int, disagreement: float, bound: float) -> tuple[float, ...]:
    """Return the capital of each strategy after one more bet that a judge disagrees with people more than `bound`.

    Args:
        won: capital of each strategy before the bet.
        number: number of the bet, from 1.
        disagreement: observed disagreement, from 0 to 1.
        bound: mean disagreement that is still allowed.

    Returns:
        The capitals, capped so that they stay finite.
    """
    begun = 1 / (number * (number + 1))
    paid = [1 + stake / bound * (disagreement - bound) for stake in _STAKES]
    return tuple(min(1e12, (before + begun) * factor) for before, factor in zip(won, paid, strict=True))


def upper_bound(mean: float, count: int, error: float) -> float:
    """Return an upper confidence bound of the mean of values from 0 to 1, which fails with a probability of `error`."""
    low, high = mean, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if count * _entropy(mean, middle) < -math.log(error):
            low = middle
        else:
            high = middle
    return min(_BOUND_MAX, high)


def _entropy(mean: float, other: float) -> float:
    """Return the relative entropy of two Bernoulli distributions with these means."""
    entropy = 0.0
    if mean > 0:
        entropy += mean * math.log(mean / other)
    if mean < 1:
        entropy += (1 - mean) * math.log((1 - mean) / max(1e-300, 1 - other))
    return entropy


class _Pair(NamedTuple):
    """Difference between the value of one judge and the mean value of people on one run, from 0 to 1."""

    source: str
    judged_by: str
    disagreement: float


class JudgeMonitor:
    """Updates, in the scorer's transactions, how much each judge disagrees with people on runs that both scored."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings

    async def add_run(self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, entries: LedgerEntries) -> None:
        """Update the disagreement of each judge that scored the run with the people who scored it.

        Without scores of people, do nothing.
        """
        for pair in self._pairs(entries):
            key = {"trajectory_id": trajectory.trajectory_id, "source": pair.source}
            if await upsert(tx, agreement_pairs, key, {}, update=False):
                await self._count(tx, now, trajectory.tenant, pair)

    def _pairs(self, entries: LedgerEntries) -> list[_Pair]:
        rows = [row for row in entries.rewards() if not row["turn_id"] and row["outcome"] == "scored"]
        rows = [row for row in rows if 0 <= row["value"] <= 1]
        values = [row["value"] for row in rows if matches_any(self._settings.people, row["source"])]
        if not values:
            return []
        mean = math.fsum(values) / len(values)
        return [
            _Pair(row["source"], row["judged_by"] or "", abs(row["value"] - mean))
            for row in rows
            if matches_any(self._settings.judges, row["source"]) and row["feedback_id"] is None
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
    """Set the gauges of each judge to its worst values among tenants and versions of the judge.

    Versions that were not compared with people within the last week do not count.
    """
    worst: dict[str, tuple[float, float]] = {}

    async def add(row: Row[tuple[object, ...]]) -> Sequence[Event]:
        state = Agreement.model_validate_json(row.state)
        disagreement, drifted = worst.get(row.source, (0.0, 0.0))
        alarm = float(row.drifted_ms is not None)
        worst[row.source] = max(disagreement, state.recent or 0.0), max(drifted, alarm)
        return ()

    async def discard(row: Row[tuple[object, ...]], _reason: str) -> Sequence[Event]:
        await reset_judge(tx, row.tenant, row.source)
        return ()

    await each(tx, "scorer.measure", await _newest(tx, epoch_ms(now) - _WEEK_MS), add, discard)
    for source, (disagreement, drifted) in worst.items():
        metrics.JUDGE_DISAGREEMENT.labels(source).set(disagreement)
        metrics.JUDGE_DRIFTED.labels(source).set(drifted)


async def list_judges(tx: AsyncConnection, settings: DriftSettings) -> list[dict[str, object]]:
    """Return the state of each judge as JSON values for the REST interface, the most recently compared judge first."""
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


async def reset_judge(tx: AsyncConnection, tenant: str, source: str) -> int:
    """Delete the state of a judge's agreement with people, so that its next runs define its usual disagreement.

    Args:
        tx: the transaction.
        tenant: tenant of the judge's rewards.
        source: source of the judge's rewards.

    Returns:
        Number of versions of the judge whose state was deleted.
    """
    of_judge = (agreement.c.tenant == tenant) & (agreement.c.source == source)
    return (await tx.execute(delete(agreement).where(of_judge))).rowcount


async def _newest(tx: AsyncConnection, since_ms: int) -> Sequence[Row[tuple[object, ...]]]:
    changed = agreement.c.changed_ms
    query = select(agreement).where(changed >= since_ms).order_by(changed.desc()).limit(_LISTED_MAX)
    return (await tx.execute(query)).all()
