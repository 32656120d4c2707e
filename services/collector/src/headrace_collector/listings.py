"""Feedback that lists turns, and the runs that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Listing:
    """The turns that one feedback lists, and the run that it names, if any."""

    turn_ids: frozenset[str]
    task_id: str | None
    run_id: str | None
    log_offset: int
    """Offset of the feedback."""

    def names_another_run_than(self, other: Listing) -> bool:
        if self.run_id is None or other.run_id is None:
            return False
        tasks_differ = self.task_id is not None and other.task_id is not None and self.task_id != other.task_id
        return tasks_differ or self.run_id != other.run_id


def run_ids_by_turn(listings: Sequence[Listing]) -> dict[str, str]:
    """Return for each turn the run id that the last of its listings gives it."""
    return {turn: listing.run_id for listing in _ordered(listings) if listing.run_id for turn in listing.turn_ids}


def groups_by_turn(listings: Sequence[Listing]) -> dict[str, str]:
    """Return for each listed turn the first turn of its group.

    Listings that overlap are one group. Equal run ids do not make a group, because clients count their runs from 0
    again. A listing with another run id than the listings that it overlaps takes its turns out of their group.
    """
    groups: list[tuple[set[str], Listing]] = []
    for listing in _ordered(listings):
        members = set(listing.turn_ids)
        remaining = []
        for group, last in groups:
            if group.isdisjoint(members):
                remaining.append((group, last))
            elif listing.names_another_run_than(last):
                remaining.append((group - listing.turn_ids, last))
            else:
                members |= group
                listing = listing if listing.run_id else replace(listing, task_id=last.task_id, run_id=last.run_id)
        groups = [*remaining, (members, listing)]
    return {turn: min(group) for group, _ in groups for turn in group}


def _ordered(listings: Sequence[Listing]) -> list[Listing]:
    return sorted(listings, key=lambda listing: listing.log_offset)
