"""Every revision of every source's reward for a trajectory. Functions run in their caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.upsert import upsert
from headrace_schemas import Reward
from headrace_scorer import metrics
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.schema import ledger

_WHOLE = ""


Row = Mapping[str, Any]


class LedgerEntries:
    """The ledger's rows about one trajectory, from its own tenant."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._latest: dict[tuple[str, str], Row] = {}
        self._from_feedback: dict[tuple[str, str], Row] = {}
        for row in sorted(rows, key=lambda row: int(row["revision"])):
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row. Its revision is higher than that of the rows before it."""
        target = (row["turn_id"], row["source"])
        self._latest[target] = row
        if row["feedback_id"] is not None:
            self._from_feedback[target] = row

    @property
    def sources(self) -> set[str]:
        return {source for _, source in self._latest}

    @property
    def from_feedback(self) -> dict[tuple[str, str], Row]:
        """The newest reward of each target that was made from feedback."""
        return dict(self._from_feedback)

    def next_revision(self, turn_id: str, source: str) -> int:
        row = self._latest.get((turn_id, source))
        return 0 if row is None else int(row["revision"]) + 1

    def current(self) -> list[SourceReward]:
        """The current reward of each source: its highest revision."""
        return [
            SourceReward(row["source"], row["turn_id"] or None, row["outcome"], row["value"])
            for row in self._latest.values()
        ]


async def read(tx: AsyncConnection, trajectory_id: str, tenant: str) -> LedgerEntries:
    query = select(ledger).where(ledger.c.trajectory_id == trajectory_id, ledger.c.tenant == tenant)
    return LedgerEntries([dict(row) for row in (await tx.execute(query)).mappings()])


async def history(tx: AsyncConnection, trajectory_id: str) -> list[Row]:
    """Every revision of every source, for people to read."""
    order = (ledger.c.tenant, ledger.c.source, ledger.c.turn_id, ledger.c.revision)
    query = select(ledger).where(ledger.c.trajectory_id == trajectory_id).order_by(*order)
    return [dict(row) for row in (await tx.execute(query)).mappings()]


async def enter(
    tx: AsyncConnection, now: datetime, rewards: Iterable[tuple[Reward, str | None]], entries: LedgerEntries
) -> None:
    """Add our own new revisions, each with the id of the feedback event it was made from, if any.

    `entries` was read before; the new rows are added to it.
    """
    rows = [_row(reward, feedback_id, now) for reward, feedback_id in rewards]
    if rows:
        await tx.execute(insert(ledger), rows)
    for row in rows:
        entries.add(row)
        _count(row["source"], row["outcome"])


async def receive(tx: AsyncConnection, now: datetime, reward: Reward) -> bool:
    """Add a revision that came over the bus. False: it is here already, like our own revisions when they come back."""
    row = _row(reward, None, now)
    key = {name: row.pop(name) for name in ("trajectory_id", "tenant", "turn_id", "source", "revision")}
    fresh = await upsert(tx, ledger, key, row, update=False)
    if fresh:
        _count(reward.source, reward.outcome)
    return fresh


def _row(reward: Reward, feedback_id: str | None, now: datetime) -> dict[str, Any]:
    return {
        "trajectory_id": reward.trajectory_id,
        "tenant": reward.tenant,
        "turn_id": reward.turn_id or _WHOLE,
        "source": reward.source,
        "revision": reward.revision,
        "outcome": reward.outcome,
        "value": reward.value,
        "criteria": json.dumps(reward.criteria) if reward.criteria else None,
        "reason": reward.reason,
        "judged_by": reward.judged_by,
        "feedback_id": feedback_id,
        "time_ms": epoch_ms(reward.time),
        "arrived_ms": epoch_ms(now),
    }


def _count(source: str, outcome: str) -> None:
    kind = source.partition(":")[0] if source.startswith(("function:", "judge:")) else "other"
    metrics.REWARDS.labels("feedback" if source == "feedback" else kind, outcome).inc()
