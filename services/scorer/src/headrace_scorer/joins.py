"""Which feedback is about which trajectory, and what it says about it. Pure, and in whatever order they came (P10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_schemas.ids import key_of_response

Target = tuple[str, str]
"""A turn's id, empty for the trajectory as a whole, and a source."""


@dataclass(frozen=True, slots=True)
class Closed:
    """What is known of a closed trajectory without reading it."""

    trajectory_id: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class Said:
    """All the feedback about one trajectory, oldest first."""

    listing: tuple[Feedback, ...]
    """What lists turns of it."""
    general: tuple[Feedback, ...]
    """What is about its session."""

    @property
    def all(self) -> tuple[Feedback, ...]:
        return tuple(sorted((*self.general, *self.listing), key=_order))

    @property
    def parts(self) -> int:
        """Over how many sessions the run went."""
        return max((len({key_of_response(turn) for turn in one.msg_ids} - {None}) for one in self.listing), default=1)

    def named(self, field: str, otherwise: str | None) -> str | None:
        """`task_id` or `run_id`: from what lists the run, else `otherwise`, else from what is about the session."""
        sure = next((getattr(one, field) for one in reversed(self.listing) if getattr(one, field)), otherwise)
        return sure or next((getattr(one, field) for one in reversed(self.general) if getattr(one, field)), None)

    def context(self, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """The facts that reward functions may read: the trajectory's own, then what was said later."""
        merged = dict(given)
        for one in (*self.general, *self.listing):
            merged |= one.context
        return merged


def said_about(
    trajectory_id: str, peers: Sequence[Closed], listing: Iterable[Feedback], general: Iterable[Feedback]
) -> Said:
    """`listing` lists turns of this trajectory, `general` is about the session whose trajectories are `peers`."""
    own = [one for one in general if trajectory_id in targets(one, peers)]
    return Said(tuple(sorted(listing, key=_order)), tuple(sorted(own, key=_order)))


def targets(feedback: Feedback, peers: Sequence[Closed]) -> frozenset[str]:
    """What feedback about a session means: what was closed next after it, else what was closed last before it."""
    at_ms = epoch_ms(feedback.time)
    later = [peer.time_ms for peer in peers if peer.time_ms >= at_ms]
    chosen = min(later) if later else max((peer.time_ms for peer in peers), default=None)
    return frozenset(peer.trajectory_id for peer in peers if peer.time_ms == chosen)


def displaced(trajectory_id: str, peers: Sequence[Closed], general: Iterable[Feedback]) -> list[str]:
    """Which of the other `peers` lose feedback about their session, now that this trajectory is one of them."""
    others = [peer for peer in peers if peer.trajectory_id != trajectory_id]
    return sorted({name for one in general for name in targets(one, others) - targets(one, peers)})


def verdicts(said: Said, spoken: Iterable[str]) -> dict[Target, Feedback]:
    """The feedback that is valid for each target: the newest of its source. `spoken` are the turns of the branches.

    Feedback that lists some of the turns is about those; what lists them all, or none, is about the whole.
    """
    turns = frozenset(spoken)
    found: dict[Target, Feedback] = {}
    for one in said.all:
        if one.value is None and not one.withdrawn:
            continue  # it only brings context or names
        partly = bool(one.msg_ids) and not turns <= frozenset(one.msg_ids)
        for turn in sorted(turns.intersection(one.msg_ids)) if partly else [""]:
            found[turn, one.source] = one
    return found


def _order(feedback: Feedback) -> tuple[object, ...]:
    return (feedback.time, feedback.feedback_id)
