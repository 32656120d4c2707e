"""Entry of feedback in the ledger as rewards, edits and preferences, independent of its order of arrival (P10)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.process.logs import get_logger
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.text import printable
from headrace_scorer import feedback_matching, ledger, store
from headrace_scorer.feedback_entries import EntryKey, FeedbackEntry, entries_of
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_NAMED_MAX = 10


async def feedback_for(tx: AsyncConnection, trajectory: Trajectory) -> tuple[FeedbackSet, Sequence[str]]:
    """Return all feedback about a trajectory, and the trajectories that lose feedback about their session to it."""
    key, tenant = trajectory.session_key, trajectory.tenant
    listing, general = await store.feedback_about(tx, key, tenant, trajectory.turn_ids)
    peers = await store.closed_in_session(tx, key, tenant) if general else []
    feedback_set = feedback_matching.feedback_for(trajectory.trajectory_id, peers, listing, general)
    task_id = feedback_set.named("task_id", trajectory.task_id)
    if task_id is not None:
        of_task = await store.feedback_about_task(tx, tenant, task_id, trajectory.trajectory_id)
        feedback_set = feedback_matching.with_task(feedback_set, of_task)
    return feedback_set, feedback_matching.displaced(trajectory.trajectory_id, peers, general)


async def targets_of(tx: AsyncConnection, placed: PlacedFeedback) -> Sequence[str]:
    """Return the ids of the stored trajectories that new feedback is about."""
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
    settings: ScorerSettings,
) -> list[Reward]:
    """Enter in the ledger the entries that the feedback changes.

    Returns:
        New revisions of rewards, to be published. Edits and preferences are only in the ledger.
    """
    answers = store.branch_answers(trajectory)
    expected = entries_of(feedback_set, answers, settings.labels, settings.corrections_max)
    present = entries.from_feedback
    changes: list[tuple[EntryKey, FeedbackEntry]] = [
        (key, FeedbackEntry("withdrawn", row["feedback_id"]))
        for key, row in present.items()
        if key not in expected and row["outcome"] != "withdrawn"  # the feedback is now about a later trajectory
    ]
    sources = entries.open_sources
    left_out: set[str] = set()
    for key, entry in expected.items():
        if key.kind == "reward" and len(sources | {key.source}) > settings.sources_max:
            left_out.add(key.source)
            continue
        if key not in present or _differs(present[key], entry):
            changes.append((key, entry))
            sources |= {key.source} if key.kind == "reward" else set()
    if left_out:
        names = [printable(name, 64) for name in sorted(left_out)[:_NAMED_MAX]]
        log.warning("sources_left_out", trajectory=trajectory.trajectory_id, count=len(left_out), sources=names)
    return await ledger.enter_feedback(tx, now, trajectory, changes, entries)


def _differs(row: ledger.Row, entry: FeedbackEntry) -> bool:
    return (row["feedback_id"], row["outcome"], row["value"]) != (entry.origin, entry.outcome, entry.value)
