"""Matching of feedback events with the trajectories that they are about.

Pure functions; the order in which events arrive makes no difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import JsonValue

from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.tables import take_within_limits
from headrace_schemas import Feedback
from headrace_schemas.values.bounds import merge_contexts

EVENTS_MAX = 256
"""Largest number of feedback events about a trajectory, and about its task, that count. The newest events count."""
_BYTES_MAX = 8 << 20
"""JSON bytes of these events together. The newest event counts, whatever its size."""
_VALUES_MAX = 32_768
"""Values of these events together, one for each response and metric that an event names."""


@dataclass(frozen=True, slots=True)
class FeedbackPosition:
    """Position of a stored feedback event in the log, without the event. For the fields see `PlacedFeedback`."""

    name: str
    """The key of the stored event."""
    offset: int
    turns_until: int | None
    trajectories_until: int | None
    size_bytes: int
    value_count: int = 0


@dataclass(frozen=True, slots=True)
class PlacedFeedback:
    """A feedback event with its offset on the topic `feedback` and the ends of other topics when it was sent.

    The offset orders the feedback of a session. `turns_until` and `trajectories_until` are the end offsets of the
    topics `turns` and `trajectories` at that time; both are None for feedback that did not come through a gateway.
    """

    event: Feedback
    offset: int
    turns_until: int | None = None
    trajectories_until: int | None = None
    size_bytes: int = 0
    """Size of the event's JSON in bytes."""

    @property
    def value_count(self) -> int:
        return self.event.value_count


P = TypeVar("P", FeedbackPosition, PlacedFeedback)


@dataclass(frozen=True, slots=True, order=True)
class ClosedTrajectory:
    """Times and offsets of a closed trajectory that matching uses. Trajectories closed together have equal times."""

    trajectory_id: str
    time_ms: int
    offset: int
    """Offset on `trajectories`."""
    began: int | None
    """Offset, on `turns`, of the trajectory's first turn. None if it was ingested: then it began when it was sent."""


@dataclass(frozen=True, slots=True)
class FeedbackRange:
    """Range of log offsets: feedback of a session that was sent at these offsets is about the same trajectories.

    The offset of feedback is the end of the topic `turns` (`turns_until`) or `trajectories` (`trajectories_until`) when
    it was sent. The trajectories of a range began, or were ingested, in succession.
    """

    is_of_turns: bool
    """Whether the range limits `turns_until` of the feedback. Otherwise it limits `trajectories_until`."""
    after: int | None
    """Exclusive lower bound of the range, or None without one."""
    until: int | None
    """Inclusive upper bound of the range, or None without one."""
    ingested_from: int | None = None
    """Feedback with a greater `trajectories_until` is about an ingested trajectory."""


class ClosedRuns:
    """The closed trajectories of one session, sorted by the offsets of their beginnings and by their closing times."""

    def __init__(self, peers: Iterable[ClosedTrajectory]) -> None:
        self.peers = tuple(peers)
        captured = sorted((peer.began, peer) for peer in self.peers if peer.began is not None)
        ingested = sorted((peer.offset, peer) for peer in self.peers if peer.began is None)
        self._begun, self._captured = [began for began, _ in captured], [peer for _, peer in captured]
        self._sent, self._ingested = [offset for offset, _ in ingested], [peer for _, peer in ingested]
        ended_together: defaultdict[int, set[str]] = defaultdict(set)
        for peer in self.peers:
            ended_together[peer.time_ms].add(peer.trajectory_id)
        self._ended_together = {time_ms: frozenset(names) for time_ms, names in ended_together.items()}
        self._times = sorted(ended_together)

    def last_begun_before(self, turns_until: int | None, trajectories_until: int | None) -> frozenset[str]:
        """Return the ids of the newest trajectory that began before these offsets and of those closed together with it.

        If no trajectory began before these offsets, the first one of the session is used. Ingested trajectories count
        as newer than captured ones.

        Args:
            turns_until: offset on the topic of turns, for captured trajectories; None matches none.
            trajectories_until: offset on the topic of trajectories, for ingested ones; None matches none.
        """
        ingested = 0 if trajectories_until is None else bisect_left(self._sent, trajectories_until)
        captured = 0 if turns_until is None else bisect_left(self._begun, turns_until)
        if ingested:
            chosen = self._ingested[ingested - 1]
        elif captured:
            chosen = self._captured[captured - 1]
        elif self.peers:
            chosen = (self._captured or self._ingested)[0]
        else:
            return frozenset()
        return self._ended_together[chosen.time_ms]

    def ranges(self, time_ms: int, separate_id: str = "") -> list[FeedbackRange]:
        """Return the ranges of end offsets of the feedback that is about the trajectories closed at `time_ms`.

        Args:
            separate_id: id of a trajectory whose range is not merged with the ranges of its neighbours.
        """
        ingested_from = self._sent[0] if self._sent else None
        captured = list(zip(self._begun, self._captured, [*self._begun[1:], None], strict=False))
        ingested = list(zip(self._sent, self._ingested, [*self._sent[1:], None], strict=False))
        ranges: list[FeedbackRange] = []
        is_joined = False
        for is_of_turns, peers in ((True, captured), (False, ingested)):
            for number, (begin, peer, end) in enumerate(peers):
                if peer.time_ms != time_ms or begin == end:
                    continue
                after = None if number == 0 and (is_of_turns or not captured) else begin
                item = FeedbackRange(is_of_turns, after, end, ingested_from if is_of_turns else None)
                may_join = is_joined and peer.trajectory_id != separate_id and ranges[-1].is_of_turns == is_of_turns
                if may_join and ranges[-1].until == after:
                    ranges[-1] = replace(ranges[-1], until=end)
                else:
                    ranges.append(item)
                is_joined = peer.trajectory_id != separate_id
        return ranges

    def closed_after(self, time_ms: int) -> frozenset[str]:
        """Return the ids of the trajectories closed first at or after a time, or else of those closed last."""
        if not self._times:
            return frozenset()
        at = bisect_left(self._times, time_ms)
        return self._ended_together[self._times[min(at, len(self._times) - 1)]]

    def without(self, trajectory_id: str) -> ClosedRuns:
        """Return the trajectories of the session without the one with this id."""
        return ClosedRuns(peer for peer in self.peers if peer.trajectory_id != trajectory_id)


