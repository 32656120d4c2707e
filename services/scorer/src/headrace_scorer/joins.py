"""Which feedback is about which trajectory, and what it says about it. Pure, and in whatever order they came (P10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback

Target = tuple[str, str]
"""A turn's id, empty for the trajectory as a whole, and a source."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Feedback as it stands on its log. `place` orders it among all that was said about its session.

    Turns and trajectories in front of `turns_until` and `trajectories_until` were there when it was given. Both are
    None where no gateway saw to it.
    """

    event: Feedback
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """What is known of a closed trajectory without reading it. Those of one closing have one time."""

    trajectory_id: str
    time_ms: int
    place: int
    """On `trajectories`."""
    began: int | None
    """Offset of its first turn; None when it was ingested, and began as it was sent."""

    def had_begun(self, heard: Heard) -> bool:
        """When the feedback was given."""
        place, until = (self.place, heard.trajectories_until) if self.began is None else (self.began, heard.turns_until)
        return until is not None and place < until

    @property
    def order(self) -> tuple[bool, int]:
        """Of beginning; what was ingested comes after what the gateway saw begin."""
        return (self.began is None, self.place if self.began is None else self.began)


@dataclass(frozen=True, slots=True)
class Said:
    """All the feedback about one trajectory, in the order in which it was said."""

    all: tuple[Feedback, ...]

    @property
    def listing(self) -> tuple[Feedback, ...]:
        """What lists turns of it."""
        return tuple(one for one in self.all if one.msg_ids)

    @property
    def general(self) -> tuple[Feedback, ...]:
        """What is about its session."""
        return tuple(one for one in self.all if not one.msg_ids)

    @property
    def parts(self) -> int:
        """Over how many sessions the run went."""
        return max((one.parts for one in self.listing), default=1)

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


def said_about(trajectory_id: str, peers: Sequence[Closed], listing: Iterable[Heard], general: Iterable[Heard]) -> Said:
    """`listing` lists turns of this trajectory, `general` is about the session whose trajectories are `peers`."""
    own = [one for one in general if trajectory_id in targets(one, peers)]
    ordered = sorted((*listing, *own), key=lambda one: (one.place, one.event.event_id))
    return Said(tuple(one.event for one in ordered))


def targets(heard: Heard, peers: Sequence[Closed]) -> frozenset[str]:
    """What feedback about a session means: what had begun last when it was given, else what began first after it.

    What was closed together is meant together. Where no gateway said what had begun, the times have to do: it is then
    about what was closed next, else about what was closed last.
    """
    if heard.turns_until is None:
        at_ms = epoch_ms(heard.event.time)
        later = [peer.time_ms for peer in peers if peer.time_ms >= at_ms]
        time_ms = min(later) if later else max((peer.time_ms for peer in peers), default=None)
        return frozenset(peer.trajectory_id for peer in peers if peer.time_ms == time_ms)
    begun = [peer for peer in peers if peer.had_begun(heard)]
    if begun:
        chosen = max(begun, key=lambda peer: peer.order)
    elif peers:
        chosen = min(peers, key=lambda peer: peer.order)
    else:
        return frozenset()
    return frozenset(peer.trajectory_id for peer in peers if peer.time_ms == chosen.time_ms)


def displaced(trajectory_id: str, peers: Sequence[Closed], general: Iterable[Heard]) -> list[str]:
    """Which of the other `peers` lose feedback about their session, now that this trajectory is one of them."""
    others = [peer for peer in peers if peer.trajectory_id != trajectory_id]
    return sorted({name for one in general for name in targets(one, others) - targets(one, peers)})


def verdicts(said: Said, spoken: Iterable[str]) -> dict[Target, Feedback]:
    """The feedback that is valid for each target: the last of its source. `spoken` are the turns of the branches.

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
