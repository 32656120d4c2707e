"""Feedback as a source of rewards: joined with trajectories by turn and session, in whatever order they came (P10)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_schemas import Feedback, Reward, Trajectory
from headrace_scorer import joins, ledger, store
from headrace_scorer.joins import Heard, Said, Target


async def said_about(tx: AsyncConnection, trajectory: Trajectory) -> tuple[Said, Sequence[str]]:
    """Everything that was said about a trajectory, and which others lose what was said about the session to it."""
    key, tenant = trajectory.session_key, trajectory.tenant
    listing, general = await store.feedback_about(tx, key, tenant, trajectory.turn_ids)
    peers = await store.closed_in_session(tx, key, tenant) if general else []
    said = joins.said_about(trajectory.trajectory_id, peers, listing, general)
    return said, joins.displaced(trajectory.trajectory_id, peers, general)


async def concerned(tx: AsyncConnection, heard: Heard) -> Sequence[str]:
    """The trajectories that are known now and that a new feedback is about."""
    feedback = heard.event
    if feedback.msg_ids:
        return await store.trajectories_with(tx, feedback.msg_ids, feedback.tenant)
    peers = await store.closed_in_session(tx, feedback.session_key, feedback.tenant)
    return sorted(joins.targets(heard, peers))


async def revise(
    tx: AsyncConnection, now: datetime, trajectory: Trajectory, said: Said, entries: ledger.Entries, sources_max: int
) -> list[Reward]:
    """Enter what has changed by what was said, and return it: the last word of each source is its reward."""
    wanted = joins.verdicts(said, store.spoken_turns(trajectory))
    known = entries.from_feedback
    changes: list[tuple[Target, Feedback | None, str]] = [
        (target, None, row["feedback_id"])
        for target, row in known.items()
        if target not in wanted and row["outcome"] != "withdrawn"  # it is about another trajectory, as it turns out
    ]
    for target, feedback in wanted.items():
        fits = len(entries.sources | {target[1]}) <= sources_max
        if fits and (target not in known or known[target]["feedback_id"] != feedback.event_id):
            changes.append((target, feedback, feedback.event_id))
    rewards = [(_reward(trajectory, entries, now, target, feedback), origin) for target, feedback, origin in changes]
    await ledger.enter(tx, now, rewards, entries)
    return [reward for reward, _ in rewards]


def _reward(
    trajectory: Trajectory, entries: ledger.Entries, now: datetime, target: Target, feedback: Feedback | None
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
