"""Entry of feedback in the ledger as rewards, edits and preferences, independent of its order of arrival (P10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.process.logs import get_logger
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.text import printable
from headrace_scorer import feedback_matching, ledger, store
from headrace_scorer.feedback_entries import EntryKey, FeedbackEntry, entries_of
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback
from headrace_scorer.settings import ScorerSettings

CORRECTIONS_MAX = 128
"""Largest number of edits of a trajectory that count, and of preferences. The newest count."""
SOURCES_MAX = 64
"""Largest number of sources per trajectory besides reward functions, judges and the reward model. Rewards of further
sources are dead-lettered; sources of feedback are left out."""

log = get_logger(__name__)
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class MatchedFeedback:
    """All feedback about a trajectory, and the trajectories that lose feedback about their session to it."""

    feedback_set: FeedbackSet
    displaced: Sequence[str]


async def feedback_for(tx: AsyncConnection, trajectories: Sequence[Trajectory]) -> dict[str, MatchedFeedback]:
    """Match stored trajectories with all feedback about them. The result has the trajectory ids as keys."""
    about = await store.feedback_about(tx, trajectories)
    general = {store.session_of(item) for item in trajectories if about[item.trajectory_id][1]}
    peers = await store.closed_in_sessions(tx, general)
    matched: dict[str, MatchedFeedback] = {}
    tasks: dict[str, store.Task] = {}
    for trajectory in trajectories:
        name, in_session = trajectory.trajectory_id, peers.get(store.session_of(trajectory), [])
        feedback_set = feedback_matching.feedback_for(name, in_session, *about[name])
        matched[name] = MatchedFeedback(feedback_set, feedback_matching.displaced(name, in_session, about[name][1]))
        task_id = feedback_set.resolve_id("task_id", trajectory.task_id)
        if task_id is not None:
            tasks[name] = trajectory.tenant, task_id
    for name, of_task in (await store.feedback_about_tasks(tx, tasks)).items():
        feedback_set = feedback_matching.with_task(matched[name].feedback_set, of_task)
        matched[name] = replace(matched[name], feedback_set=feedback_set)
    return matched


async def targets_of(tx: AsyncConnection, placed: PlacedFeedback) -> Sequence[str]:
    """Return the ids of the stored trajectories that new feedback is about."""
    feedback = placed.event
    if feedback.msg_ids:
        return await store.trajectories_with(tx, feedback.msg_ids, feedback.tenant)
    session = feedback.session_key, feedback.tenant
    peers = (await store.closed_in_sessions(tx, [session]))[session]
    return sorted(feedback_matching.target_trajectories(placed, peers))


def revise(
    now: datetime,
    trajectory: Trajectory,
    feedback_set: FeedbackSet,
    entries: ledger.LedgerEntries,
    settings: ScorerSettings,
) -> list[Reward]:
    """Add to the ledger entries those that the feedback changes.

    Returns:
        New revisions of rewards, to be published. Edits and preferences are only in the ledger.
    """
    answers = store.branch_answers(trajectory)
    expected = entries_of(feedback_set, answers, settings.labels, CORRECTIONS_MAX)
    present = entries.from_feedback
    changes: list[tuple[EntryKey, FeedbackEntry]] = [
        (key, FeedbackEntry("withdrawn", row["feedback_id"]))
        for key, row in present.items()
        if key not in expected and row["outcome"] != "withdrawn"  # the feedback is now about a later trajectory
    ]
    sources = entries.open_sources
    left_out: set[str] = set()
    for key, entry in expected.items():
        if key.kind == "reward" and len(sources | {key.source}) > SOURCES_MAX:
            left_out.add(key.source)
            continue
        if key not in present or _differs(present[key], entry):
            changes.append((key, entry))
            sources |= {key.source} if key.kind == "reward" else set()
    if left_out:
        names = [printable(name, 64) for name in sorted(left_out)[:_NAMED_MAX]]
        log.warning("sources_left_out", trajectory=trajectory.trajectory_id, count=len(left_out), sources=names)
    return ledger.enter_feedback(now, trajectory, changes, entries)


def _differs(row: ledger.Row, entry: FeedbackEntry) -> bool:
    return (row["feedback_id"], row["outcome"], row["value"]) != (entry.origin, entry.outcome, entry.value)
