"""What the registry's decisions mean for the weights in training. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas import ModelEvent
from headrace_trainer.history import History


@dataclass(frozen=True, slots=True)
class Course:
    """Who is champion and who was before, and the version that the weights shall go back to, None to go on as they
    are."""

    promoted: tuple[str, ...]
    rewind: str | None = None


def follow(event: ModelEvent, history: History, promoted: tuple[str, ...]) -> Course:
    """`promoted` holds the champion and the one before it.

    The weights stay on the champion's line. They leave it when a version that they descend from is refused
    (`rejected`, `rolled_back`, `withdrawn`): then they go back to the champion, which is `previous` where the event
    names one of ours. And they return to it when another version becomes champion than the one they descend from,
    because the experiences to come will be its. Offsets, dedupe window and account are no part of this: what was read
    stays read.
    """
    if event.version not in history:
        return Course(promoted)
    if event.decision == "promoted":
        champions = (event.version, *(old for old in promoted if old != event.version))[:2]
        return Course(champions, None if history.descends_from(event.version) else event.version)
    if event.decision in {"rejected", "rolled_back", "withdrawn"}:
        remaining = tuple(old for old in promoted if old != event.version) or promoted
        target = event.previous if event.previous in history else remaining[0]
        assert target is not None
        champions = (target, *(old for old in remaining if old != target))[:2]
        return Course(champions, target if history.descends_from(event.version) else None)
    return Course(promoted)
