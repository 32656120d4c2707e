"""Matching of feedback with trajectories. Pure; the order of arrival makes no difference (P10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_schemas.values.bounds import merge_contexts


@dataclass(frozen=True, slots=True)
class PlacedFeedback:
    """A feedback event with its offset on the topic `feedback`, which orders the feedback of a session.

    When the event was sent, the topic `turns` ended at the offset `turns_until`, and `trajectories` at
    `trajectories_until`. Both are None for feedback that did not come through a gateway.
    """

    event: Feedback
    offset: int
    turns_until: int | None = None
    trajectories_until: int | None = None


@dataclass(frozen=True, slots=True)
class ClosedTrajectory:
    """Fields of a closed trajectory that matching reads. Trajectories that were closed together have the same time."""

    trajectory_id: str
    time_ms: int
    offset: int
    """Offset on `trajectories`."""
    began: int | None
    """Offset of its first turn on `turns`. None if it was ingested: then it began when it was sent."""

    def had_begun(self, feedback: PlacedFeedback) -> bool:
        """Return whether the trajectory had begun when the feedback was sent."""
        if self.began is None:
            return feedback.trajectories_until is not None and self.offset < feedback.trajectories_until
        return feedback.turns_until is not None and self.began < feedback.turns_until

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key by the begin of the trajectory. Ingested trajectories come after those that the gateway captured."""
        return (self.began is None, self.offset if self.began is None else self.began)


@dataclass(frozen=True, slots=True)
class FeedbackSet:
    """All feedback about one trajectory: first that about its task, then all other, each in the order of the log.

    A later event replaces an earlier one of the same rater, so feedback about a session replaces feedback about its
    task.
    """

    all: tuple[Feedback, ...]

    @property
    def listing(self) -> tuple[Feedback, ...]:
        """Feedback that lists turns of the trajectory by their ids."""
        return tuple(event for event in self.all if event.msg_ids)

    @property
    def general(self) -> tuple[Feedback, ...]:
        """Feedback about the session as a whole, without listed turns."""
        return tuple(event for event in self.all if not event.msg_ids and event.level != "task")

    @property
    def of_task(self) -> tuple[Feedback, ...]:
        """Feedback about all runs of the task."""
        return tuple(event for event in self.all if event.level == "task")

    @property
    def session_count(self) -> int:
        """Number of sessions that the run consists of, as feedback that lists turns states it; at least 1."""
        return max((event.run_sessions for event in self.listing), default=1)

    def resolve_id(self, field: str, default: str | None) -> str | None:
        """Return the id in `field` (`task_id` or `run_id`) of the trajectory, or None if no event has one.

        The newest feedback that lists turns decides, then `default`, then the newest feedback about the session.
        """
        certain = next((getattr(event, field) for event in reversed(self.listing) if getattr(event, field)), default)
        general = (getattr(event, field) for event in reversed(self.general) if getattr(event, field))
        return certain or next(general, None)

    def context(self, trajectory_context: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Return the context that reward functions get: that of the trajectory, updated by that of feedback.

        Context of narrower feedback replaces that of wider feedback, in the order task, session, turns. The result is
        bounded like the context of one event.
        """
        feedback = (*self.of_task, *self.general, *self.listing)
        return merge_contexts([trajectory_context, *(event.context for event in feedback)])


def feedback_for(
    trajectory_id: str,
    peers: Sequence[ClosedTrajectory],
    listing: Iterable[PlacedFeedback],
    general: Iterable[PlacedFeedback],
) -> FeedbackSet:
    """Return the feedback about a trajectory.

    Args:
        peers: the closed trajectories of the session, this one among them.
        listing: feedback that lists turns of the trajectory.
        general: feedback about the session as a whole.
    """
    targeted = [record for record in general if trajectory_id in target_trajectories(record, peers)]
    ordered = sorted((*listing, *targeted), key=_log_order)
    return FeedbackSet(tuple(record.event for record in ordered))


def with_task(session_feedback: FeedbackSet, of_task: Iterable[PlacedFeedback]) -> FeedbackSet:
    """Return the feedback set of a trajectory extended by feedback about its task.

    All of `of_task` is of one partition.
    """
    ordered = sorted(of_task, key=_log_order)
    return FeedbackSet((*(record.event for record in ordered), *session_feedback.all))


def _log_order(record: PlacedFeedback) -> tuple[int, str]:
    return record.offset, record.event.event_id


def target_trajectories(feedback: PlacedFeedback, peers: Sequence[ClosedTrajectory]) -> frozenset[str]:
    """Return the ids of the trajectories that feedback about their session applies to.

    It applies to the trajectory that had begun last when the feedback was sent, else to the first that began after it,
    each with those that were closed together with it. Without the offsets of a gateway, times decide: the trajectory
    that was closed next after the feedback, else the one that was closed last.
    """
    if feedback.turns_until is None:
        at_ms = epoch_ms(feedback.event.time)
        later = [peer.time_ms for peer in peers if peer.time_ms >= at_ms]
        time_ms = min(later) if later else max((peer.time_ms for peer in peers), default=None)
        return frozenset(peer.trajectory_id for peer in peers if peer.time_ms == time_ms)
    begun = [peer for peer in peers if peer.had_begun(feedback)]
    if begun:
        chosen = max(begun, key=lambda peer: peer.order)
    elif peers:
        chosen = min(peers, key=lambda peer: peer.order)
    else:
        return frozenset()
    return frozenset(peer.trajectory_id for peer in peers if peer.time_ms == chosen.time_ms)


def trajectories_losing_feedback(
    trajectory_id: str, peers: Sequence[ClosedTrajectory], general: Iterable[PlacedFeedback]
) -> list[str]:
    """Return the trajectories to which some session feedback no longer applies, because `trajectory_id` is new among
    `peers`."""
    earlier = [peer for peer in peers if peer.trajectory_id != trajectory_id]
    lost = (target_trajectories(record, earlier) - target_trajectories(record, peers) for record in general)
    return sorted({name for names in lost for name in names})