@dataclass(frozen=True, slots=True)
class FeedbackSet:
    """All feedback about one trajectory: first the feedback about its task, then all other, each in log order.

    A later event replaces an earlier one of the same rater, so feedback about a session replaces feedback about its
    task.
    """

    all: tuple[Feedback, ...]

    @property
    def listing(self) -> tuple[Feedback, ...]:
        """Feedback that names turns of the trajectory by their ids."""
        return tuple(event for event in self.all if event.msg_ids)

    @property
    def general(self) -> tuple[Feedback, ...]:
        """Feedback about the session as a whole, which names no turns."""
        return tuple(event for event in self.all if not event.msg_ids and event.level != "task")

    @property
    def of_task(self) -> tuple[Feedback, ...]:
        """Feedback about all runs of the task."""
        return tuple(event for event in self.all if event.level == "task")

    @property
    def session_count(self) -> int:
        """Number of sessions that contain turns of the trajectory's run; 1 without feedback that lists turns.

        Feedback that lists the turns of a run is one event for each session, and each event contains the number
        (`Feedback.run_sessions`). The largest number is returned.
        """
        return max((event.run_sessions for event in self.listing), default=1)

    def resolve_id(self, field: str, default: str | None) -> str | None:
        """Return the task id or run id of the trajectory (`field`: `task_id` or `run_id`), or None without any.

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


def newest(records: Iterable[P], events_max: int | None = None) -> list[P]:
    """Return the newest records up to `events_max` events (by default `EVENTS_MAX`), in the order of the log.

    Their bytes and values are limited too. Without limits, each new feedback of a session would cost as much as all
    earlier feedback together.
    """
    most = EVENTS_MAX if events_max is None else events_max
    ordered = sorted(records, key=lambda record: record.offset, reverse=True)
    counted = take_within_limits(
        ordered, most, lambda record: (record.size_bytes, record.value_count), (_BYTES_MAX, _VALUES_MAX)
    )
    return counted[::-1]


def feedback_for(
    trajectory_id: str,
    peers: ClosedRuns,
    listing: Iterable[PlacedFeedback],
    general: Iterable[PlacedFeedback],
) -> FeedbackSet:
    """Select the feedback about a trajectory from that about its turns and its session, within the limits of `newest`.

    Args:
        peers: the closed trajectories of the session, including this one.
        listing: feedback that lists turns of the trajectory.
        general: feedback about the session as a whole.
    """
    targeted = [record for record in general if trajectory_id in target_trajectories(record, peers)]
    ordered = sorted(newest((*listing, *targeted)), key=_log_order)
    return FeedbackSet(tuple(record.event for record in ordered))


def with_task(session_feedback: FeedbackSet, of_task: Iterable[PlacedFeedback]) -> FeedbackSet:
    """Return the feedback set with the feedback about the trajectory's task added.

    Args:
        session_feedback: feedback about the trajectory's turns and session.
        of_task: feedback about the task, all from one partition.
    """
    ordered = sorted(newest(of_task), key=_log_order)
    return FeedbackSet((*(record.event for record in ordered), *session_feedback.all))


def _log_order(record: PlacedFeedback) -> tuple[int, str]:
    return record.offset, record.event.event_id


def target_trajectories(feedback: PlacedFeedback | FeedbackPosition, peers: ClosedRuns) -> frozenset[str]:
    """Return the ids of the trajectories that feedback about their session applies to.

    It applies to the trajectory that had begun last when the feedback was sent, or else to the first one that began
    after that, and to those closed together with it. Feedback without the offsets of a gateway applies to the
    trajectory that was closed next after the time of the feedback, or else to the one that was closed last.
    """
    if feedback.turns_until is None and isinstance(feedback, PlacedFeedback):
        return peers.closed_after(epoch_ms(feedback.event.time))
    return peers.last_begun_before(feedback.turns_until, feedback.trajectories_until)


def trajectories_losing_feedback(
    trajectory_id: str, peers: ClosedRuns, general: Iterable[PlacedFeedback | FeedbackPosition]
) -> list[str]:
    """Return the ids of the trajectories from which a new trajectory of the session takes over some feedback.

    Args:
        trajectory_id: the new trajectory.
        peers: all trajectories of the session, including the new one.
        general: feedback about the session as a whole.
    """
    earlier = peers.without(trajectory_id)
    lost = (target_trajectories(record, earlier) - target_trajectories(record, peers) for record in general)
    return sorted({name for names in lost for name in names})
