"""Removes the answers of an excluded version from the weights, as far as its experiences can still be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from headrace_schemas import Experience
from headrace_trainer.experiences.admission import find_objection
from headrace_trainer.experiences.state import LineageState


def find_excluded_contributions(state: LineageState, version: str) -> dict[str, tuple[int, ...]]:
    """Return the experiences of an excluded version that the weights hold contributions of, with their revisions.

    Pass the result to `take_back`.
    """
    revisions_by_name: dict[str, tuple[int, ...]] = {}
    for name in state.window:
        entry = state.window.get(name)
        if entry is not None and state.history.first_excluded(entry.versions) == version:
            revisions = entry.held_revisions(state.history, state.steps)
            if revisions and entry.holds(state.history, state.steps):
                revisions_by_name[name] = tuple(sorted(revisions))
    return revisions_by_name


def take_back(
    state: LineageState,
    revisions_by_name: Mapping[str, Sequence[int]],
    experiences: Mapping[str, Experience],
    now: datetime,
) -> int:
    """Queue a correction for each experience that `held_of` returned. The correction reverses its contributions.

    Args:
        state: The state of the lineage.
        held: Revisions of each experience.
        found: The experiences as they were read again from the bus.
        now: The present time.

    Returns:
        The number of experiences that stay in the weights: too old to be trained (P5), no longer on the bus, or without
        room in the queue.
    """
    remaining = 0
    for name, revisions in revisions_by_name.items():
        experience = experiences.get(name)
        if state.is_waiting(name):  # the waiting revision is a correction already and reverses just as much
            state.note_undone(name, revisions)
        elif experience is not None and _correctable(state, experience):
            state.put_again(experience, now)
            state.note_undone(name, revisions, again=experience.revision)
        else:
            remaining += 1
    return remaining


def _correctable(state: LineageState, experience: Experience) -> bool:
    """Return whether the experience can be queued and is the newest revision that was read."""
    entry = state.window.get(experience.experience_id)
    if entry is None or experience.revision != entry.revisions[-1] or not state.room:
        return False
    return find_objection(experience, entry, state.history, state.steps, state.limits) is None
