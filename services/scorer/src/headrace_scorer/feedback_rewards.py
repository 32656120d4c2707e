"""Rewards from feedback, which is matched with trajectories by turn and session in any order of arrival (P10)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_schemas import Feedback, Reward, Trajectory
from headrace_scorer import feedback_matching, ledger, store
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback, Target


async def feedback_for(tx: AsyncConnection, trajectory: Trajectory) -> tuple[FeedbackSet, Sequence[str]]:
    """All feedback about a trajectory, and the trajectories that lose feedback about their session to it."""
    key, tenant = trajectory.session_key, trajectory.tenant
    listing, general = await store.feedback_about(tx, key, tenant, trajectory.turn_ids)
    peers = await store.closed_in_session(tx, key, tenant) if general else []
    found = feedback_matching.feedback_for(trajectory.trajectory_id, peers, listing, general)
    return found, feedback_matching.displaced(trajectory.trajectory_id, peers, general)


async def targets_of(tx: AsyncConnection, placed: PlacedFeedback) -> Sequence[str]:
    """The trajectories, of those known now, that new feedback is about."""
    feedback = placed.event
    if feedback.msg_ids:
        return await store.trajectories_with(tx, feedback.msg_ids, feedback.tenant)
    peers = await store.closed_in_session(tx, feedback.session_key, feedback.tenant)
    return sorted(feedback_matching.target_trajectories(placed, peers))


async def revise(
    tx: AsyncConnection,
    now: datetime,
    trajectory: Trajectory,
    feedback_set: FeedbackSet,
    entries: ledger.LedgerEntries,
    sources_max: int,
) -> list[Reward]:
    """Enter the rewards that this feedback changes, and return them. The last feedback of a source is its reward."""
    wanted = feedback_matching.valid_feedback(feedback_set, store.branch_turns(trajectory))
    known = entries.from_feedback
    changes: list[tuple[Target, Feedback | None, str]] = [
        (target, None, row["feedback_id"])
        for target, row in known.items()
        if target not in wanted and row["outcome"] != "withdrawn"  # it is about another trajectory, which came later
    ]
    for target, feedback in wanted.items():
        fits = len(entries.sources | {target[1]}) <= sources_max
        if fits and (target not in known or known[target]["feedback_id"] != feedback.event_id):
            changes.append((target, feedback, feedback.event_id))
    rewards = [(_reward(trajectory, entries, now, target, feedback), origin) for target, feedback, origin in changes]
    await ledger.enter(tx, now, rewards, entries)
    return [reward for reward, _ in rewards]


def _reward(
    trajectory: Trajectory, entries: ledger.LedgerEntries, now: datetime, target: Target, feedback: Feedback | None
) -> Reward:
    turn_id, source = target
    scored = feedback is not None and not feedback.withdrawn
    return Reward(
        time=now,
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        tenant=trajectory.tenant,
        turn_id=turn_id or None,
        source=source,
        revision=entries.next_revision(turn_id, source),
        outcome="scored" if scored else "withdrawn",
        value=feedback.value if feedback is not None and scored else None,
        reason=feedback.comment if feedback is not None else None,
    )
