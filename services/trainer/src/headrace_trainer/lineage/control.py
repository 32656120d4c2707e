"""Effects of the registry's decisions on the weights: resets to earlier versions, and reversals of excluded answers."""

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
    """Effect of a decision of the registry on the weights in training: keep them, or reset them to another version."""

    promoted: tuple[str, ...]
    """The champion and the one before it."""
    rewind_to: str | None = None
    """Version that the weights must go back to; None to keep them."""


def plan_control(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> ControlPlan:
    """Return the effect of a decision of the registry on the weights.

    The weights in training must descend from the champion. So if the registry refuses a version that they descend from
    (`rejected`, `rolled_back`, `withdrawn`), they are reset to the champion, and versions that descend from the refused
    one are abandoned, promoted or not. The weights are also reset if a version becomes champion that they do not
    descend from, because the next experiences will come from it. Offsets, dedupe window and account do not change, so
    no record is read again.

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
    """Return the effect of the refusal of a version.

    Champions that descend from the refused version are refused as well, except the one that the event names as the
    version that serves again.
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
    """Return the experiences with answers of an excluded version that still affect the weights in training.

    Pass the result to `queue_reversals`.

    Returns:
        The revisions whose contributions the weights contain, by experience id.
    """
    revisions_by_name: dict[str, tuple[int, ...]] = {}
    for name in state.window:
        entry = state.window.get(name)
        if entry is not None and state.history.find_excluded(entry.versions) == version:
            revisions = entry.revisions_in_weights(state.history, state.steps)
            if revisions and entry.affects_weights(state.history, state.steps):
                revisions_by_name[name] = tuple(sorted(revisions))
    return revisions_by_name


def queue_reversals(
    state: LineageState,
    revisions_by_name: Mapping[str, Sequence[int]],
    experiences: Mapping[str, Experience],
    now: datetime,
) -> int:
    """Queue experiences with answers of an excluded version for a correction: a training that removes what they
    contributed to the weights.

    Args:
        revisions_by_name: result of `find_excluded_contributions`.
        experiences: the experiences as they were read again from the bus.
        now: present time.

    Returns:
        The number of experiences whose contributions stay in the weights, because the experience is too old to be
            trained or no longer on the bus, or the queue has no room.
    """
    remaining = 0
    for name, revisions in revisions_by_name.items():
        experience = experiences.get(name)
        if state.is_waiting(name):  # the waiting revision is a correction already and reverses just as much
            state.record_reversal(name, revisions)
        elif experience is not None and _can_be_corrected(state, experience):
            state.requeue(experience, now)
            state.record_reversal(name, revisions, again=experience.revision)
        else:
            remaining += 1
    return remaining


def _can_be_corrected(state: LineageState, experience: Experience) -> bool:
    """Return whether the queue can admit the experience, it is fresh, and it is the newest revision that was read."""
    entry = state.window.get(experience.experience_id)
    if entry is None or experience.revision != entry.revisions[-1] or not state.room:
        return False
    return find_objection(experience, entry, state.history, state.steps, state.limits) is None
