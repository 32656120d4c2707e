"""Effects of the registry's decisions on the weights: the version to go back to, and excluded answers to unlearn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from headrace_schemas import Experience, ModelEvent
from headrace_trainer.experiences.admission import find_objection
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.state import LineageState


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """Consequence of the registry's decision for the weights in training: keep them, or go back to an earlier
    version.
    """

    promoted: tuple[str, ...]
    """The champion and the one before it."""
    rewind_to: str | None = None
    """Version that the weights must go back to; None to keep them."""


def plan_control(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> ControlPlan:
    """Return the effect of a decision of the registry on the weights.

    The weights stay on the champion's line. They leave it when a version that they descend from is refused (`rejected`,
    `rolled_back`, `withdrawn`): then they go back to the champion. Versions that were published in between are children
    of the refused version and are not built on, promoted or not. The weights also return to the champion's line when a
    version becomes champion that they do not descend from, because the next experiences will come from it. Offsets,
    dedupe window and account stay as they are: records that were read stay read.

    Args:
        event: the decision.
        history: versions of the lineage.
        promoted: the champion and the one before it.
    """
    if event.decision == "promoted" and event.version in history:
        champions = (event.version, *(old for old in promoted if old != event.version))[:2]
        return ControlPlan(champions, None if history.descends_from(event.version) else event.version)
    if event.decision in {"rejected", "rolled_back", "withdrawn"}:
        return _plan_refusal(event, history, promoted)
    return ControlPlan(promoted)


def _plan_refusal(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> ControlPlan:
    """Return the effect of a refusal.

    Champions that descend from the refused version are removed as well, unless the registry names one as the version
    that serves.
    """
    refused = event.version
    serving = event.previous if event.previous in history else None
    if refused not in history and serving is None:
        return ControlPlan(promoted)
    remaining = tuple(old for old in promoted if not history.descends(old, refused))
    target = serving or next(iter(remaining), None) or _parent(refused, history) or promoted[0]
    champions = (target, *(old for old in remaining if old != target))[:2]
    return ControlPlan(champions, target if history.descends_from(refused) else None)


def _parent(version: str, history: History) -> str | None:
    parent = history[version].parent
    return parent if parent in history else None


def find_excluded_contributions(state: LineageState, version: str) -> dict[str, tuple[int, ...]]:
    """Return the experiences of an excluded version whose training the weights contain, each with its trained
    revisions.

    Pass the result to `queue_reversals`.
    """
    revisions_by_name: dict[str, tuple[int, ...]] = {}
    for name in state.window:
        entry = state.window.get(name)
        if entry is not None and state.history.first_excluded(entry.versions) == version:
            revisions = entry.held_revisions(state.history, state.steps)
            if revisions and entry.affects_weights(state.history, state.steps):
                revisions_by_name[name] = tuple(sorted(revisions))
    return revisions_by_name


def queue_reversals(
    state: LineageState,
    revisions_by_name: Mapping[str, Sequence[int]],
    experiences: Mapping[str, Experience],
    now: datetime,
) -> int:
    """Queue a correction for each experience of an excluded version, which reverses its contributions.

    Args:
        revisions_by_name: result of `find_excluded_contributions`.
        experiences: the experiences as they were read again from the bus.
        now: present time.

    Returns:
        The number of experiences that stay in the weights: too old to be trained, no longer on the bus, or without
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
