"""The account of a trajectory: what was said about it, what that amounts to, and the experiences that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Experience, Trajectory
from headrace_scorer import ledger, metrics, store
from headrace_scorer.ledger import Entries
from headrace_scorer.policy import Policy, Standing

_UNSAID: Mapping[str, Any] = {"revision": -1, "state": None, "rewarded": False}


@dataclass(slots=True)
class Account:
    """One trajectory's, locked until the transaction ends. `row` is its row in `trajectories`."""

    trajectory: Trajectory
    row: dict[str, Any]
    entries: Entries
    changes: dict[str, Any] = field(default_factory=dict)

    def change(self, **values: object) -> None:
        """Set columns of the row; written by `Book.settle`."""
        for name, value in values.items():
            if self.row[name] != value:
                self.row[name] = self.changes[name] = value


class Book:
    """Opens accounts and settles them."""

    def __init__(self, library: store.Library) -> None:
        self._library = library

    async def open(self, tx: AsyncConnection, trajectory_id: str) -> Account | None:
        """None when the trajectory is not known (any more)."""
        row = await store.lock(tx, trajectory_id)
        if row is None:
            return None
        trajectory = await self._library.get(tx, trajectory_id)
        assert trajectory is not None  # its row is locked
        return Account(trajectory, dict(row), await ledger.read(tx, trajectory_id, trajectory.tenant))

    async def settle(self, tx: AsyncConnection, now: datetime, account: Account, policy: Policy) -> list[Experience]:
        """Save the account's changes; returns new revisions of experiences, one per branch whose state has changed.

        Nothing before everybody has spoken or the wait is over; after that, whenever it changes, but not while reward
        functions are about to speak again.
        """
        settle_ms = account.row["settle_ms"]
        over = settle_ms is not None and settle_ms <= epoch_ms(now)
        experiences: list[Experience] = []
        if over or _ready(account, policy):
            experiences = _experiences(account, now, policy)
            account.change(settle_ms=None)
            if over:
                account.change(scored_inputs=account.row["inputs"])
        if account.changes:
            await store.change(tx, account.trajectory.trajectory_id, **account.changes)
            account.changes.clear()
        return experiences


def _ready(account: Account, policy: Policy) -> bool:
    row = account.row
    if policy.functions and row["scored_inputs"] != row["inputs"]:
        return False
    if row["emitted"] != "[]":
        return True
    return row["settle_ms"] is not None and policy.complete(account.entries.verdicts())


def _experiences(account: Account, now: datetime, policy: Policy) -> list[Experience]:
    emitted: Sequence[Mapping[str, Any]] = json.loads(account.row["emitted"])
    verdicts = account.entries.verdicts()
    experiences = []
    states = []
    for index, branch in enumerate(account.trajectory.branches):
        last = emitted[index] if emitted else _UNSAID
        standing = policy.standing(verdicts, branch.turn_ids, rewarded=last["rewarded"])
        made = experience(
            account.trajectory,
            index,
            standing,
            now=now,
            revision=last["revision"] + 1,
            task_id=account.row["task_id"],
            run_id=account.row["run_id"],
            parts=account.row["parts"],
        )
        state = _state(made)
        if state != last["state"]:
            experiences.append(made)
            rewarded = last["rewarded"] or made.reward is not None
            last = {"revision": made.revision, "state": state, "rewarded": rewarded}
        states.append(last)
    account.change(emitted=json.dumps(states))
    if experiences and not emitted:
        age_s = (now - account.trajectory.time).total_seconds()
        metrics.EXPERIENCE_SECONDS.observe(max(0.0, age_s))
    for made in experiences:
        metrics.EXPERIENCES.labels(made.no_reward or "rewarded").inc()
    return experiences


def experience(
    trajectory: Trajectory,
    index: int,
    standing: Standing,
    *,
    now: datetime,
    revision: int,
    task_id: str | None,
    run_id: str | None,
    parts: int,
) -> Experience:
    """What is said of one branch."""
    branch = trajectory.branches[index]
    return Experience(
        time=now,
        experience_id=Experience.id_of(trajectory.trajectory_id, index),
        revision=revision,
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        session_id=trajectory.session_id,
        tenant=trajectory.tenant,
        task_id=task_id,
        run_id=run_id,
        model=trajectory.model,
        branch_index=index,
        branch=branch if standing.reward is not None else None,
        turn_ids=branch.turn_ids,
        weight=1 / (len(trajectory.branches) * parts),
        reward=standing.reward,
        no_reward=standing.no_reward,
        parts=standing.parts,
    )


def _state(made: Experience) -> str:
    """A digest of what a later revision could change."""
    text = made.model_dump_json(include={"reward", "no_reward", "parts", "weight", "task_id", "run_id"})
    return sha256(text.encode()).hexdigest()[:16]
