"""What the registry's decisions mean for the weights in training. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas import ModelEvent
from headrace_trainer.experiences.history import History


@dataclass(frozen=True, slots=True)
class Course:
    """Who is champion and who was before, and the version that the weights shall go back to, None to go on as they
    are."""

    promoted: tuple[str, ...]
    rewind: str | None = None


def follow(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> Course:
    """`promoted` holds the champion and the one before it.

    The weights stay on the champion's line. They leave it when a version that they descend from is refused
    (`rejected`, `rolled_back`, `withdrawn`): then they go back to the champion. Whatever was published in between is
    a child of the refused version and is not built on, promoted or not. And they return to the champion's line when
    another version becomes champion than the one they descend from, because the experiences to come will be its.
    Offsets, dedupe window and account are no part of this: what was read stays read.
    """
    if event.decision == "promoted" and event.version in history:
        champions = (event.version, *(old for old in promoted if old != event.version))[:2]
        return Course(champions, None if history.descends_from(event.version) else event.version)
    if event.decision in {"rejected", "rolled_back", "withdrawn"}:
        return _without(event, history, promoted)
    return Course(promoted)


def _without(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> Course:
    """The refused version is out, and with it the champions that hold what it learned, unless the registry says that
    one of them serves."""
    refused = event.version
    named = event.previous if event.previous in history else None
    if refused not in history and named is None:
        return Course(promoted)
    remaining = tuple(old for old in promoted if not history.descends(old, refused))
    target = named or next(iter(remaining), None) or _parent(refused, history) or promoted[0]
    champions = (target, *(old for old in remaining if old != target))[:2]
    return Course(champions, target if history.descends_from(refused) else None)


def _parent(version: str, history: History) -> str | None:
    parent = history[version].parent
    return parent if parent in history else None
