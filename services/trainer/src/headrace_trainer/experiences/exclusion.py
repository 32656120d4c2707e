"""What a version answered that its rollout took back is taken out of the weights, as far as that can be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from headrace_schemas import Experience
from headrace_trainer.experiences.admission import objection
from headrace_trainer.experiences.state import LineageState


def held_of(state: LineageState, version: str) -> dict[str, tuple[int, ...]]:
    """The experiences that an excluded version answered and that the weights hold contributions of, each with the
    revisions that made them; `take_back` is to be told."""
    held: dict[str, tuple[int, ...]] = {}
    for name in state.window:
        entry = state.window.get(name)
        if entry is not None and state.history.excluded_of(entry.versions) == version:
            revisions = entry.held_revisions(state.history, state.steps)
            if revisions:
                held[name] = tuple(sorted(revisions))
    return held


def take_back(
    state: LineageState, held: Mapping[str, Sequence[int]], found: Mapping[str, Experience], now: datetime
) -> int:
    """Queue a correction for each experience that `held_of` returned: it takes out of the weights what they hold.

    `found` were read again from the bus. Returns how many stay in the weights: those that are too old to be trained
    (P5), whose tokens the bus no longer has, and those without room in the queue.
    """
    left = 0
    for name, revisions in held.items():
        experience = found.get(name)
        if state.waits(name):  # what waits is a correction, and takes back just as much
            state.note_undone(name, revisions)
        elif experience is not None and _correctable(state, experience):
            state.put_again(experience, now)
            state.note_undone(name, revisions, again=experience.revision)
        else:
            left += 1
    return left


def _correctable(state: LineageState, experience: Experience) -> bool:
    """Whether it can be queued, and is the last word that was read about it."""
    entry = state.window.get(experience.experience_id)
    if entry is None or experience.revision != entry.revisions[-1] or not state.room:
        return False
    return objection(experience, entry, state.history, state.steps, state.limits) is None
