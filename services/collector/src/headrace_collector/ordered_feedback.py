"""Feedback with its position in the order of feedback and turns."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas import Feedback


@dataclass(frozen=True, slots=True)
class OrderedFeedback:
    """`place` is its offset. Turns before offset `turns_until` existed when the feedback was given."""

    event: Feedback
    place: int
    turns_until: int
    name: str = ""
    """The `event_id` of its row."""
