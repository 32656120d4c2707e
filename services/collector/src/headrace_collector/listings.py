"""Feedback that lists turns, and what that says about runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Listing:
    """The turns that one feedback lists, and the run that it names, if it does."""

    turn_ids: frozenset[str]
    task_id: str | None
    run_id: str | None
    place: int
    """Of the feedback on its log."""

    def names_another_run_than(self, other: Listing) -> bool:
        if self.run_id is None or other.run_id is None:
            return False
        tasks_differ = self.task_id is not None and other.task_id is not None and self.task_id != other.task_id
        return tasks_differ or self.run_id != other.run_id


def by_name(listings: Sequence[Listing]) -> dict[str, str]:
    """Turn to the run id that the last of its lists gives it."""
    return {turn: one.run_id for one in _ordered(listings) if one.run_id for turn in one.turn_ids}


def by_overlap(listings: Sequence[Listing]) -> dict[str, str]:
    """Turn to the first turn of its group. Lists that overlap are one group. Equal run ids do not make a group, because
    clients count their runs from 0 again. A list with another run id than the lists it overlaps takes its turns.
    """
    groups: list[tuple[set[str], Listing]] = []
    for listing in _ordered(listings):
        members = set(listing.turn_ids)
        kept = []
        for group, last in groups:
            if group.isdisjoint(members):
                kept.append((group, last))
            elif listing.names_another_run_than(last):
                kept.append((group - listing.turn_ids, last))
            else:
                members |= group
                listing = listing if listing.run_id else replace(listing, task_id=last.task_id, run_id=last.run_id)
        groups = [*kept, (members, listing)]
    return {turn: min(group) for group, _ in groups for turn in group}


def _ordered(listings: Sequence[Listing]) -> list[Listing]:
    return sorted(listings, key=lambda one: one.place)
