"""Feedback with its place in the order of what was said and done."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas import Feedback


@dataclass(frozen=True, slots=True)
class Heard:
    """`place` orders it among the feedback of its key. Turns in front of `turns_until` were there when it was given."""

    event: Feedback
    place: int
    turns_until: int
