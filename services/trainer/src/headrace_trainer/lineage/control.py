"""Decides which version the weights in training must go back to after a decision of the registry. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas import ModelEvent
from headrace_trainer.experiences.history import History


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """The champion and its predecessor, and the version that the weights must go back to; None to keep the weights."""

    promoted: tuple[str, ...]
    rewind_to: str | None = None


def plan_control(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> ControlPlan:
    """Return the champions after a decision of the registry, and the version that the weights must go back to.

    The weights stay on the champion's line. They leave it when a version that they descend from is refused
    (`rejected`, `rolled_back`, `withdrawn`): then they go back to the champion. Versions that were published in between
    are children of the refused version and are not built on, promoted or not. The weights also return to the champion's
    line when a version becomes champion that they do not descend from, because the next experiences will come from it.
    Offsets, dedupe window and account stay as they are: records that were read stay read.

    Args:
        event: The decision.
        history: The versions of the lineage.
        promoted: The champion and the one before it.
    """
    if event.decision == "promoted" and event.version in history:
        champions = (event.version, *(old for old in promoted if old != event.version))[:2]
        return ControlPlan(champions, None if history.descends_from(event.version) else event.version)
    if event.decision in {"rejected", "rolled_back", "withdrawn"}:
        return _plan_refusal(event, history, promoted)
    return ControlPlan(promoted)


def _plan_refusal(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> ControlPlan:
    """Return the course after a refusal. The champions that descend from the refused version go as well, unless the
    registry names one of them as the version that serves."""
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
