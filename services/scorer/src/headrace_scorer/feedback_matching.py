"""Which feedback is about which trajectory. Pure; the order of arrival makes no difference (P10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_schemas.bounds import merge_contexts


@dataclass(frozen=True, slots=True)
class PlacedFeedback:
    """A feedback event with its offset on the log. `place` orders the feedback of a session.

    Turns before offset `turns_until`, and trajectories before `trajectories_until`, existed when the feedback was
    given. Both are None for feedback that did not come through a gateway.
    """

    event: Feedback
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


@dataclass(frozen=True, slots=True)
class ClosedTrajectory:
    """What matching needs of a closed trajectory. Trajectories that were closed together have the same time."""

    trajectory_id: str
    time_ms: int
    place: int
    """Offset on `trajectories`."""
    began: int | None
    """Offset of its first turn. None: it was ingested, so it began when it was sent."""

    def had_begun(self, feedback: PlacedFeedback) -> bool:
        """Whether the trajectory had begun when the feedback was given."""
        if self.began is None:
            return feedback.trajectories_until is not None and self.place < feedback.trajectories_until
        return feedback.turns_until is not None and self.began < feedback.turns_until

    @property
    def order(self) -> tuple[bool, int]:
        """Sorts by beginning. Ingested trajectories come after those that the gateway captured."""
        return (self.began is None, self.place if self.began is None else self.began)


@dataclass(frozen=True, slots=True)
class FeedbackSet:
    """All feedback about one trajectory: first that about its task, then the rest, each in the order of the log.

    So what is said of a session takes the place of what the same rater said of its task.
    """

    all: tuple[Feedback, ...]

    @property
    def listing(self) -> tuple[Feedback, ...]:
        """The feedback that lists turns of the trajectory."""
        return tuple(one for one in self.all if one.msg_ids)

    @property
    def general(self) -> tuple[Feedback, ...]:
        """The feedback about its session."""
        return tuple(one for one in self.all if not one.msg_ids and one.level != "task")

    @property
    def of_task(self) -> tuple[Feedback, ...]:
        """The feedback about all runs of its task."""
        return tuple(one for one in self.all if one.level == "task")

    @property
    def parts(self) -> int:
        """How many sessions the run had."""
        return max((one.run_sessions for one in self.listing), default=1)

    def named(self, field: str, otherwise: str | None) -> str | None:
        """`task_id` or `run_id`: of feedback that lists turns, else `otherwise`, else of feedback about the session."""
        sure = next((getattr(one, field) for one in reversed(self.listing) if getattr(one, field)), otherwise)
        return sure or next((getattr(one, field) for one in reversed(self.general) if getattr(one, field)), None)

    def context(self, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """The facts that reward functions may read. Facts of feedback replace those of the trajectory, and of those
        what is said of a session, or lists turns, replaces what is said of more. Bounded like one context."""
        feedback = (*self.of_task, *self.general, *self.listing)
        return merge_contexts([given, *(one.context for one in feedback)])


def feedback_for(
    trajectory_id: str,
    peers: Sequence[ClosedTrajectory],
    listing: Iterable[PlacedFeedback],
    general: Iterable[PlacedFeedback],
) -> FeedbackSet:
    """`listing` lists turns of this trajectory, `general` is about the session whose trajectories are `peers`."""
    own = [one for one in general if trajectory_id in target_trajectories(one, peers)]
    ordered = sorted((*listing, *own), key=lambda one: (one.place, one.event.event_id))
    return FeedbackSet(tuple(one.event for one in ordered))


def with_task(found: FeedbackSet, of_task: Iterable[PlacedFeedback]) -> FeedbackSet:
    """The same with the feedback about the task, whose copies are all of one partition."""
    ordered = sorted(of_task, key=lambda one: (one.place, one.event.event_id))
    return FeedbackSet((*(one.event for one in ordered), *found.all))


def target_trajectories(feedback: PlacedFeedback, peers: Sequence[ClosedTrajectory]) -> frozenset[str]:
    """The trajectories that feedback about a session is about.

    That is the trajectory that had begun last when the feedback was given, else the first that began after it, each
    with those that were closed together with it. Without the offsets of a gateway, times decide: the trajectory that
    was closed next after the feedback, else the one that was closed last.
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


def displaced(trajectory_id: str, peers: Sequence[ClosedTrajectory], general: Iterable[PlacedFeedback]) -> list[str]:
    """Which other `peers` lose feedback about their session to this trajectory, now that it is one of them."""
    others = [peer for peer in peers if peer.trajectory_id != trajectory_id]
    return sorted(
        {name for one in general for name in target_trajectories(one, others) - target_trajectories(one, peers)}
    )
